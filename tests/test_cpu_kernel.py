"""The C++ CPU kernels against a dense float64 reference written as loops.

Shapes: T tokens, R requests, H query heads, Hk kv heads, D head size, Dv value head size,
B cache blocks, S slots a block, W blocks a request, L keys of a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbackend.kernels.cpu import (
    _attention,
    _build,
    _cache_write,
    cache_write,
    paged_attention,
    unavailable_reason,
)
from attnbackend.kernels.cpu._target import Target, runnable_targets

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no C++ kernels: {unavailable_reason()}"
)

NAN, INF = float("nan"), float("inf")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("NHD", "HND", "interleaved layers")


@dataclass(frozen=True)
class Case:
    """What a batch looks like and which features its attention uses."""

    query_lens: tuple[int, ...] = (1, 5, 0, 40, 1)
    contexts: tuple[int, ...] = (70, 3, 0, 90, 0)
    heads: int = 6
    kv_heads: int = 2
    head_size: int = 64
    value_size: int = 0  # 0: head_size
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    layout: str = "NHD"
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Bidirectional ranges of the first requests; the others have none."""
    own_keys: bool = False
    """No cache: keys are the tokens' own, and contexts are 0 (or minus the query's length)."""
    soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    scales: int = 0  # 0: none, 1: one for all heads, 2: one a head
    padded_rows: int = 0
    tail_tokens: int = 0
    poison: float = NAN
    spread: float = 1.0


@dataclass
class Batch:
    """Inputs of one call, and the dense real keys and values of every request."""

    case: Case
    query_THD: Tensor
    kv_cache: Tensor
    tables: tuple[Tensor, Tensor, Tensor]  # query_start_loc, seq_lens, block_table
    keys_LHD: list[Tensor]
    values_LHD: list[Tensor]
    options: dict[str, Any]


def empty_cache(case: Case, blocks: int) -> Tensor:
    """A poisoned [B, 2, S, Hk, D'] view; K and V of different sizes use the front of D'."""
    size = max(case.head_size, case.value_size)
    sizes = (blocks, 2, case.block_size, case.kv_heads, size)
    if case.layout == "HND":
        sizes = (blocks, 2, case.kv_heads, case.block_size, size)
    if case.layout == "interleaved layers":
        buffer = torch.full((blocks, 3, *sizes[1:]), case.poison).to(case.cache_dtype)
        return buffer[:, 1]
    cache = torch.full(sizes, case.poison).to(case.cache_dtype)
    return cache.transpose(2, 3) if case.layout == "HND" else cache


