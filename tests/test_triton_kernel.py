"""The Triton kernels against dense float64 attention: features, keys that are the tokens' own, masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from paged_batches import (  # noqa: F401
    BATCHES,
    BF16,
    DEVICE,
    DTYPES,
    E4M3,
    F16,
    F32,
    FEATURES,
    FLOAT8,
    INF,
    MIXED,
    NAN,
    SINKS,
    SLOPES,
    SMALL_STEPS,
    Batch,
    Options,
    assert_close,
    check,
    expected,
    first_lane,
    make_batch,
    poison,
    pytestmark,
    run,
    tiny,
)

from attnbackend.kernels.triton import (
    paged_attention,
    paged_decode_attention,
)

# --- features ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "rows", "extra"), BATCHES)
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES.keys())
def test_feature_equals_dense_attention(
    kernel: Any, rows: Any, extra: Any, options: Options, dtype: torch.dtype
) -> None:
    check(kernel, make_batch(rows, dtype=dtype, tail=0 if extra else 1), options, **extra)


@pytest.mark.parametrize(("kernel", "rows", "extra"), BATCHES)
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES.keys())
def test_feature_with_steps_of_16_keys(kernel: Any, rows: Any, extra: Any, options: Options) -> None:
    """Small steps leave whole steps outside, inside and across the edges of every mask."""
    rows = [(n, length + 16 * (length > 20)) for n, length in rows]
    check(kernel, make_batch(rows), options, tile=SMALL_STEPS, **extra)


@pytest.mark.parametrize(("kernel", "rows", "extra"), BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 2), (10, 2), (8, 1)])
def test_group_size(kernel: Any, rows: Any, extra: Any, heads: int, kv_heads: int) -> None:
    check(kernel, make_batch(rows, heads=heads, kv_heads=kv_heads), **extra)


@pytest.mark.parametrize(("kernel", "rows", "extra"), BATCHES)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 80), (128, 128), (40, 96)])
def test_head_size(kernel: Any, rows: Any, extra: Any, dim: int, value_dim: int) -> None:
    options = Options(scale=dim**-0.5)
    check(kernel, make_batch(rows, dim=dim, value_dim=value_dim), options, **extra)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["prefill", "short", "decode"])
def test_head_size_256_fits_the_device(kind: str, dtype: torch.dtype) -> None:
    rows = {"prefill": [(40, 70)], "short": [(2, 70)], "decode": [(1, 70)]}[kind]
    kernel = paged_decode_attention if kind == "decode" else paged_attention
    check(kernel, make_batch(rows, dim=256, dtype=dtype), Options(scale=0.0625))


@pytest.mark.parametrize(("kernel", "rows", "extra"), BATCHES)
@pytest.mark.parametrize("block_size", [32, 48, 128])
def test_block_size(kernel: Any, rows: Any, extra: Any, block_size: int) -> None:
    rows = [(n, 4 * length) for n, length in rows]
    options = Options(sliding_window=50)
    check(kernel, make_batch(rows, block_size=block_size), options, **extra)


@pytest.mark.parametrize(("kernel", "rows", "extra"), BATCHES)
@pytest.mark.parametrize("layout", ["HND", "layers interleaved"])
def test_layout(kernel: Any, rows: Any, extra: Any, layout: str) -> None:
    check(kernel, make_batch(rows, layout=layout), **extra)


@pytest.mark.parametrize(("kernel", "rows", "extra"), BATCHES)
@pytest.mark.parametrize("scales", [([0.5], [2.0]), ([0.5, 0.75], [2.0, 0.3]), (None, None)])
@pytest.mark.parametrize("cache_dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float8_cache(
    kernel: Any, rows: Any, extra: Any, scales: Any, cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    k_scale, v_scale = scales
    batch = make_batch(rows, dtype=dtype, cache_dtype=cache_dtype, k_scale=k_scale, v_scale=v_scale)
    check(kernel, batch, **extra)


@pytest.mark.parametrize(("kernel", "rows", "extra"), BATCHES)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(F16, F32), (F32, F16), (F16, BF16), (BF16, BF16), (BF16, E4M3)]
)
def test_dtype_pair(kernel: Any, rows: Any, extra: Any, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    check(kernel, make_batch(rows, dtype=dtype, cache_dtype=cache_dtype), **extra)


def test_strided_query_output_and_lse() -> None:
    batch = make_batch(MIXED)
    tokens, heads, dim = batch.query.shape
    wide = poison((tokens, heads, 2 * dim), F16)
    wide[..., :dim] = batch.query
    batch.query = wide[..., :dim]
    out = poison((heads, tokens, dim), F16).transpose(0, 1)
    lse = poison((heads, tokens), F32).transpose(0, 1)
    paged_attention(*batch.tensors(out), scale=0.25, lse=lse)
    exact_out, exact_lse = expected(batch, Options(), torch.float64)
    plain_out, plain_lse = expected(batch, Options(), F16)
    assert_close(out, exact_out, plain_out, F16)
    assert_close(lse, exact_lse, plain_lse, F32)
    assert wide[..., dim:].isnan().all()


# --- keys that are the tokens' own ---------------------------------------------------------


OWN = [(5, 5), (0, 0), (40, 40), (3, 0), (1, 1)]


def make_own_batch(rows: list[tuple[int, int]], *, tail: int = 0, **shape: Any) -> Batch:
    """An encoder's batch: key and value lie in rows of one buffer, NaN where no row may read."""
    batch = make_batch([(n, max(length, 0)) for n, length in rows], tail=tail, **shape)
    tokens, heads = batch.query.shape[0], batch.key_cache.shape[2]
    fused = poison((tokens, heads, 3 * 64), batch.query.dtype)
    key, value = fused[..., : batch.key_cache.shape[3]], fused[..., 64 : 64 + batch.value_cache.shape[3]]
    starts = batch.query_start_loc.tolist()
    for start, keys, values in zip(starts[:-1], batch.keys, batch.values, strict=True):
        key[start : start + len(keys)] = keys
        value[start : start + len(values)] = values
    batch.key_cache, batch.value_cache, batch.block_table = key, value, None
    return batch


