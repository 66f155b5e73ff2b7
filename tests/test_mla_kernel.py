"""The Triton kernels of latent attention against dense float64, interpreted on a CPU or compiled on a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from mla_cases import INF, MLABatch, expected, make_batch, packed, poisoned_cache
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
pytest.importorskip("triton")

from attnbackend.kernels.triton import (  # noqa: E402
    gather_latents,
    mla,
    mla_attention,
    mla_hopper_launch,
    mla_workspace_size,
    unavailable_reason,
    write_latents,
)
from attnbackend.kernels.triton.config import TileConfig  # noqa: E402
from attnbackend.kernels.triton.mla_config import mla_num_splits  # noqa: E402
from attnbackend.kernels.triton.mla_rows import tile_count  # noqa: E402
from attnbackend.testing import assert_within_rule  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
pytestmark = pytest.mark.skipif(
    unavailable_reason(DEVICE) is not None, reason=str(unavailable_reason(DEVICE))
)
SMALL = TileConfig(16, 16, 4, 1)
"""Rows of several tiles and keys of several steps in small batches."""
DECODE = [(1, 21), (0, 0), (1, 40), (1, 0), (0, 7), (1, 1)]
MIXED = [(5, 21), (0, 0), (1, 40), (0, 7), (3, 3), (2, 0), (4, 2)]
"""The last request has fewer keys than tokens: its first tokens see none."""


def run(batch: MLABatch, **extra: Any) -> tuple[Tensor, Tensor]:
    output, lse = batch.empty_results()
    mla_attention(
        *batch.queries, batch.kv_cache, output, batch.query_start_loc, batch.seq_lens, batch.block_table,
        scale=batch.scale, lse=lse, topk_indices=batch.topk_indices, k_scale=batch.k_scale, **extra,
    )  # fmt: skip
    return output, lse


def check(batch: MLABatch, **extra: Any) -> None:
    exact, plain = expected(batch, torch.float64), expected(batch, batch.query.dtype)
    for name, got, right, usual in zip(("output", "lse"), run(batch, **extra), exact, plain, strict=True):
        assert_within_rule(got, right, usual, what=name)


def make(requests: list[tuple[int, int]], **options: Any) -> MLABatch:
    return make_batch(requests, **options, device=DEVICE)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("requests", [DECODE, MIXED], ids=["decode", "mixed"])
def test_dense(requests: list[tuple[int, int]], dtype: torch.dtype) -> None:
    check(make(requests, dtype=dtype, tail=2))


@pytest.mark.parametrize("heads", [1, 5, 20])
@pytest.mark.parametrize("requests", [DECODE, MIXED], ids=["decode", "mixed"])
def test_heads_and_tokens_share_tiles(requests: list[tuple[int, int]], heads: int) -> None:
    check(make(requests, heads=heads, tail=1), tile=SMALL)


def test_more_requests_than_one_look() -> None:
    """Requests are looked for 128 at a time."""
    check(make([(1, 3) if i % 70 == 60 else (0, 0) for i in range(140)], heads=16, rank=32), tile=SMALL)


@pytest.mark.parametrize("requests", [[(1, 600), (0, 0), (1, 0), (1, 300)], [(3, 520), (1, 5)]])
def test_splits(requests: list[tuple[int, int]]) -> None:
    """Of 256 keys at least, so some are empty."""
    check(make(requests, heads=2, rank=32, tail=1), num_splits=3, tile=TileConfig(16, 64, 4, 1))


def test_splits_in_float32_into_a_given_workspace() -> None:
    batch = make([(1, 300), (2, 270)], heads=2, rank=32, dtype=F32)
    room = torch.full((mla_workspace_size(3, 2, 32, 2),), float("nan"), device=DEVICE)
    check(batch, num_splits=2, workspace=room, tile=TileConfig(16, 64, 4, 1))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("requests", [DECODE, MIXED], ids=["decode", "mixed"])
def test_selected_tokens(requests: list[tuple[int, int]], dtype: torch.dtype) -> None:
    check(make(requests, dtype=dtype, topk=24, heads=20, tail=1), tile=SMALL)


def test_selected_tokens_in_splits() -> None:
    check(make([(1, 400), (2, 330)], topk=320, heads=2, rank=32), num_splits=2, tile=TileConfig(16, 64, 4, 1))


@pytest.mark.parametrize(
    ("cache_dtype", "k_scale", "topk"), [(E4M3, None, None), (E4M3, 0.37, 24), (E5M2, 2.5, None)]
)
def test_float8_cache(cache_dtype: torch.dtype, k_scale: float | None, topk: int | None) -> None:
    check(make(MIXED, cache_dtype=cache_dtype, k_scale=k_scale, topk=topk))


@pytest.mark.parametrize("topk", [None, 24])
def test_packed_cache(topk: int | None) -> None:
    check(make([(2, 21), (1, 40)], rank=512, rope=64, cache_dtype=torch.uint8, dtype=BF16, topk=topk))


@pytest.mark.parametrize("block_size", [16, 64])
def test_deepseek_sizes(block_size: int) -> None:
    check(make([(1, 70), (1, 5)], heads=16, rank=512, rope=64, block_size=block_size))


def test_other_ranks() -> None:
    check(make(MIXED, rank=40, rope=24))


def test_queries_and_output_with_strides_of_their_own() -> None:
    batch = make(MIXED)
    latent, rope = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in batch.queries)
    output, lse = batch.empty_results()
    wide = output.new_full((*output.shape[:2], 100), float("nan"))
    transposed = lse.T.contiguous().T
    mla_attention(
        latent, rope, batch.kv_cache, wide[..., 8 : 8 + batch.rank], batch.query_start_loc, batch.seq_lens,
        batch.block_table, scale=batch.scale, lse=transposed,
    )  # fmt: skip
    expected_output, expected_lse = run(batch)
    assert torch.equal(wide[..., 8 : 8 + batch.rank], expected_output)
    assert torch.equal(transposed, expected_lse)
    assert wide[..., :8].isnan().all()


def test_a_cache_between_the_blocks_of_others() -> None:
    batch = make(MIXED)
    cache = batch.kv_cache.new_full((len(batch.kv_cache), 2, *batch.kv_cache.shape[1:]), float("nan"))[:, 1]
    cache.copy_(batch.kv_cache)
    right = run(batch)
    batch.kv_cache = cache
    assert all(torch.equal(a, b) for a, b in zip(run(batch), right, strict=True))


def test_no_tokens() -> None:
    output, lse = run(make([(0, 5)]))
    assert output.numel() == lse.numel() == 0


@pytest.mark.parametrize("heads", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [4, 0, 7], [0, 0, 1]])
def test_tiles_are_enough(heads: int, lengths: list[int]) -> None:
    """As the kernel counts: a request's first tile follows from where it starts."""
    rows, tail = 64, 3
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    slack = 0 if heads % rows == 0 else 1
    first = [start * heads // rows + i * slack for i, start in enumerate(starts)]
    needed = [-(-n * heads // rows) for n in (*lengths, tail)]
    tiles = tile_count(sum(lengths) + tail, len(lengths), heads, rows)
    assert all(a + n <= b for a, n, b in zip(first, needed, [*first[1:], tiles], strict=True))


def test_number_of_splits() -> None:
    assert mla_num_splits(128, 4096, 132) == 1
    assert mla_num_splits(32, 4096, 132) == 4
    assert mla_num_splits(2, 4096, 132) == 16, "no fewer than 256 keys"
    assert mla_num_splits(2, 100, 132) == 1


def test_half_empty_tiles_do_not_count_twice() -> None:
    """64 requests of 16 heads are 64 tiles, though the grid has room for 81."""
    batch = make([(1, 1)] * 64, heads=16)
    output, lse = batch.empty_results()
    call = mla.checked_call(
        *batch.queries, batch.kv_cache, output, batch.query_start_loc, batch.seq_lens, batch.block_table, 0.1,
        lse, None, None, None,
    )  # fmt: skip
    assert mla._busy_tiles(call, tile_count(64, 64, 16, 64), 64) == 64


# --- rows of the cache -------------------------------------------------------------------


@pytest.mark.parametrize("k_scale", [None, 0.5])
@pytest.mark.parametrize("cache_dtype", [F16, E4M3], ids=str)
def test_rows_are_written_and_read_back(cache_dtype: torch.dtype, k_scale: float | None) -> None:
    rows = torch.randn(5, 40, dtype=F16, device=DEVICE)
    slots = torch.tensor([33, -1, 0, 17, 18], device=DEVICE)
    cache = poisoned_cache(3, 16, 40, cache_dtype, DEVICE)
    scale = None if k_scale is None else torch.tensor([k_scale], device=DEVICE)
    write_latents(rows[:, :32], rows[:, 32:], cache, slots, k_scale=scale)
    stored = (rows.float() / (k_scale or 1.0)).to(cache_dtype)
    kept = slots >= 0
    flat = cache.view(-1, 40)
    assert torch.equal(flat.float()[slots[kept]], stored.float()[kept])
    assert int(flat.float().isnan().all(1).sum()) == 48 - 4
    got = torch.cat(gather_latents(cache, slots[kept], 32, 8, F16, k_scale=scale), 1)
    assert torch.equal(got, (stored.float() * (k_scale or 1.0)).to(F16)[kept])


def test_packed_rows_are_written_and_read_back() -> None:
    rows = torch.randn(3, 576, device=DEVICE).to(BF16) * torch.tensor(
        [[1.0], [1e-3], [300.0]], device=DEVICE
    ).to(BF16)
    rows[1, :128] = 0
    slots = torch.tensor([17, 3, -1], device=DEVICE)
    cache = poisoned_cache(2, 16, 656, torch.uint8, DEVICE)
    write_latents(rows[:, :512], rows[:, 512:], cache, slots)
    right, real = packed(rows)
    assert torch.equal(cache.view(-1, 656)[slots[:2]], right[:2])
    assert int((cache.view(-1, 656) == 0xFF).all(1).sum()) == 30
    got = torch.cat(gather_latents(cache, slots[:2], 512, 64, F32), 1)
    assert torch.equal(got, real[:2].float())


# --- which kernel serves -----------------------------------------------------------------


def hopper_problem(batch: MLABatch, scale: float = 0.1) -> str | None:
    output, lse = batch.empty_results()
    call = mla.checked_call(
        *batch.queries, batch.kv_cache, output, batch.query_start_loc, batch.seq_lens, batch.block_table,
        scale, lse, batch.topk_indices, batch.k_scale, None,
    )  # fmt: skip
    return mla_hopper_launch.problem(call)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, None),
        ({"dtype": F16, "block_size": 128}, None),
        ({"rope": 32}, "ranks are (512, 32)"),
        ({"block_size": 16}, "block_size is 16"),
        ({"dtype": F32}, "one type of 16 bits"),
        ({"cache_dtype": E4M3}, "one type of 16 bits"),
        ({"topk": 8}, "no selected tokens"),
        ({"scale": -1.0}, "no scale of 0 or less"),
    ],
)
def test_the_hopper_kernel_takes(
    options: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_hopper_launch, "device_problem", lambda device: None)
    scale = options.pop("scale", 0.1)
    batch = make([(1, 5)], **{"rank": 512, "rope": 64, "block_size": 64, "dtype": BF16} | options)
    found = hopper_problem(batch, scale)
    assert found is None if words is None else words in str(found)


