"""The Triton kernels: accuracy of float32, rows that see nothing, splits, known values, large offsets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from paged_batches import (  # noqa: F401
    BATCHES,
    CUDA,
    DEVICE,
    E4M3,
    E5M2,
    F16,
    F32,
    FEATURES,
    INF,
    NAN,
    SINKS,
    SMALL_STEPS,
    Batch,
    Options,
    assert_close,
    check,
    first_lane,
    make_batch,
    poison,
    pytestmark,
    run,
    tiny,
    tl,
    triton,
    zeros,
)

from attnbackend.kernels.triton import (
    cache_write,
    decode_num_splits,
    decode_workspace_size,
    paged_attention,
    paged_decode_attention,
)
from attnbackend.kernels.triton.config import (
    heads_per_tile,
    pieces_per_kv_head,
    tile_heads,
)
from attnbackend.kernels.triton.tile import soft_capped

# --- accuracy of float32 -----------------------------------------------------------------


@triton.jit
def soft_cap_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, soft_cap: tl.tensor, PRECISE: tl.constexpr) -> None:
    score = tl.load(x_ptr + tl.arange(0, 1024))
    tl.store(out_ptr + tl.arange(0, 1024), soft_capped(score, score / soft_cap, soft_cap, PRECISE))


@pytest.mark.parametrize("precise", [True, False], ids=["precise", "fast"])
@pytest.mark.parametrize("soft_cap", [1.0, 30.0, 50.0])
def test_soft_cap_is_right_to_a_few_ulp_at_every_size(soft_cap: float, precise: bool) -> None:
    sizes = torch.cat([torch.logspace(-30, 2, 500, 10.0), torch.linspace(0.5, 0.75, 10), zeros(2).cpu()])
    sizes = (sizes * soft_cap).to(DEVICE)
    score = torch.cat([sizes, -sizes])
    out = torch.full_like(score, NAN)
    soft_cap_kernel[(1,)](score, out, soft_cap, precise)
    exact = soft_cap * torch.tanh(score.double() / soft_cap)
    error = ((out - exact).abs() / exact.abs().clamp_min(1e-37)).max().item()
    assert error <= 4 * 2**-24 * (1 if precise else 2)


HARD = {
    "scores of 8": ([(1, 70)] * 4, {"heads": 2, "kv_heads": 1, "dim": 64}, Options(1.0)),
    "capped scores of 5": ([(1, 70)] * 4, {"dim": 64}, Options(0.6, logits_soft_cap=50.0)),
    "saturated cap": ([(1, 70)] * 4, {"dim": 64}, Options(0.6, logits_soft_cap=4.0)),
    "head size 256": ([(1, 70)] * 2, {"dim": 256}, Options(0.0625)),
    "a few keys": ([(1, n) for n in (1, 5, 3, 3, 4)], {"heads": 1, "kv_heads": 1}, Options()),
}


@pytest.mark.parametrize("seed", range(8 if CUDA else 2))
@pytest.mark.parametrize("kernel", [paged_attention, paged_decode_attention])
@pytest.mark.parametrize("name", HARD)
def test_float32_holds_the_rule_where_errors_add_up(kernel: Any, name: str, seed: int) -> None:
    rows, shape, options = HARD[name]
    check(kernel, make_batch(rows, dtype=F32, seed=seed, **shape), options)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="long for the interpreter")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("splits", [1, 9])
def test_float32_holds_the_rule_over_thousands_of_keys(splits: int, seed: int) -> None:
    batch = make_batch([(1, 4000), (1, 2500)], dtype=F32, dim=128, seed=seed)
    check(paged_decode_attention, batch, Options(128**-0.5), num_splits=splits)
    batch = make_batch([(70, 3000)], dtype=F32, dim=128, seed=seed)
    check(paged_attention, batch, Options(128**-0.5))


# --- rows that see nothing ---------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "rows", "extra"), BATCHES)
def test_tail_tokens_are_written_as_empty(kernel: Any, rows: Any, extra: Any) -> None:
    batch = make_batch([*rows, (0, 0)], tail=2)
    out, lse = run(kernel, batch, Options(sinks=SINKS), **extra)
    assert torch.equal(out[-2:], torch.zeros_like(out[-2:]))
    assert torch.equal(lse[-2:], torch.full_like(lse[-2:], -INF))


def test_tail_of_many_tiles_is_written() -> None:
    batch = make_batch([(0, 0), (3, 3)], tail=150)
    out, _ = run(paged_attention, batch, Options())
    assert torch.equal(out[3:], torch.zeros_like(out[3:]))


@pytest.mark.parametrize(("kernel", "extra"), [(paged_decode_attention, {}), (paged_attention, {})])
def test_batch_of_padding_alone(kernel: Any, extra: Any) -> None:
    batch = make_batch([(0, 0), (0, 0), (0, 0)], tail=3)
    out, lse = run(kernel, batch, Options(), **extra)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -INF))


def test_more_than_128_rows() -> None:
    rows = [(int(i in (0, 64, 127, 128, 129)), 1 + i % 5) for i in range(130)]
    check(paged_attention, make_batch(rows, heads=1, kv_heads=1, dtype=F32))


def test_no_tokens() -> None:
    for kernel in (paged_attention, paged_decode_attention):
        check(kernel, make_batch([(0, 0)]))


def test_query_longer_than_the_sequence_with_sinks() -> None:
    """Rows that see no key: the sink alone is in the denominator, so the LSE is the sink."""
    batch = make_batch([(5, 3)], dtype=F32)
    out, lse = run(paged_attention, batch, Options(sinks=SINKS))
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    torch.testing.assert_close(lse[:2], SINKS.expand(2, 4))
    check(paged_attention, batch, Options(sinks=SINKS))


# --- splits ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [2, 7, 40])
@pytest.mark.parametrize("name", ["plain", "all at once", "sinks"])
def test_long_rows_in_splits(num_splits: int, name: str) -> None:
    batch = make_batch([(1, 700), (1, 3), (0, 0), (1, 300)], dtype=F32, heads=4, kv_heads=1)
    options = FEATURES[name]
    if options.sliding_window:
        options = Options(**{**vars(options), "sliding_window": 513})
    check(paged_decode_attention, batch, options, num_splits=num_splits)


def test_workspace_is_used_and_its_old_contents_are_not() -> None:
    batch = make_batch([(1, 300), (1, 9)], dtype=F32)
    workspace = poison((decode_workspace_size(2, 4, 32, 2),), F32)
    check(paged_decode_attention, batch, num_splits=2, workspace=workspace)
    assert not workspace.isnan().all()


def test_splits_fill_the_device_from_shapes_alone() -> None:
    assert decode_num_splits(8, 1 << 20, 264) == 33
    assert decode_num_splits(8, 1024, 264) == 16
    assert decode_num_splits(8, 512, 264) == 8
    assert decode_num_splits(8, 128, 264) == 1
    assert decode_num_splits(512, 1 << 20, 264) == 1
    assert decode_num_splits(0, 0, 1) == 1
    assert decode_workspace_size(64, 32, 128, 1) == 0


# --- cases with known values -------------------------------------------------------------


BOTH = pytest.mark.parametrize("kernel", [paged_attention, paged_decode_attention])


@BOTH
def test_window_counts_the_token_itself(kernel: Any) -> None:
    query = [0] * (8 if kernel is paged_attention else 1)
    found = first_lane(kernel, tiny(query, [0] * 8, list(range(8))), sliding_window=4)
    assert found[-1] == 5.5


@BOTH
def test_soft_cap_comes_after_the_scale(kernel: Any) -> None:
    batch = tiny([1], [10, 0], [1, 0])
    capped = first_lane(kernel, batch, logits_soft_cap=1.0)
    assert capped == pytest.approx([1 / (1 + math.exp(-math.tanh(10)))])
    assert capped == pytest.approx([0.731059], abs=1e-6)
    scaled = first_lane(kernel, batch, scale=0.1, logits_soft_cap=1.0)
    assert scaled == pytest.approx([0.681700], abs=1e-6)
    assert first_lane(kernel, batch) == pytest.approx([0.999955], abs=1e-6)


@BOTH
def test_both_cache_scales_apply(kernel: Any) -> None:
    batch = tiny([1], [4, 0], [2, 0], E4M3)
    batch.k_scale = torch.tensor([0.25], device=DEVICE)
    batch.v_scale = torch.tensor([0.5], device=DEVICE)
    assert first_lane(kernel, batch) == pytest.approx([0.731059], abs=1e-6)


@BOTH
@pytest.mark.parametrize("rest", [NAN, INF, -INF])
@pytest.mark.parametrize("cache_dtype", [F32, F16, E5M2], ids=str)
def test_memory_past_the_sequence_does_not_matter(kernel: Any, rest: float, cache_dtype: torch.dtype) -> None:
    assert first_lane(kernel, tiny([1], [1], [1], cache_dtype, rest)) == [1.0]


@BOTH
def test_memory_before_the_window_does_not_matter(kernel: Any) -> None:
    batch = tiny([0], [0] * 8, [NAN] * 4 + [4, 5, 6, 7])
    batch.key_cache[1, :4] = NAN
    assert first_lane(kernel, batch, sliding_window=4) == [5.5]


@BOTH
def test_empty_rows_between_rows_of_one_token(kernel: Any) -> None:
    batch = make_batch([(0, 0), (1, 3), (0, 0), (1, 5)], heads=9, kv_heads=3, dim=64)
    assert batch.query_start_loc.tolist() == [0, 0, 1, 1, 2]
    check(kernel, batch)


def test_fully_masked_rows_are_zero_not_a_mean() -> None:
    batch = tiny([0] * 5, [0] * 3, [0, 1, 2])
    assert first_lane(paged_attention, batch) == [0.0, 0.0, 0.0, 0.5, 1.0]
    _, lse = run(paged_attention, batch, Options())
    assert lse[:2, 0].tolist() == [-INF, -INF]


@BOTH
def test_causal_is_aligned_bottom_right(kernel: Any) -> None:
    assert first_lane(kernel, tiny([0], [0] * 5, list(range(5)))) == [2.0]
    if kernel is paged_attention:
        assert first_lane(kernel, tiny([0, 0], [0] * 5, list(range(5)))) == [1.5, 2.0]


@BOTH
@pytest.mark.parametrize(("heads", "kv_heads"), [(48, 2), (40, 2), (80, 4), (28, 4), (5, 1)])
@pytest.mark.parametrize("tile", [None, SMALL_STEPS], ids=["chosen tile", "tile of 16 rows"])
def test_no_tile_straddles_kv_heads(kernel: Any, heads: int, kv_heads: int, tile: Any) -> None:
    batch = make_batch([(1, 5)], heads=heads, kv_heads=kv_heads)
    page = batch.block_table[0, 0]
    batch.value_cache[page, :5] = torch.arange(kv_heads, device=DEVICE)[None, :, None].to(F16)
    out, _ = run(kernel, batch, Options(), tile=tile)
    owner = torch.arange(heads, device=DEVICE) // (heads // kv_heads)
    torch.testing.assert_close(out[0, :, 0], owner.to(F16), atol=2e-3, rtol=0)


@pytest.mark.parametrize("group", [1, 3, 10, 16, 24, 71, 128])
@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
def test_head_tiles_cover_each_head_once(group: int, block_m: int) -> None:
    pieces = pieces_per_kv_head(group, block_m)
    seen = []
    for head_tile in range(3 * pieces):
        kv_head, heads = tile_heads(head_tile, group, block_m)
        assert 0 < len(heads) <= heads_per_tile(group, block_m) <= block_m
        assert all(head // group == kv_head for head in heads)
        seen += heads
    assert seen == list(range(3 * group))


# --- 64-bit offsets ----------------------------------------------------------------------


def sparse_cache(block_stride: int, blocks: int) -> torch.Tensor:
    """[B, 2, 16, 8, 128] float8 cache whose last block begins at 2^31 elements or later.

    Memory that nothing touches is never committed, so this costs no more than its last block.
    """
    shape, strides = (blocks, 2, 16, 8, 128), (block_stride, 16384, 1024, 128, 1)
    extent = (blocks - 1) * block_stride + 2 * 16384
    raw = torch.empty(extent, dtype=torch.uint8, device=DEVICE)
    return raw.view(E4M3).as_strided(shape, strides)


@pytest.mark.parametrize(("block_stride", "block"), [(16 * 2 * 8 * 128, 65536), (1_039_680, 2066)])
def test_block_beyond_31_bits(block_stride: int, block: int) -> None:
    cache = sparse_cache(block_stride, block + 1)
    assert block * block_stride >= 2**31 - 2**16
    new = torch.ones(2, 8, 128, device=DEVICE)
    slots = torch.tensor([block * 16, block * 16 + 1], device=DEVICE)
    cache_write(new, new * torch.tensor([2.0, 4.0], device=DEVICE)[:, None, None],
                cache[:, 0], cache[:, 1], slots)  # fmt: skip
    ints = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 1], [2], [[block]])]
    query = torch.ones(1, 8, 128, device=DEVICE)
    batch = Batch(query, cache[:, 0], cache[:, 1], ints[0], ints[1], ints[2])
    for kernel in (paged_attention, paged_decode_attention):
        out, _ = run(kernel, batch, Options())
        assert torch.equal(out, torch.full_like(out, 3.0))