OWN_FEATURES = {
    **{name: options for name, options in FEATURES.items() if not options.ranges},
    "window of 18, not causal, and all else": Options(0.4, False, 18, 2.0, SLOPES, SINKS),
    "window wider than all, not causal": Options(causal=False, sliding_window=2**31 - 1),
}


@pytest.mark.parametrize("tile", [None, SMALL_STEPS], ids=["chosen tile", "tile of 16 rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OWN_FEATURES.values(), ids=OWN_FEATURES.keys())
def test_own_keys_equal_dense_attention(options: Options, dtype: torch.dtype, tile: Any) -> None:
    check(paged_attention, make_own_batch(OWN, dtype=dtype, tail=2), options, tile=tile)


def test_own_keys_in_splits_of_unequal_head_sizes() -> None:
    batch = make_own_batch([(1, 1), (300, 300)], dim=40, value_dim=64, heads=2, kv_heads=1)
    check(paged_attention, batch, Options(causal=False, sliding_window=270), num_splits=2)


def test_own_keys_are_those_of_the_tokens() -> None:
    batch = make_own_batch(OWN)
    batch.key_cache = batch.key_cache[:-1]
    with pytest.raises(ValueError, match=r"key_cache.shape is \(48, 2, 32\); allowed: \[49, Hk, D\]"):
        run(paged_attention, batch, Options())


# --- chunks and ranges ---------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        Options(attention_chunk_size=512),
        Options(attention_chunk_size=300, sinks=SINKS, alibi_slopes=SLOPES),
        Options(sliding_window=5, ranges=(((80, 700),), ((0, 99),), (), ((299, 300),))),
    ],
    ids=["chunks of 512", "chunks of 300", "ranges before a window"],
)
def test_decode_of_long_rows_begins_at_its_first_key(options: Options, num_splits: int) -> None:
    """What a row does not see is NaN, and splits lie where the keys begin."""
    batch = make_batch([(1, 700), (1, 3), (0, 0), (1, 300)], heads=4, kv_heads=1)
    check(paged_decode_attention, batch, options, num_splits=num_splits)


@pytest.mark.parametrize(
    ("options", "first"),
    [(Options(attention_chunk_size=64), 128), (Options(sliding_window=64), 86)],
    ids=["chunk", "window"],
)
@pytest.mark.parametrize("kernel", [paged_attention, paged_decode_attention])
def test_pages_before_the_first_key_are_not_read(kernel: Any, options: Options, first: int) -> None:
    batch = make_batch([(1, 150)])
    pages = batch.block_table[0, : first // 16].clone()
    exact = run(kernel, batch, options)
    batch.key_cache[pages.long()] = NAN
    batch.block_table[0, : first // 16] = 2**30
    for found, right in zip(run(kernel, batch, options), exact, strict=True):
        assert torch.equal(found, right)


def test_positions_before_the_first_lie_in_no_chunk_of_keys() -> None:
    """Of 5 tokens over 3 keys the first two stand at -2 and -1, and -1 // 4 is not 0."""
    batch = tiny([0] * 5, [0] * 3, [0, 1, 2])
    found = first_lane(paged_attention, batch, causal=False, attention_chunk_size=4)
    assert found == [0, 0, 1, 1, 1]
    assert run(paged_attention, batch, Options(causal=False, attention_chunk_size=4))[1][:2, 0].tolist() == [
        -INF,
        -INF,
    ]


def test_known_masks() -> None:
    batch = tiny([0] * 6, [0] * 6, [0, 1, 2, 3, 4, 5])
    assert first_lane(paged_attention, batch, attention_chunk_size=4) == [0, 0.5, 1, 1.5, 4, 4.5]
    ranged = first_lane(paged_attention, batch, sliding_window=1, ranges=(((1, 3), (4, 9)),))
    assert ranged == [0, 1.5, 1.5, 3, 4.5, 4.5]


def test_bidirectional_alibi_falls_off_on_both_sides() -> None:
    batch = tiny([0] * 3, [0] * 3, [1, 0, 0])
    found = first_lane(paged_attention, batch, causal=False, alibi_slopes=torch.ones(1, device=DEVICE))
    e = math.exp(-1)
    assert found == pytest.approx([1 / (1 + e + e * e), e / (1 + 2 * e), e * e / (1 + e + e * e)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0; allowed: None, or at least 1"),
        ({"attention_chunk_size": 4, "sliding_window": 4}, "allowed: None beside a sliding_window"),
        (
            {"causal": False, "ranges": (((0, 2),),)},
            "bidirectional_ranges is given; allowed: None unless causal",
        ),
    ],
)
def test_masks_that_contradict_each_other_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(paged_attention, make_batch([(3, 3)]), Options(**options))