def test_the_hopper_kernel_takes_a_matrix_of_aligned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_hopper_launch, "device_problem", lambda device: None)
    batch = make([(1, 5)], rank=512, rope=64, block_size=64)
    cache = batch.kv_cache
    batch.kv_cache = cache.new_empty(len(cache), 2, 64, 576)[:, 1]
    assert hopper_problem(batch) is None
    batch.kv_cache = cache.new_empty(len(cache), 65 * 576 + 8)[:, : 64 * 576].view(len(cache), 64, 576)
    assert "aligned matrix" in str(hopper_problem(batch))
    batch.kv_cache = cache.new_empty(len(cache), 64, 580)[..., :576]
    assert "aligned matrix" in str(hopper_problem(batch))


@pytest.mark.skipif(CUDA, reason="only a process without a GPU has no device for it")
def test_the_hopper_kernel_needs_a_gpu() -> None:
    assert "CUDA" in str(hopper_problem(make([(1, 5)])))


# --- refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_cache": torch.zeros(4, 16, 72, dtype=F16)}, "width of kv_cache is 72; allowed: 80"),
        ({"kv_cache": torch.zeros(4, 16, 656, dtype=torch.uint8)}, "bytes of a packed row"),
        ({"kv_cache": torch.zeros(4, 16, 80, dtype=torch.int8)}, "kv_cache.dtype is torch.int8"),
        ({"query_rope": torch.zeros(1, 4, 16, dtype=F32)}, "query_rope"),
        ({"output": torch.zeros(1, 4, 80, dtype=F16)}, "output.shape is (1, 4, 80)"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int64)}, "seq_lens.dtype is torch.int64"),
        ({"topk_indices": torch.zeros(2, 8, dtype=torch.int32)}, "topk_indices is (2, 8)"),
        ({"k_scale": torch.ones(4)}, "k_scale"),
        ({"num_splits": 0}, "num_splits is 0"),
        ({"num_splits": 2, "workspace": torch.zeros(7)}, "workspace is (7,)"),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], words: str) -> None:
    batch = make([(1, 20)])
    output, _ = batch.empty_results()
    arguments = {
        "query_latent": batch.queries[0], "query_rope": batch.queries[1], "kv_cache": batch.kv_cache,
        "output": output, "query_start_loc": batch.query_start_loc, "seq_lens": batch.seq_lens,
        "block_table": batch.block_table, "scale": batch.scale,
    }  # fmt: skip
    changed = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=r"^mla_attention: ") as caught:
        mla_attention(**arguments | changed)
    assert words in str(caught.value)


def test_packed_rows_have_scales_of_their_own() -> None:
    batch = make([(1, 20)], rank=512, rope=64, cache_dtype=torch.uint8)
    batch.k_scale = torch.ones(1, device=DEVICE)
    with pytest.raises(ValueError, match="packed rows have scales of their own"):
        run(batch)


def test_the_reference_masks() -> None:
    """Of the first token of two over two keys, the second key is hidden."""
    batch = make([(2, 2)])
    output, lse = expected(batch, torch.float64)
    assert torch.allclose(output[0], batch.rows[0][:1, : batch.rank].expand(4, -1))
    assert (lse > -INF).all()
