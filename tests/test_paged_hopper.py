"""Prompts on Hopper: which calls the kernel serves, and, on such a GPU, what it computes.

Legend: T tokens, H query heads, D head size, S block size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hopper_compiler import run_for_hopper
from paged_batches import (  # noqa: F401 (pytestmark)
    BF16,
    CUDA,
    DEVICE,
    E4M3,
    F16,
    F32,
    SINKS,
    SLOPES,
    Batch,
    Options,
    check,
    make_batch,
    poison,
    pytestmark,
)
from test_triton_new_tokens import forget_new_rows, own

from attnbackend import CommonAttentionMetadata
from attnbackend.backends.triton_attn import TritonMetadataBuilder
from attnbackend.impl import AttentionParams
from attnbackend.kernels.triton import paged_attention
from attnbackend.kernels.triton import paged_hopper_launch as hopper
from attnbackend.kernels.triton.launch import prepare
from attnbackend.kernels.triton.paged_hopper_launch import Matrix, matrix_of
from attnbackend.kv_cache import spec_of

HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9
ROWS = [
    (400, 400),
    (300, 777),
    (0, 0),
    (130, 130),
    (3, 700),
    (261, 517),
    (129, 5),
    (1, 1),
    (0, 9),
    (128, 128),
]
"""New, with context, without tokens, of whole steps, with more queries than keys."""


def hopper_problem(batch: Batch, options: Options, num_splits: int | None = 1) -> str | None:
    output = poison((*batch.query.shape[:2], batch.value_cache.shape[3]), batch.query.dtype)
    launch = prepare(
        "test", *batch.tensors(output), options.scale, options.causal, options.sliding_window,
        options.attention_chunk_size, options.logits_soft_cap, options.alibi_slopes, options.sinks, None,
        batch.k_scale, batch.v_scale, None, None, None,
    )  # type: ignore[arg-type]  # fmt: skip
    return hopper.problem(launch, num_splits)


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {}, None),
        ({"dtype": F16, "block_size": 48, "dim": 64, "kv_heads": 1}, {}, None),
        ({"layout": "HND"}, {}, None),
        ({"layout": "layers interleaved"}, {}, None),
        ({"rows": [(300, 300), (1, 9), (1, 9)]}, {}, "128 tokens or more"),
        ({}, {"causal": False}, "causal over all keys"),
        ({}, {"sliding_window": 9}, "causal over all keys"),
        ({}, {"logits_soft_cap": 9.0}, "causal over all keys"),
        ({"dim": 96}, {}, "head size is 96"),
        ({"value_dim": 64}, {}, "head size is 128"),
        ({"dtype": F32}, {}, "one type of 16 bits"),
        ({"cache_dtype": E4M3}, {}, "one type of 16 bits"),
        ({}, {"alibi_slopes": SLOPES}, "no slopes"),
        ({}, {"sinks": SINKS}, "no slopes"),
        ({"k_scale": [2.0]}, {}, "no slopes"),
        ({}, {"scale": -1.0}, "no scale of 0 or less"),
    ],
)  # fmt: skip
def test_the_kernel_takes(
    changes: dict[str, Any], options: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "device_problem", lambda device: None)
    rows = changes.pop("rows", [(300, 300)])
    batch = make_batch(rows, **{"dim": 128, "dtype": BF16} | changes)
    found = hopper_problem(batch, Options(**options))
    assert found is None if words is None else words in str(found)
    assert hopper_problem(batch, Options(**options), num_splits=2) is not None


def test_queries_lie_in_aligned_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "device_problem", lambda device: None)
    batch = make_batch([(300, 300)], dim=128, dtype=BF16)
    tokens, heads, size = batch.query.shape
    for wide, first, words in ((144, 0, None), (144, 8, None), (136, 0, "lines of"), (144, 4, "lines of")):
        query = batch.query.new_zeros(tokens, heads, wide)[..., first : first + size]
        found = hopper_problem(replace(batch, query=query), Options())
        assert found is None if words is None else words in str(found), (wide, first)


@pytest.mark.skipif(CUDA, reason="only a process without a GPU has no device for it")
def test_the_kernel_needs_a_gpu() -> None:
    assert "CUDA" in str(hopper_problem(make_batch([(300, 300)], dim=128, dtype=BF16), Options()))


@pytest.mark.parametrize(
    ("strides", "matrix"),
    [
        # [B, 2, S, Hk, D], [B, 2, Hk, S, D], and either within a wider row.
        ((2 * 16 * 512, 512, 128), Matrix(9 * 32 + 16, 512, 512, 32, 0, 128)),
        ((2 * 16 * 512, 128, 16 * 128), Matrix(9 * 128 + 3 * 16 + 16, 128, 128, 128, 16, 0)),
        ((16 * 1024, 1024, 128), Matrix(9 * 16 + 16, 512, 1024, 16, 0, 128)),
        ((2 * 16 * 512 + 4, 512, 128), None),
        ((2 * 16 * 516, 516, 128), None),
        ((0, 512, 128), None),
    ],
)
def test_a_cache_is_a_matrix_of_slots(strides: tuple[int, ...], matrix: Matrix | None) -> None:
    """Ten blocks of 16 slots of 4 heads of 128."""
    shape = (10, 16, 4, 128)
    found = matrix_of(shape, (*strides, 1))
    assert found == matrix
    if found is not None:
        for place in ((0, 0, 0, 0), (9, 15, 3, 127), (4, 7, 2, 64)):
            block, slot, head, column = place
            row = block * found.block_rows + head * found.head_rows + slot
            offset = row * found.stride + head * found.head_columns + column
            assert offset == sum(a * b for a, b in zip(place, (*strides, 1), strict=True))
            assert row < found.rows
            assert head * found.head_columns + column < found.columns


def test_steps_are_short_for_short_requests() -> None:
    assert [hopper.keys_of_step(128, longest) for longest in (512, 1024, 1025)] == [64, 64, 128]
    assert hopper.keys_of_step(256, 4096) == hopper.keys_of_step(256, 512) == 64


def test_programs_share_a_multiprocessor_for_short_heads_and_requests() -> None:
    assert [hopper.shape_of(64, longest) for longest in (4096, 4097)] == [hopper.ALONE, hopper.LONG]
    assert all(hopper.shape_of(size, 512).programs == 1 for size in (128, 256))


COMPILE = """
from attnbackend.kernels.triton import checks, paged_hopper, paged_hopper_launch as hopper
from attnbackend.kernels.triton.launch import NO_OWN_TOKENS, prepare