def make_tables(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    lens = [q + c for q, c in zip(case.query_lens, case.contexts, strict=True)]
    needed = [math.ceil(n / case.block_size) for n in lens]
    order = (torch.randperm(sum(needed) + 3, generator=generator) + 1).tolist()
    rows = len(lens) + case.padded_rows
    table = torch.zeros(rows, max(needed, default=0) + 2, dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        table[row, count:] = 2**31 - 1  # never to be followed
    starts = torch.zeros(rows + 1, dtype=torch.int32)
    starts[1 : len(lens) + 1] = torch.tensor(case.query_lens, dtype=torch.int32).cumsum(0)
    starts[len(lens) + 1 :] = starts[len(lens)]
    seq_lens = torch.zeros(rows, dtype=torch.int32)
    seq_lens[: len(lens)] = torch.tensor(lens, dtype=torch.int32)
    return starts, seq_lens, table


def make_options(case: Case, generator: torch.Generator) -> dict[str, Any]:
    def scale() -> Tensor | None:
        count = (0, 1, case.kv_heads)[case.scales]
        return torch.rand(count, generator=generator) + 0.5 if count else None

    slopes = torch.rand(case.heads, generator=generator) * 0.2
    sinks = torch.randn(case.heads, generator=generator)
    return {
        "alibi_slopes": slopes if case.alibi else None,
        "sinks": sinks if case.sinks else None,
        "k_scale": scale(),
        "v_scale": scale(),
        "bidirectional_ranges": make_ranges(case),
    }


def make_ranges(case: Case) -> Tensor | None:
    """int32 [R, G, 2], empty ranges after those given."""
    if not case.ranges:
        return None
    rows, most = len(case.query_lens) + case.padded_rows, max(map(len, case.ranges))
    ranges = torch.tensor([9, 9], dtype=torch.int32).repeat(rows, most, 1)
    for row, given in enumerate(case.ranges):
        for place, pair in enumerate(given):
            ranges[row, place] = torch.tensor(pair)
    return ranges


def make_batch(case: Case, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    case = replace(case, value_size=case.value_size or case.head_size)
    starts, seq_lens, table = make_tables(case, generator)
    blocks = int(table[table < 2**31 - 1].max()) + 4
    cache = empty_cache(case, blocks)
    keys, values = [], []
    options = make_options(case, generator)
    for row, length in enumerate(seq_lens.tolist()):
        shape = (length, case.kv_heads)
        key = torch.randn(*shape, case.head_size, generator=generator).to(case.cache_dtype)
        value = torch.randn(*shape, case.value_size, generator=generator).to(case.cache_dtype)
        for position in range(length):
            block = int(table[row, position // case.block_size])
            slot = position % case.block_size
            cache[block, 0, slot, :, : case.head_size] = key[position]
            cache[block, 1, slot, :, : case.value_size] = value[position]
        keys.append(real(key, options["k_scale"]))
        values.append(real(value, options["v_scale"]))
    tokens = int(starts[-1]) + case.tail_tokens
    query = torch.randn(tokens, case.heads, case.head_size, generator=generator) * case.spread
    return Batch(case, query.to(case.dtype), cache, (starts, seq_lens, table), keys, values, options)


def real(stored: Tensor, scale: Tensor | None) -> Tensor:
    factor = torch.ones(1) if scale is None else scale
    return stored.double() * factor.double().view(1, -1, 1)


def visible(case: Case, row: int, length: int, position: int) -> Tensor:
    keys = torch.arange(length)
    mask = torch.ones(length, dtype=torch.bool)
    if case.causal:
        mask &= keys <= position
    if case.window is not None:
        mask &= keys > position - case.window
        if case.own_keys and not case.causal:
            mask &= keys < position + case.window
    if case.chunk is not None:
        mask &= keys // case.chunk == position // case.chunk
    for start, end in case.ranges[row] if row < len(case.ranges) else ():
        if start <= position < end:
            mask |= (keys >= start) & (keys < end)
    return mask


def dense_token(
    batch: Batch, row: int, token: int, position: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output [H, Dv] and natural LSE [H] of one token, every step in `dtype`."""
    case = batch.case
    group = case.heads // case.kv_heads
    key_HLD = batch.keys_LHD[row].to(dtype).repeat_interleave(group, 1).transpose(0, 1)
    value_HLD = batch.values_LHD[row].to(dtype).repeat_interleave(group, 1).transpose(0, 1)
    length = key_HLD.shape[1]
    score_HL = (key_HLD @ batch.query_THD[token].to(dtype)[:, :, None])[:, :, 0]
    score_HL = score_HL * case.head_size**-0.5
    if case.soft_cap > 0:
        score_HL = case.soft_cap * torch.tanh(score_HL / case.soft_cap)
    slopes, sinks = batch.options["alibi_slopes"], batch.options["sinks"]
    if slopes is not None:
        distance = (torch.arange(length) - position).abs()
        score_HL = score_HL - slopes[:, None].to(dtype) * distance.to(dtype)
    seen_HL = score_HL[:, visible(case, row, length, position)]
    logits = seen_HL
    if sinks is not None and length > 0:
        logits = torch.cat([seen_HL, sinks[:, None].to(dtype)], 1)
    lse_H = torch.logsumexp(logits, 1)  # -inf over nothing
    weight_HL = torch.exp(seen_HL - lse_H[:, None])
    value_HLD = value_HLD[:, visible(case, row, length, position)]
    return (weight_HL[:, None] @ value_HLD)[:, 0], lse_H


def dense(batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output [T, H, Dv] and LSE [T, H] of the whole batch in `dtype`."""
    case, (starts, seq_lens, _) = batch.case, batch.tables
    tokens = batch.query_THD.shape[0]
    output = torch.zeros(tokens, case.heads, case.value_size, dtype=dtype)
    lse = torch.full((tokens, case.heads), -INF, dtype=dtype)
    for row, length in enumerate(seq_lens.tolist()):
        start, end = int(starts[row]), int(starts[row + 1])
        for token in range(start, end):
            position = length - (end - start) + token - start
            output[token], lse[token] = dense_token(batch, row, token, position, dtype)
    return output, lse


def own_keys(batch: Batch) -> tuple[Tensor, Tensor]:
    """key and value [T, Hk, D'] as views of one buffer, NaN where no request's keys are."""
    case, (starts, _, _) = batch.case, batch.tables
    size = max(case.head_size, case.value_size)
    fused = torch.full((batch.query_THD.shape[0], 2, case.kv_heads, size), NAN).to(case.cache_dtype)
    for row, (keys, values) in enumerate(zip(batch.keys_LHD, batch.values_LHD, strict=True)):
        at = slice(int(starts[row]), int(starts[row]) + len(keys))
        fused[at, 0, :, : case.head_size] = keys.to(case.cache_dtype)
        fused[at, 1, :, : case.value_size] = values.to(case.cache_dtype)
    return fused[:, 0], fused[:, 1]


def run(batch: Batch, with_lse: bool = True) -> tuple[Tensor, Tensor]:
    case = batch.case
    tokens = batch.query_THD.shape[0]
    output = torch.full((tokens, case.heads, case.value_size), NAN, dtype=case.dtype)
    lse = torch.full((tokens, case.heads), NAN)
    keys, values = own_keys(batch) if case.own_keys else (batch.kv_cache[:, 0], batch.kv_cache[:, 1])
    starts, seq_lens, table = batch.tables
    paged_attention(
        batch.query_THD,
        keys[..., : case.head_size],
        values[..., : case.value_size],
        output,
        starts,
        seq_lens,
        None if case.own_keys else table,
        scale=case.head_size**-0.5,
        causal=case.causal,
        sliding_window=case.window,
        attention_chunk_size=case.chunk,
        logits_soft_cap=case.soft_cap,
        lse=lse if with_lse else None,
        **batch.options,
    )
    return output, lse


def assert_as_good_as_torch(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Error at most twice that of plain float32 torch rounded to the same dtype, plus an ulp."""
    finite = torch.isfinite(exact)
    assert torch.equal(got[~finite].double(), exact[~finite])
    if not finite.any():
        return
    plain_error = (plain.to(got.dtype).double() - exact)[finite].abs().max().item()
    error = (got.double() - exact)[finite].abs().max().item()
    ulp = torch.finfo(got.dtype).eps * max(exact[finite].abs().max().item(), 1.0)
    assert error <= 2 * plain_error + ulp, f"error {error}, plain torch {plain_error}, ulp {ulp}"


def check(case: Case, seed: int = 0, threads: int = 2) -> None:
    with thread_count(1):  # many small products
        batch = make_batch(case, seed)
        exact_output, exact_lse = dense(batch, torch.float64)
        plain_output, plain_lse = dense(batch, torch.float32)
    with thread_count(threads):
        output, lse = run(batch)
    assert_as_good_as_torch(output, plain_output, exact_output)
    assert_as_good_as_torch(lse, plain_lse, exact_lse)


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 4], ids=["one thread", "four threads"])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


ALL: dict[str, Any] = {"window": 20, "soft_cap": 1.5, "alibi": True, "sinks": True}
FEATURES = {
    "plain": Case(),
    "one kv head for all": Case(heads=5, kv_heads=1),
    "a kv head a query head": Case(heads=4, kv_heads=4),
    "a group larger than a tile": Case((2, 1), (5, 66), heads=130, kv_heads=1, head_size=32),
    "window": Case(window=7),
    "window of one": Case(window=1),
    "window without causality": Case(window=7, causal=False),
    "not causal": Case(causal=False),
    "soft-cap": Case(soft_cap=0.7, spread=3.0),
    "alibi": Case(alibi=True),
    "sinks": Case(sinks=True),
    "everything at once": Case(**ALL),
    "everything at once without causality": Case(**ALL, causal=False),
    "large scores": Case(spread=40.0),
    "padded rows and tail tokens": Case(padded_rows=3, tail_tokens=4),
    "padded rows and tail tokens with sinks": Case(padded_rows=3, tail_tokens=4, sinks=True),
    "seq_len 0 with query tokens": Case((2, 1, 20), (-2, 30, -20)),
    "seq_len 0 with query tokens and sinks": Case((2, 1, 20), (-2, 30, -20), sinks=True),
    "fewer keys than query tokens": Case((5, 30), (-3, -12), sinks=False),
    "fewer keys than query tokens with sinks": Case((5, 30), (-3, -12), sinks=True),
    "unused cache is inf": Case(poison=INF),
    "values smaller than keys": Case(head_size=96, value_size=64),
    "values larger than keys": Case(head_size=40, value_size=72),
    "one slot a block": Case(block_size=1),
    "blocks of 48": Case(block_size=48),
    "blocks larger than a tile": Case(block_size=128),
    "alibi without causality": Case(alibi=True, causal=False),
    "chunks": Case(chunk=7),
    "chunks of one": Case(chunk=1),
    "chunks larger than a tile": Case((1, 90, 70), (150, 60, 0), chunk=100, soft_cap=1.5, alibi=True),
    "chunks without causality": Case((1, 40, 6), (70, 90, -4), chunk=32, causal=False, sinks=True),
    "ranges": Case(ranges=((), ((0, 4), (6, 8)), (), ((85, 97), (100, 999)))),
    "overlapping ranges over a window": Case(
        window=3, ranges=(((2, 71), (60, 90)), ((3, 5), (4, 7)), (), ((91, 95), (20, 130))), alibi=True
    ),
    "ranges over chunks": Case(chunk=5, ranges=(((0, 71),), (), (), ((93, 129),)), padded_rows=2),
    "own keys": Case((1, 5, 0, 130, 3), (0, 0, 0, 0, -3), own_keys=True, causal=False, tail_tokens=2),
    "own keys and causality": Case((5, 130), (0, 0), own_keys=True, **ALL),
    "own keys in a window on both sides": Case((5, 130), (0, 0), own_keys=True, causal=False, **ALL),
    "own keys in chunks": Case((5, 130), (0, 0), own_keys=True, causal=False, chunk=48, value_size=40),
    "nothing but padding": Case((0, 0), (0, 0), padded_rows=1, tail_tokens=3),
}


@pytest.mark.parametrize("name", FEATURES)
def test_feature_matches_the_reference(name: str, threads: int) -> None:
    check(FEATURES[name], threads=threads)


@pytest.mark.parametrize("name", FEATURES)
def test_feature_in_bfloat16_matches_the_reference(name: str) -> None:
    """Where the CPU multiplies bfloat16 pairs, both operands have to be bfloat16 to take that path."""
    check(replace(FEATURES[name], dtype=torch.bfloat16, cache_dtype=torch.bfloat16))


EVERY_PATH = {
    "plain": FEATURES["plain"],
    "everything at once": FEATURES["everything at once"],
    "poison": FEATURES["unused cache is inf"],
    "own keys": FEATURES["own keys"],
    "one long request": Case((1,), (2000,), heads=8, kv_heads=2, head_size=40),
    "float16": Case(dtype=torch.float16, cache_dtype=torch.float16, head_size=40),
    "bfloat16": Case(dtype=torch.bfloat16, cache_dtype=torch.bfloat16),
    "e4m3": Case(cache_dtype=FP8[0], scales=2),
    "e5m2": Case(cache_dtype=FP8[1], scales=1, head_size=72),
}


@pytest.mark.parametrize("target", runnable_targets()[:-1][:2], ids=lambda target: target.name)
@pytest.mark.parametrize("name", EVERY_PATH)
def test_lesser_instruction_sets_match_the_reference(
    name: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = lesser_library(target)
    for module in (_attention, _cache_write):
        monkeypatch.setattr(module, "library", lambda: loaded)
    check(EVERY_PATH[name])


@cache
def lesser_library(target: Target) -> Any:
    return _build.load_library(target)


@pytest.mark.parametrize("query_len", [1, 3, 40], ids=["decode", "several", "prefill"])
@pytest.mark.parametrize("head_size", [32, 40, 64, 96, 160, 256])
def test_bfloat16_head_size_matches_the_reference(head_size: int, query_len: int) -> None:
    dtype = torch.bfloat16
    check(Case((query_len,), (129,), head_size=head_size, dtype=dtype, cache_dtype=dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, *FP8], ids=str)
def test_cache_layout_and_dtype_match_the_reference(layout: str, cache_dtype: torch.dtype) -> None:
    check(Case(layout=layout, cache_dtype=cache_dtype, scales=2, **ALL))


@pytest.mark.parametrize("head_size", [8, 32, 40, 64, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, FP8[0]], ids=str)
def test_head_size_matches_the_reference(head_size: int, cache_dtype: torch.dtype) -> None:
    check(Case((1, 9), (40, 30), head_size=head_size, cache_dtype=cache_dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16, *FP8], ids=str)
@pytest.mark.parametrize("scales", [0, 1, 2], ids=["no scale", "one scale", "scale a head"])
def test_dtypes_match_the_reference(dtype: torch.dtype, cache_dtype: torch.dtype, scales: int) -> None:
    check(Case((1, 9), (40, 30), dtype=dtype, cache_dtype=cache_dtype, scales=scales))


@pytest.mark.parametrize("rows", range(1, 13))
def test_every_number_of_rows_in_a_tile_matches_the_reference(rows: int) -> None:
    check(Case((rows, 1), (20, 70), heads=rows, kv_heads=1, head_size=32))
    check(Case((rows,), (20,), heads=1, kv_heads=1, head_size=32))


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("query_len", [1, 12])
def test_one_long_request_split_over_keys_matches_the_reference(
    query_len: int, sinks: bool, threads: int
) -> None:
    case = Case((query_len,), (1500,), heads=6, kv_heads=2, head_size=32, sinks=sinks)
    check(case, threads=threads)


def test_threads_do_not_change_the_result_beyond_rounding() -> None:
    batch = make_batch(Case((1,), (2000,)))
    outputs = []
    for count in (1, 2, 7):
        with thread_count(count):
            outputs.append(run(batch)[0])
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=1e-6)


def test_splitting_a_request_skips_parts_outside_the_window(threads: int) -> None:
    check(Case((1, 3), (1500, 900), head_size=32, window=300), threads=threads)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches_match_the_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    lens = torch.randint(0, 30, (6,), generator=generator).tolist()
    contexts = torch.randint(0, 150, (6,), generator=generator).tolist()
    features = ALL if seed % 2 else {}
    check(Case(tuple(lens), tuple(contexts), heads=8, kv_heads=2, head_size=32, **features), seed)


def test_output_and_lse_may_have_any_outer_strides() -> None:
    batch = make_batch(Case())
    expected_output, expected_lse = run(batch)
    tokens = batch.query_THD.shape[0]
    output = torch.full((6, tokens, 80), NAN).transpose(0, 1)[..., :64]
    lse = torch.full((6, tokens), NAN).t()
    wide_query = torch.randn(tokens, 9, 64)
    wide_query[:, 2:8] = batch.query_THD
    cache = batch.kv_cache
    paged_attention(wide_query[:, 2:8], cache[:, 0], cache[:, 1], output, *batch.tables, scale=0.125, lse=lse)
    assert torch.equal(output, expected_output)
    assert torch.equal(lse, expected_lse)


def test_lse_is_optional() -> None:
    batch = make_batch(Case())
    assert torch.equal(run(batch, with_lse=False)[0], run(batch)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_sinks_take_any_float_dtype(dtype: torch.dtype) -> None:
    batch = make_batch(Case(sinks=True))
    sinks = batch.options["sinks"]
    batch.options["sinks"] = sinks.bfloat16().float()
    expected = run(batch)[0]
    batch.options["sinks"] = sinks.bfloat16().to(dtype)
    if dtype != torch.float16:
        assert torch.equal(run(batch)[0], expected)
    torch.testing.assert_close(run(batch)[0], expected, rtol=0, atol=1e-3)


def test_nan_in_a_query_reaches_only_its_own_rows() -> None:
    batch = make_batch(Case())
    expected = run(batch)[0]
    batch.query_THD[3, 1, 5] = NAN
    output = run(batch)[0]
    assert output[3, 1].isnan().all()
    output[3, 1] = expected[3, 1]
    assert torch.equal(output, expected)


def test_blocks_outside_the_window_are_never_read() -> None:
    batch = make_batch(Case((1, 20), (300, 200), window=16))
    expected = run(batch)[0]
    batch.tables[2][0, :17] = -7  # position 300 sees keys 285..300, from block 17 on
    batch.tables[2][1, :12] = -7  # positions 200..219 see keys 185 on, from block 11 on
    with pytest.raises(ValueError, match=r"block_table\[1, 11\] is -7"):
        run(batch)
    batch.tables[2][1, 11] = make_batch(batch.case).tables[2][1, 11]
    assert torch.equal(run(batch)[0], expected)


# ---- writing the cache ---------------------------------------------------------------------------


def all_halves(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def interesting_floats() -> Tensor:
    """Random bit patterns, every fp8 and half value, and the midpoints next to them."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).int()
    codes = [torch.arange(256).to(torch.uint8).view(dtype).float() for dtype in FP8]
    halves = all_halves(torch.float16).float()
    near = torch.cat([*codes, halves])
    steps = [near, near * (1 + 2**-4), near * (1 + 2**-3), near * 1.0625, near + 2**-10]
    nudged = [torch.nextafter(x, torch.tensor(s * INF)) for x in steps for s in (1, -1)]
    midpoints = (halves[:-1] + halves[1:]) / 2
    values = torch.cat([bits.view(torch.float32), *steps, *nudged, midpoints])
    return values[: len(values) // 64 * 64]


def stored_by_torch(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x.float() if scale is None else x.float() / scale
    if dtype in FP8:
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    nan = expected.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    assert torch.equal(got.view(as_int)[~nan], expected.view(as_int)[~nan])


SOURCES: dict[torch.dtype, Callable[[], Tensor]] = {
    torch.float32: interesting_floats,
    torch.float16: lambda: all_halves(torch.float16),
    torch.bfloat16: lambda: all_halves(torch.bfloat16),
}


@pytest.mark.parametrize("scale", [None, 0.3, 1.0, 37.5], ids=lambda s: f"scale {s}")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16, *FP8], ids=str)
def test_conversions_equal_torch_bit_for_bit(
    source: torch.dtype, target: torch.dtype, scale: float | None
) -> None:
    x_THD = SOURCES[source]().view(-1, 1, 64)
    scales = None if scale is None else torch.tensor([scale])
    cache = torch.zeros(len(x_THD), 2, 1, 1, 64).to(target)
    slots = torch.arange(len(x_THD))
    cache_write(x_THD, x_THD, cache[:, 0], cache[:, 1], slots, k_scale=scales, v_scale=scales)
    expected = stored_by_torch(x_THD, scales, target)
    assert_same_bits(cache[:, 0, 0].contiguous(), expected)
    assert_same_bits(cache[:, 1, 0].contiguous(), expected)


@pytest.mark.parametrize("heads", [1, 16], ids=["few rows", "many rows"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FP8], ids=str)
def test_every_stored_value_reads_back_exactly(dtype: torch.dtype, heads: int) -> None:
    every = all_halves(dtype) if dtype.itemsize == 2 else torch.arange(256).byte().view(dtype)
    value_BSHD = every.view(-1, 1, 1, 64)
    key_BSHD = torch.zeros(value_BSHD.shape).to(dtype)
    count = len(value_BSHD)
    output = torch.full((count, heads, 64), INF)
    paged_attention(
        torch.zeros(count, heads, 64),
        key_BSHD,
        value_BSHD,
        output,
        torch.arange(count + 1, dtype=torch.int32),
        torch.ones(count, dtype=torch.int32),
        torch.arange(count, dtype=torch.int32).view(-1, 1),
        scale=1.0,
    )
    expected = value_BSHD.float().view(count, 1, 64).expand(count, heads, 64)
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 200])
def test_cache_write_changes_only_its_slots(layout: str, tokens: int) -> None:
    case = Case(kv_heads=3, head_size=40, value_size=24, layout=layout, poison=7.0)
    cache = empty_cache(case, 16)
    expected = cache.clone()
    slots = torch.randperm(256)[:tokens]
    slots[::5] = -1
    key, value = torch.randn(tokens, 3, 64)[..., :40], torch.randn(3, tokens, 24).transpose(0, 1)
    cache_write(key, value, cache[:, 0], cache[:, 1, ..., :24], slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 16, 0, slot % 16] = key[token]
            expected[slot // 16, 1, slot % 16, :, :24] = value[token]
    assert torch.equal(cache, expected)


def test_cache_write_uses_a_scale_for_each_head() -> None:
    key = torch.randn(4, 3, 32)
    cache = torch.zeros(2, 2, 4, 3, 32).to(FP8[0])
    k_scale, v_scale = torch.tensor([0.1, 0.2, 0.4]), torch.tensor([2.0, 3.0, 5.0])
    cache_write(key, key, cache[:, 0], cache[:, 1], torch.arange(4, 8), k_scale=k_scale, v_scale=v_scale)
    for index, scale in enumerate((k_scale, v_scale)):
        expected = stored_by_torch(key, scale.view(3, 1), FP8[0])
        assert torch.equal(cache[1, index].view(torch.uint8), expected.view(torch.uint8))


def test_hnd_cache_round_trip_uses_the_given_block_size() -> None:
    for heads in (8, 6):
        cache = torch.zeros(10, 2, heads, 16, 64).transpose(2, 3)
        key, value = torch.randn(3, heads, 64), torch.randn(3, heads, 64)
        cache_write(key, value, cache[:, 0], cache[:, 1], torch.tensor([0, 17, 159]))
        for token, (block, slot) in enumerate([(0, 0), (1, 1), (9, 15)]):
            assert torch.equal(cache[block, 0, slot], key[token])
            assert torch.equal(cache[block, 1, slot], value[token])


# ---- faults that people met ----------------------------------------------------------------------


def simple(query: Tensor, keys: Tensor, values: Tensor, query_lens: list[int], **options: Any) -> Tensor:
    """Attention of requests that all read the same [L, Hk, D] keys, one slot a block."""
    rows = len(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    table = torch.arange(len(keys)).int().repeat(rows, 1)
    output = torch.full((query.shape[0], query.shape[1], values.shape[-1]), NAN)
    seq_lens = torch.full((rows,), len(keys)).int()
    options = {"scale": 1.0, **options}
    paged_attention(query, keys[:, None], values[:, None], output, starts, seq_lens, table, **options)
    return output


def counting(length: int, size: int = 32, heads: int = 1) -> Tensor:
    """Values [L, Hk, size] equal to their position."""
    return torch.arange(length).float().view(-1, 1, 1).expand(length, heads, size).contiguous()


def first_lane(numbers: list[float], size: int) -> Tensor:
    """[L, 1, size] with the numbers in lane 0."""
    x = torch.zeros(len(numbers), 1, size)
    x[:, 0, 0] = torch.tensor(numbers)
    return x


@pytest.mark.parametrize("query_len", [1, 8], ids=["decode", "prefill"])
def test_b04_a_window_counts_the_token_itself(query_len: int) -> None:
    zeros = torch.zeros(8, 1, 32)
    output = simple(zeros[:query_len], zeros, counting(8), [query_len], sliding_window=4)
    assert output[-1, 0, 0].item() == 5.5


@pytest.mark.parametrize("heads", [1, 12], ids=["few rows", "many rows"])
@pytest.mark.parametrize(("scale", "expected"), [(1.0, 0.731059), (0.1, 0.681700)])
def test_b06_soft_cap_comes_after_the_scale(scale: float, expected: float, heads: int) -> None:
    for size in (1, 32):
        query = first_lane([1.0], size).expand(1, heads, size)
        keys, values = first_lane([10.0, 0.0], size), first_lane([1.0, 0.0], size)
        output = simple(query, keys, values, [1], scale=scale, logits_soft_cap=1.0)
        assert output[0, :, 0].tolist() == pytest.approx([expected] * heads, abs=1e-6)


@pytest.mark.parametrize("query_lens", [[1], [1, 1, 1], [2]], ids=["decode", "batch", "prefill"])
@pytest.mark.parametrize("heads", [1, 12], ids=["few rows", "many rows"])
def test_b08_scales_are_applied_everywhere(query_lens: list[int], heads: int) -> None:
    query = first_lane([1.0] * sum(query_lens), 32).expand(-1, heads, 32)
    keys, values = first_lane([4.0, 0.0], 32).to(FP8[0]), first_lane([2.0, 0.0], 32).to(FP8[0])
    scales = {"k_scale": torch.tensor([0.25]), "v_scale": torch.tensor([0.5])}
    output = simple(query, keys, values, query_lens, **scales)
    assert output[-1, :, 0].tolist() == pytest.approx([0.731059] * heads, abs=1e-6)


@pytest.mark.parametrize(
    ("stride", "block"),
    [(16 * 2 * 8 * 128, 65536), (1_039_680, 2066)],
    ids=["many blocks", "layers packed in one buffer"],
)
def test_b10_offsets_beyond_32_bits(stride: int, block: int) -> None:
    offset = block * stride
    assert offset > 2**31 - 1
    buffer = torch.empty(offset + 16 * 8 * 128 * 2, dtype=torch.uint8).view(FP8[0])
    shape, strides = (block + 1, 16, 8, 128), (stride, 8 * 128, 128, 1)
    key_cache = buffer.as_strided(shape, strides)
    value_cache = buffer.as_strided(shape, strides, 16 * 8 * 128)
    buffer[offset:] = NAN
    value = torch.randn(1, 8, 128).to(FP8[0]).float()
    cache_write(value, value, key_cache, value_cache, torch.tensor([block * 16]))
    tables = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [1], [[block]])]
    for heads in (8, 128):
        output = torch.full((1, heads, 128), NAN)
        query = torch.randn(1, heads, 128)
        paged_attention(query, key_cache, value_cache, output, *tables, scale=1.0)
        assert torch.equal(output, value.repeat_interleave(heads // 8, 1))


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("heads", [1, 12], ids=["few rows", "many rows"])
def test_b11_what_lies_behind_seq_len_does_not_matter(poison: float, heads: int) -> None:
    cache = torch.full((3, 2, 4, 1, 32), poison)
    cache[1, :, 0] = 1.0
    output = torch.full((1, heads, 32), NAN)
    tables = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [1], [[1, 2]])]
    query = torch.ones(1, heads, 32)
    paged_attention(query, cache[:, 0], cache[:, 1], output, *tables, scale=1.0)
    assert torch.equal(output, torch.ones(1, heads, 32))


def test_b12_empty_rows_between_single_token_rows() -> None:
    check(Case((0, 1, 0, 1), (0, 2, 0, 4), heads=9, kv_heads=3, head_size=64))


def test_b12_empty_rows_may_have_a_stale_seq_len_and_table() -> None:
    batch = make_batch(Case((0, 1, 0, 1), (0, 2, 0, 4)))
    expected = run(batch)[0]
    _, seq_lens, table = batch.tables
    seq_lens[0] = seq_lens[2] = 2**31 - 1
    table[0] = table[2] = -1
    assert torch.equal(run(batch)[0], expected)


@pytest.mark.parametrize("heads", [1, 12], ids=["few rows", "many rows"])
def test_b14_a_row_that_sees_nothing_is_zero_with_lse_minus_inf(heads: int) -> None:
    lse = torch.full((2, heads), NAN)
    zeros = torch.zeros(2, heads, 32)
    output = simple(zeros, torch.zeros(1, 1, 32), counting(1) + 3, [2], lse=lse)
    assert torch.equal(output[:, :, 0], torch.tensor([[0.0], [3.0]]).expand(2, heads))
    assert torch.equal(lse, torch.tensor([[-INF], [0.0]]).expand(2, heads))


@pytest.mark.parametrize(("query_len", "expected"), [(1, [2.0]), (2, [1.5, 2.0])])
def test_b15_causality_is_bottom_right(query_len: int, expected: list[float]) -> None:
    zeros = torch.zeros(5, 1, 32)
    output = simple(zeros[:query_len], zeros, counting(5), [query_len])
    assert output[:, 0, 0].tolist() == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(48, 2), (40, 2), (80, 4), (28, 4), (5, 1), (9, 3), (200, 1)]
)
@pytest.mark.parametrize("query_len", [1, 3])
def test_b17_each_head_uses_the_kv_head_of_its_group(heads: int, kv_heads: int, query_len: int) -> None:
    values = torch.arange(kv_heads).float().view(1, -1, 1).expand(4, kv_heads, 32).contiguous()
    query = torch.zeros(query_len, heads, 32)
    output = simple(query, torch.zeros(4, kv_heads, 32), values, [query_len])
    expected = torch.arange(heads) // (heads // kv_heads)
    assert torch.equal(output[..., 0], expected.float().expand(query_len, heads))


# ---- what is refused -----------------------------------------------------------------------------


def good_arguments() -> dict[str, Any]:
    batch = make_batch(Case())
    names = ("query_start_loc", "seq_lens", "block_table")
    return {
        "query": batch.query_THD,
        "key_cache": batch.kv_cache[:, 0],
        "value_cache": batch.kv_cache[:, 1],
        "output": torch.empty_like(batch.query_THD),
        **dict(zip(names, batch.tables, strict=True)),
        "scale": 0.125,
    }


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


CACHE, QUERY = torch.zeros(20, 16, 2, 64), torch.zeros(47, 6, 64)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "query of float64": ({"query": QUERY.double()}, "query.dtype is torch.float64"),
    "query of two dimensions": ({"query": QUERY.view(47, 384)}, r"\[47, 384\]; expected \[T, H"),
    "query with a strided last dimension": (
        {"query": torch.zeros(47, 64, 6).transpose(1, 2)},
        "query has strides",
    ),
    "head sizes that differ": ({"query": torch.zeros(47, 6, 32)}, "head size 32, key_cache 64"),
    "heads that do not divide": (
        {"query": torch.zeros(47, 5, 64), "output": torch.zeros(47, 5, 64)},
        "query has 5 heads and the cache 2",
    ),
    "key_cache of uint8": (
        {"key_cache": CACHE.byte(), "value_cache": CACHE.byte()},
        "key_cache.dtype is torch.uint8",
    ),
    "caches of two dtypes": ({"value_cache": CACHE.half(), "key_cache": CACHE}, "must agree"),
    "caches of two shapes": ({"key_cache": CACHE[:5], "value_cache": CACHE}, "value_cache has"),
    "output of the wrong shape": ({"output": QUERY[1:]}, r"output has shape \[46, 6, 64"),
    "query_start_loc of int64": ({"query_start_loc": torch.zeros(6).long()}, "query_start_loc is"),
    "query_start_loc too short": ({"query_start_loc": int32(0, 1)}, r"expected torch.int32 \[6\]"),
    "query_start_loc not from 0": (
        {"query_start_loc": int32(1, 1, 6, 6, 46, 47)},
        "must start at 0",
    ),
    "query_start_loc decreasing": (
        {"query_start_loc": int32(0, 1, 6, 4, 46, 47)},
        "row 2 runs from 6 to 4",
    ),
    "query_start_loc past the tokens": (
        {"query_start_loc": int32(0, 1, 6, 6, 46, 48)},
        "ends rows at 48, but query has 47",
    ),
    "seq_len negative": ({"seq_lens": int32(71, -8, 0, 130, 1)}, r"seq_lens\[1\] is -8"),
    "seq_len above the table": (
        {"seq_lens": int32(71, 8, 0, 130, 177)},
        r"seq_lens\[4\] is 177, more than the 176",
    ),
    "block_table of int64": ({"block_table": torch.zeros(5, 9).long()}, "block_table.dtype"),
    "window of zero": ({"sliding_window": 0}, "sliding_window is 0"),
    "chunk of zero": ({"attention_chunk_size": 0}, "attention_chunk_size is 0"),
    "chunk beside a window": (
        {"attention_chunk_size": 4, "sliding_window": 4},
        "attention_chunk_size is 4 and sliding_window 4",
    ),
    "ranges of int64": (
        {"bidirectional_ranges": torch.zeros(5, 1, 2).long()},
        r"bidirectional_ranges is torch.int64 \[5, 1, 2\]",
    ),
    "ranges of too few rows": ({"bidirectional_ranges": int32(0, 1).view(1, 1, 2)}, r"int32 \[5, G, 2\]"),
    "ranges without causality": (
        {"bidirectional_ranges": torch.zeros(5, 1, 2).int(), "causal": False},
        "allowed: None unless causal",
    ),
    "own keys of a paged shape": ({"block_table": None}, r"since block_table is None"),
    "own keys of other tokens": (
        {"block_table": None, "key_cache": QUERY[1:, :2], "value_cache": QUERY[:, :2]},
        r"key_cache has shape \[46, 2, 64\]",
    ),
    "own keys of more than the tokens": (
        {"block_table": None, "key_cache": QUERY[:, :2], "value_cache": QUERY[:, :2]},
        r"seq_lens\[0\] is 71, more than its 1 tokens",
    ),
    "negative soft-cap": ({"logits_soft_cap": -1.0}, "logits_soft_cap is -1.0"),
    "scale of nan": ({"scale": NAN}, "scale is NaN"),
    "alibi_slopes too few": ({"alibi_slopes": torch.zeros(2)}, "alibi_slopes"),
    "sinks too few": ({"sinks": torch.zeros(2)}, "sinks"),
    "sinks of int": ({"sinks": torch.zeros(6).int()}, "sinks"),
    "k_scale a query head": ({"k_scale": torch.ones(6)}, "k_scale is torch.float32 with 6"),
    "v_scale of float64": ({"v_scale": torch.ones(1).double()}, "v_scale is torch.float64"),
    "lse of float16": ({"lse": torch.zeros(47, 6).half()}, "lse.dtype"),
    "lse of the wrong shape": ({"lse": torch.zeros(6, 47)}, r"lse has shape \[6, 47\]"),
    "query on another device": ({"query": QUERY.to("meta")}, "query is on meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_refuses(name: str) -> None:
    changes, message = REFUSED[name]
    arguments = {**good_arguments(), **changes}
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments)


@pytest.mark.parametrize("block", [-1, 10**6, 2**31 - 1])
def test_attention_refuses_a_block_outside_the_cache_and_names_it(block: int) -> None:
    arguments = good_arguments()
    table = arguments["block_table"]
    assert isinstance(table, Tensor)
    table[3, 2] = block
    output = arguments["output"] = torch.full((47, 6, 64), 5.0)
    with pytest.raises(ValueError, match=rf"block_table\[3, 2\] is {block}, not a block"):
        paged_attention(**arguments)
    assert torch.equal(output, torch.full((47, 6, 64), 5.0))


def test_attention_refuses_unknown_keywords() -> None:
    with pytest.raises(TypeError, match="window_size"):
        paged_attention(**{**good_arguments(), "window_size": 4})


@pytest.mark.parametrize("slot", [160, 2**40])
def test_cache_write_refuses_a_slot_outside_the_cache_and_writes_nothing(slot: int) -> None:
    cache = torch.zeros(10, 2, 16, 2, 64)
    key = torch.ones(3, 2, 64)
    with pytest.raises(ValueError, match=rf"slot_mapping\[2\] is {slot}; .* 0 to 159"):
        cache_write(key, key, cache[:, 0], cache[:, 1], torch.tensor([0, -1, slot]))
    assert not cache.any()


@pytest.mark.parametrize("length", [2, 4])
def test_cache_write_refuses_a_slot_mapping_of_another_length(length: int) -> None:
    cache, key = torch.zeros(10, 2, 16, 2, 64), torch.ones(3, 2, 64)
    with pytest.raises(ValueError, match="slot_mapping is"):
        cache_write(key, key, cache[:, 0], cache[:, 1], torch.arange(length))


def test_only_one_openmp_runtime_is_loaded() -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    torch.randn(300, 300) @ torch.randn(300, 300)
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert len(loaded) <= 1
