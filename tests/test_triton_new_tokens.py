"""Triton kernels: new sequences read where they lie, float8 values in pairs, tiles by the number of programs.

Legend: T tokens, H query heads, D head size.
"""

from __future__ import annotations

import pytest
import torch
from paged_batches import (  # noqa: F401 (pytestmark)
    BF16,
    CUDA,
    FEATURES,
    FLOAT8,
    NAN,
    Batch,
    Options,
    assert_close,
    check,
    expected,
    make_batch,
    poison,
    pytestmark,
    run,
)

from attnbackend.kernels.triton import paged_attention, paged_decode_attention
from attnbackend.kernels.triton.config import TileConfig, decode_tiles
from attnbackend.kernels.triton.splits import decode_shape

NEW_AND_OLD = [(70, 70), (40, 52), (0, 0), (33, 33)]
TILES = [None, TileConfig(16, 16, 4, 2)]


def own(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value of new sequences, in one buffer; NaN for the tokens of all other rows."""
    tokens, heads, dim = batch.query.shape[0], batch.key_cache.shape[2], batch.key_cache.shape[3]
    fused = poison((tokens, heads, 2 * dim), batch.query.dtype)
    starts = batch.query_start_loc.tolist()
    for row, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        if starts[row + 1] - starts[row] == len(keys):
            fused[starts[row] : starts[row + 1]] = torch.cat([keys, values], -1)
    return fused[..., :dim], fused[..., dim:]


def forget_new_rows(batch: Batch) -> None:
    """NaN in the cache's blocks of the rows without context."""
    assert batch.block_table is not None
    starts = batch.query_start_loc.tolist()
    for row, keys in enumerate(batch.keys):
        if starts[row + 1] - starts[row] == len(keys):
            pages = batch.block_table[row, : -(-len(keys) // 16)].long()
            batch.key_cache[pages], batch.value_cache[pages] = NAN, NAN


@pytest.mark.parametrize("tile", TILES, ids=["chosen tile", "tile of 16 rows"])
@pytest.mark.parametrize(
    "name", ["plain", "window of 20", "all at once", "chunks of 32, not causal", "ranges"]
)
def test_new_sequences_are_read_from_their_own_keys_and_others_from_the_cache(
    name: str, tile: TileConfig
) -> None:
    batch = make_batch(NEW_AND_OLD, tail=1)
    key, value = own(batch)
    forget_new_rows(batch)
    check(paged_attention, batch, FEATURES[name], key=key, value=value, tile=tile)


def test_where_keys_are_read_changes_no_bit() -> None:
    batch = make_batch(NEW_AND_OLD, heads=6, kv_heads=2, dim=40)
    key, value = own(batch)
    for found, cached in zip(
        run(paged_attention, batch, Options(), key=key, value=value),
        run(paged_attention, batch, Options()),
        strict=True,
    ):
        assert torch.equal(found, cached)


@pytest.mark.parametrize(
    ("rows", "cache_dtype"),
    [([(3, 3), (2, 2)], None), (NEW_AND_OLD, torch.float32), (NEW_AND_OLD, BF16), (NEW_AND_OLD, FLOAT8[0])],
    ids=["short queries", "another dtype", "another of 16 bits", "float8"],
)
def test_the_cache_is_read_where_own_keys_would_gain_nothing_or_differ(rows, cache_dtype) -> None:  # type: ignore[no-untyped-def]
    batch = make_batch(rows, cache_dtype=cache_dtype)
    nothing = poison((batch.query.shape[0], *batch.key_cache.shape[2:]), batch.query.dtype)
    check(paged_attention, batch, key=nothing, value=nothing)


def test_own_keys_of_another_shape_are_refused() -> None:
    batch = make_batch(NEW_AND_OLD)
    key, value = own(batch)
    with pytest.raises(ValueError, match=r"value.shape is \(142, 2, 32\); allowed: \(143, 2, 32\)"):
        run(paged_attention, batch, Options(), key=key, value=value[1:])


@pytest.mark.parametrize("scale", [-0.25, 0.0])
@pytest.mark.parametrize("kernel", [paged_attention, paged_decode_attention])
def test_scales_at_and_below_zero(kernel, scale: float) -> None:  # type: ignore[no-untyped-def]
    batch = make_batch([(1, 21), (0, 0), (1, 40), (1, 0)])
    check(kernel, batch, Options(scale))
    check(kernel, batch, Options(scale, sliding_window=3))


@pytest.mark.parametrize("cache_dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("kernel", [paged_attention, paged_decode_attention])
@pytest.mark.parametrize("size", [1.0, 2.0**-100, 2.0**20])
@pytest.mark.gpu
@pytest.mark.skipif(
    not CUDA, reason="bfloat16 products are in float32 in the interpreter: no range to fit to"
)
def test_bfloat16_queries_of_any_size_fit_float16_products(kernel, size: float, cache_dtype) -> None:  # type: ignore[no-untyped-def]
    batch = make_batch([(1, 300), (1, 77), (1, 9)], dtype=BF16, cache_dtype=cache_dtype, dim=128)
    batch.query[1] *= size
    options = Options(0.1)
    out, lse = run(kernel, batch, options)
    exact, plain = (expected(batch, options, dtype)[0] for dtype in (torch.float64, BF16))
    assert_close(out, exact, plain, BF16)
    assert lse.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(
    not CUDA, reason="the interpreter has no inline assembly: it reads float8 values one by one"
)
@pytest.mark.parametrize("cache_dtype", FLOAT8, ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(128, 128), (64, 96), (256, 256), (40, 40)])
def test_float8_values_in_pairs_are_every_value(dim: int, value_dim: int, cache_dtype: torch.dtype) -> None:
    """One key a row: the output is its value, whatever its bits."""
    batch = make_batch([(1, 1)] * 200, dim=dim, value_dim=value_dim, cache_dtype=cache_dtype, dtype=BF16)
    batch.value_cache.view(torch.uint8).random_(0, 256)
    assert batch.block_table is not None
    seen = batch.value_cache[batch.block_table[:, 0].long(), 0].double().repeat_interleave(2, 1)
    out, _ = run(paged_decode_attention, batch, Options())
    assert torch.equal(out.double().nan_to_num(7.0), seen.nan_to_num(7.0))


def test_the_tile_that_leaves_the_least_of_the_device_idle() -> None:
    wide, narrow = decode_tiles(torch.bfloat16, 128, 4, False)
    processors = 132
    assert (wide.per_processor, narrow.per_processor) == (2, 4)
    # 8 programs in 33 splits are 264, all that run at once.
    assert decode_shape((wide, narrow), 8, 1 << 15, processors) == (wide, 33)
    # 512 programs are one wave of the narrow tile, and two of the wide one.
    assert decode_shape((wide, narrow), 512, 4096, processors) == (narrow, 1)
    # 150 leave 43% idle with the wide tile, 15% with the narrow one.
    assert decode_shape((wide, narrow), 150, 4096, processors) == (narrow, 3)
    # 1024 or 2048 are so many waves that the last one counts for little.
    assert decode_shape((wide, narrow), 1024, 4096, processors) == (wide, 1)
    assert decode_shape((wide, narrow), 2048, 4096, processors) == (wide, 1)
    assert decode_shape((wide,), 0, 0, 1) == (wide, 1)
    small, deep = reversed(decode_tiles(torch.bfloat16, 64, 1, False))
    assert (small.num_stages, deep.num_stages) == (3, 4)
    # One wave of small ones holds 128 and 528 programs.
    assert decode_shape((deep, small), 128, 1 << 15, processors) == (small, 4)
    assert decode_shape((deep, small), 528, 1 << 15, processors) == (small, 1)
    assert decode_shape((deep, small), 1024, 4096, processors) == (deep, 1)