checks.check_device = lambda *a: None
hopper.processor_count = lambda device: 132
kernel = paged_hopper.paged_hopper_kernel

class Warm:
    def __getitem__(self, grid):
        def compile(*args, **kwargs):
            made = kernel.warmup(*args, grid=(1,), **kwargs)
            print(grid[0], made.metadata.shared, made.asm["ptx"].count(".maxnreg 80"))
        return compile

paged_hopper.paged_hopper_kernel = Warm()
query, ints = torch.empty(8192, 16, 64, dtype=torch.bfloat16), torch.zeros(17, 17, dtype=torch.int32)
keys, values = torch.empty(2, 9, 16, 16, 64, dtype=torch.bfloat16)
tensors = query, keys, values, query, ints[0], ints[0, 1:], ints[1:]
call = prepare("test", *tensors, 0.125, True, None, None, 0.0, *[None] * 9)
for longest in (512, 8192):
    hopper.launch_hopper(call, NO_OWN_TOKENS, longest)
"""


def test_three_programs_fit_on_a_multiprocessor(tmp_path: Path) -> None:
    lines = run_for_hopper(COMPILE, tmp_path)
    short, long = ([int(x) for x in line.split()] for line in lines)
    assert short[0] == 3 * 132
    assert 3 * (short[1] + 1024) <= 228 * 1024
    assert short[2] == 1
    assert long[0] == 132


PLAIN: dict[str, Any] = {
    "num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": BF16, "kv_cache_dtype": "auto",
    "block_size": 16, "device_type": "cuda", "scale": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "changes", "leads"),
    [
        ([(1024, 1024)] * 4, {}, True),
        ([(700, 700), (0, 900)] * 6, {}, True),
        ([(2048, 2048)] * 4, {}, True),
        ([(2048, 2048)] * 3 + [(2047, 2047)], {}, False),
        ([(2049, 2049)] * 5, {}, False),
        ([(700, 700)] * 6 + [(300, 301)], {}, False),
        ([(700, 700)] * 6 + [(300, 5)], {}, False),
        ([(127, 127)] * 40, {}, False),
        ([(1024, 1024)] * 3 + [(1023, 1023)], {}, False),
        ([(1024, 1024)] * 4, {"sliding_window": 2000}, False),
        ([(1024, 1024)] * 4, {"logits_soft_cap": 9.0}, False),
        ([(1024, 1024)] * 4, {"causal": False}, False),
        ([(1024, 1024)] * 4, {"kv_cache_dtype": "fp8_e4m3"}, False),
        ([(1024, 1024)] * 4, {"dtype": F32}, False),
        ([(1024, 1024)] * 4, {"head_size": 96}, False),
        ([(4096, 4096)], {"head_size": 64}, True),
        ([(4097, 4097)] * 4, {"head_size": 64}, False),
        ([(8192, 8192)], {"head_size": 64}, False),
        ([(8192, 8192)], {"head_size": 64, "clean_pages": True}, True),
        ([(8193, 8193)], {"head_size": 64, "clean_pages": True}, False),
        ([(2048, 2048)] * 3, {"clean_pages": True}, False),
    ],
)
def test_triton_leads_on_many_short_prompts_without_context(
    rows: list[tuple[int, int]], changes: dict[str, Any], leads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "device_problem", lambda device: None)
    params = AttentionParams(**PLAIN | changes)
    builder = TritonMetadataBuilder(params, spec_of(params), None, torch.device("cpu"))
    queries, lens = (torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True))
    starts = torch.cat([queries.new_zeros(1), queries.cumsum(0, dtype=torch.int32)])
    batch = CommonAttentionMetadata(
        query_start_loc=starts, seq_lens=lens, block_table=lens[:, None], num_reqs=len(rows),
        num_actual_tokens=int(queries.sum()), max_query_len=int(queries.max()), max_seq_len=int(lens.max()),
        query_start_loc_cpu=starts, seq_lens_cpu=lens,
    )  # fmt: skip
    assert builder.leads_on_prompts(batch) is leads
    assert not builder.leads_on_prompts(batch.replace(seq_lens_cpu=None)), "lengths are not known"


@pytest.fixture(params=[7, 100_000], ids=["programs take turns", "a program a tile"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a launch of the kernel, on a device of so many processors."""
    launches: list[int] = []
    launch: Callable[..., None] = hopper.launch_hopper

    def counted(*args: Any) -> None:
        launches.append(1)
        launch(*args)

    monkeypatch.setattr(hopper, "launch_hopper", counted)
    monkeypatch.setattr(hopper, "processor_count", lambda device: request.param)
    return launches


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9")
@pytest.mark.parametrize("reads_own", [False, True], ids=["from pages", "new tokens where they lie"])
@pytest.mark.parametrize(
    "shape",
    [
        {}, {"layout": "HND"}, {"layout": "layers interleaved"}, {"dtype": F16}, {"block_size": 48},
        {"block_size": 64}, {"block_size": 256}, {"dim": 64, "kv_heads": 8},
        {"dim": 64, "heads": 5, "kv_heads": 1}, {"dim": 64, "rows": [*ROWS, (300, 4500)]},
        {"dim": 256, "kv_heads": 1}, {"heads": 14, "kv_heads": 2}, {"heads": 32, "kv_heads": 1},
    ],
    ids=str,
)  # fmt: skip
def test_prompts_equal_dense_attention(shape: dict[str, Any], reads_own: bool, served: list[int]) -> None:
    options = {"rows": ROWS, "heads": 8, "dim": 128, "dtype": BF16} | shape
    batch = make_batch(options.pop("rows"), tail=3, **options)
    extra: dict[str, Any] = {}
    if reads_own:
        key, value = own(batch)
        extra = {"key": key, "value": value}
        if batch.key_cache.shape[1] == 16:
            forget_new_rows(batch)
    check(paged_attention, batch, Options(batch.query.shape[2] ** -0.5), **extra)
    assert served == [1]
    assert DEVICE == "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9")
def test_replays_take_all_tiles_anew(served: list[int]) -> None:
    batch = make_batch(ROWS, heads=8, dim=128, dtype=BF16)
    output = poison(batch.query.shape, BF16)
    paged_attention(*batch.tensors(output), scale=0.1)
    expected = output.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(*batch.tensors(output), scale=0.1)
    for _ in range(2):
        output.fill_(float("nan"))
        graph.replay()
        assert torch.equal(output, expected)
    assert served == [1, 1]
