"""The Triton kernels against dense float64 attention, interpreted on CPU or compiled on a GPU.

Legend: T tokens, R rows, H query heads, Hk kv heads, D and Dv head sizes, B blocks, S block
size, W table width, L keys of one row.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from attnbackend.kernels.triton import (  # noqa: E402
    cache_write,
    decode_num_splits,
    decode_workspace_size,
    merge_attention_states,
    paged_attention,
    paged_decode_attention,
    unavailable_reason,
)
from attnbackend.kernels.triton.config import (  # noqa: E402
    TileConfig,
    heads_per_tile,
    pieces_per_kv_head,
    tile_config,
    tile_heads,
)
from attnbackend.kernels.triton.tile import soft_capped  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = (E4M3, E5M2)
NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.skipif(
    unavailable_reason(DEVICE) is not None, reason=str(unavailable_reason(DEVICE))
)


# --- the reference -----------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Everything about a call but its tensors; `heads` of slopes and sinks index H."""

    scale: float = 0.25
    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    attention_chunk_size: int | None = None
    ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Bidirectional ranges of the first rows; the others have none."""


def dense_attention(
    q_THD: torch.Tensor,
    k_LHD: torch.Tensor,
    v_LHD: torch.Tensor,
    options: Options,
    ranges: tuple[tuple[int, int], ...] = (),
    two_sided: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of one row in the dtype of q: heads repeated, all scores at once."""
    n, heads, _ = q_THD.shape
    length, group = k_LHD.shape[0], heads // k_LHD.shape[1]
    k_LHD, v_LHD = (x.repeat_interleave(group, 1) for x in (k_LHD, v_LHD))
    s_HTL = torch.einsum("thd,lhd->htl", q_THD, k_LHD) * options.scale
    if options.logits_soft_cap:
        s_HTL = options.logits_soft_cap * torch.tanh(s_HTL / options.logits_soft_cap)
    at = torch.arange(n, device=q_THD.device)[:, None] + length - n
    key = torch.arange(length, device=q_THD.device)[None, :]
    if options.alibi_slopes is not None:
        s_HTL = s_HTL - (options.alibi_slopes[:, None, None] * (key - at).abs()).to(s_HTL.dtype)
    mask = torch.ones(n, length, dtype=torch.bool, device=q_THD.device)
    if options.causal:
        mask &= key <= at
    if options.sliding_window is not None:
        mask &= key > at - options.sliding_window
        if two_sided:
            mask &= key < at + options.sliding_window
    if options.attention_chunk_size is not None:
        mask &= key // options.attention_chunk_size == at // options.attention_chunk_size
    for start, end in ranges:
        mask |= (at >= start) & (at < end) & (key >= start) & (key < end)
    s_HTL = s_HTL.masked_fill(~mask, -INF)
    if options.sinks is not None and length > 0:
        sink = options.sinks.to(s_HTL.dtype)[:, None, None].expand(heads, n, 1)
        s_HTL = torch.cat([s_HTL, sink], -1)
    lse_HT = torch.logsumexp(s_HTL, -1) if s_HTL.shape[-1] else s_HTL.new_full((heads, n), -INF)
    p_HTL = torch.where((s_HTL == -INF).all(-1, True), 0.0, torch.softmax(s_HTL, -1))
    out_THD = torch.einsum("htl,lhd->thd", p_HTL[..., :length], v_LHD)
    return out_THD, lse_HT.transpose(0, 1)


# --- batches -----------------------------------------------------------------------------


@dataclass
class Batch:
    """A paged batch whose unused memory holds NaN, and the dense rows that it stands for."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def tensors(self, output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        caches = self.query, self.key_cache, self.value_cache, output
        return *caches, self.query_start_loc, self.seq_lens, self.block_table


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype in FLOAT8:  # 0x7F is NaN in both formats
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=DEVICE).view(dtype)
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)


def make_cache(layout: str, blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A NaN-filled logical cache [B, 2, S, Hk, D] in one of the physical layouts."""
    if layout == "NHD":
        return poison((blocks, 2, size, heads, dim), dtype)
    if layout == "HND":
        return poison((blocks, 2, heads, size, dim), dtype).transpose(2, 3)
    assert layout == "layers interleaved"
    return poison((blocks, 3, 2, size, heads, dim), dtype)[:, 1]


def make_batch(
    rows: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    value_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = F16,
    cache_dtype: torch.dtype | None = None,
    layout: str = "NHD",
    tail: int = 0,
    k_scale: list[float] | None = None,
    v_scale: list[float] | None = None,
    seed: int = 0,
) -> Batch:
    """Rows of (query_len, seq_len), `tail` tokens past the last one, blocks in random order."""
    rng = torch.Generator().manual_seed(seed)
    value_dim, cache_dtype = value_dim or dim, cache_dtype or dtype
    width = max([1, *(-(-length // block_size) for _, length in rows)])
    needed = sum(-(-length // block_size) for _, length in rows)
    order = (torch.randperm(needed + 2, generator=rng) + 1).tolist()
    cache = make_cache(layout, needed + 3, block_size, kv_heads, max(dim, value_dim), cache_dtype)
    k_BSHD, v_BSHD = cache[:, 0][..., :dim], cache[:, 1][..., :value_dim]
    table = torch.zeros(len(rows), width, dtype=torch.int32)
    scales = [None if s is None else torch.tensor(s, dtype=F32, device=DEVICE) for s in (k_scale, v_scale)]
    starts = torch.tensor([0, *(n for n, _ in rows)]).cumsum(0).to(torch.int32)
    tokens = int(starts[-1]) + tail
    query = torch.randn(tokens, heads, dim, generator=rng).to(DEVICE, dtype)
    lens = torch.tensor([length for _, length in rows], dtype=torch.int32)
    batch = Batch(query, k_BSHD, v_BSHD, starts.to(DEVICE), lens.to(DEVICE), table.to(DEVICE))
    batch.k_scale, batch.v_scale = scales
    for row, (_, length) in enumerate(rows):
        pages = [order.pop() for _ in range(-(-length // block_size))]
        batch.block_table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        for cache_BSHD, dense, scale in (
            (k_BSHD, batch.keys, scales[0]),
            (v_BSHD, batch.values, scales[1]),
        ):
            new = torch.randn(length, *cache_BSHD.shape[2:], generator=rng).to(DEVICE)
            stored = new.to(cache_dtype)
            for j, page in enumerate(pages):
                part = stored[j * block_size : (j + 1) * block_size]
                cache_BSHD[page, : len(part)] = part
            real = stored.double()
            dense.append(real if scale is None else real * scale.double()[None, :, None])
    return batch


def expected(batch: Batch, options: Options, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Output and LSE of the whole batch, computed densely in `dtype`, returned in float64."""
    shape = *batch.query.shape[:2], batch.value_cache.shape[-1]
    out = torch.zeros(shape, dtype=torch.float64, device=DEVICE)
    lse = torch.full(shape[:2], -INF, dtype=torch.float64, device=DEVICE)
    starts = batch.query_start_loc.tolist()
    for row, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        span = slice(starts[row], starts[row + 1])
        if span.start == span.stop or len(keys) == 0:
            continue
        q, k, v = (x.to(dtype) for x in (batch.query[span], keys, values))
        ranges = options.ranges[row] if row < len(options.ranges) else ()
        two_sided = batch.block_table is None and not options.causal
        row_out, row_lse = dense_attention(q, k, v, options, ranges, two_sided)
        out[span], lse[span] = row_out.double(), row_lse.double()
    return out, lse


def range_tensor(ranges: Any, rows: int) -> torch.Tensor:
    """int32 [rows, G, 2], empty ranges after those given."""
    most = max(len(row) for row in ranges)
    filled = torch.tensor([7, 7], dtype=torch.int32).repeat(rows, most, 1)
    for row, given in enumerate(ranges[:rows]):
        for place, pair in enumerate(given):
            filled[row, place] = torch.tensor(pair)
    return filled.to(DEVICE)


def run(kernel: Any, batch: Batch, options: Options, **extra: Any) -> tuple[torch.Tensor, ...]:
    """A kernel's output and LSE, written over NaN."""
    shape = *batch.query.shape[:2], batch.value_cache.shape[-1]
    out = poison(shape, batch.query.dtype)
    lse = poison(shape[:2], F32)
    named = dict(vars(options))
    ranges = named.pop("ranges")
    kernel(
        *batch.tensors(out),
        **named,
        bidirectional_ranges=range_tensor(ranges, len(batch.seq_lens)) if ranges else None,
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
        lse=lse,
        **extra,
    )
    return out, lse


def assert_close(found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype) -> None:
    """Error at most twice that of plain PyTorch in the same dtype, plus an ulp of the largest."""
    empty = exact == -INF
    assert torch.equal(found == -INF, empty)
    found, exact, plain = (torch.where(empty, 0.0, x.double()) for x in (found, exact, plain))
    if exact.numel() == 0:
        return
    ulp = torch.finfo(dtype).eps * exact.abs().max().item()
    error, allowed = (found - exact).abs().max().item(), (plain - exact).abs().max().item()
    assert error <= 2 * allowed + ulp, f"error {error}, plain {allowed}, ulp {ulp}"


def check(kernel: Any, batch: Batch, options: Options = Options(), **extra: Any) -> None:
    out, lse = run(kernel, batch, options, **extra)
    exact_out, exact_lse = expected(batch, options, torch.float64)
    plain_out, plain_lse = expected(batch, options, batch.query.dtype)
    assert_close(out, exact_out, plain_out, batch.query.dtype)
    assert_close(lse, exact_lse, plain_lse, F32)


DTYPES = [F32, F16] + ([BF16] if CUDA else [])
MIXED = [(5, 21), (0, 0), (1, 40), (0, 7), (3, 3), (2, 0)]
DECODE = [(1, 21), (0, 0), (1, 40), (1, 0)]
BATCHES = [
    pytest.param(paged_attention, MIXED, {}, id="mixed batch"),
    pytest.param(paged_attention, MIXED, {"num_splits": 2}, id="mixed batch in splits"),
    pytest.param(paged_decode_attention, DECODE, {}, id="decode"),
    pytest.param(paged_decode_attention, DECODE, {"num_splits": 3}, id="decode in splits"),
]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)
SINKS = torch.tensor([0.3, -1.0, 2.0, -INF], device=DEVICE)
FEATURES = {
    "plain": Options(),
    "not causal": Options(causal=False),
    "window of 1": Options(sliding_window=1),
    "window of 5": Options(sliding_window=5),
    "window of 5, not causal": Options(sliding_window=5, causal=False),
    "window of 20": Options(sliding_window=20),
    "soft-cap": Options(logits_soft_cap=1.5),
    "soft-cap far above the scores": Options(logits_soft_cap=50.0),
    "alibi": Options(alibi_slopes=SLOPES),
    "sinks": Options(sinks=SINKS),
    "sinks in float16": Options(sinks=SINKS.to(F16)),
    "all at once": Options(0.4, True, 18, 2.0, SLOPES, SINKS),
    "chunks of 1": Options(attention_chunk_size=1),
    "chunks of 7": Options(attention_chunk_size=7),
    "chunks of 32, not causal": Options(causal=False, attention_chunk_size=32, alibi_slopes=SLOPES),
    "chunks wider than all": Options(attention_chunk_size=2**31 - 1, sinks=SINKS),
    "ranges": Options(ranges=(((17, 20), (3, 9)), (), ((0, 99), (39, 40)))),
    "overlapping ranges and a window": Options(
        sliding_window=3, ranges=(((15, 19), (17, 99)), (), ((36, 40), (2, 40)), (), ((0, 2), (2, 3)))
    ),
    "ranges and chunks": Options(
        attention_chunk_size=4, alibi_slopes=SLOPES, ranges=(((17, 21),), (), ((20, 40),))
    ),
}
SMALL_STEPS = TileConfig(16, 16, 4, 2)


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


def lanes(values: list[Any], dtype: torch.dtype = F32) -> torch.Tensor:
    """[len, 1, 32] whose first lane holds `values`, the others 0: a head of size 1."""
    x = torch.zeros(len(values), 1, 32, dtype=F32, device=DEVICE)
    x[:, 0, 0] = torch.tensor(values, dtype=F32)
    return x.to(dtype)


def tiny(
    query: list[Any],
    keys: list[Any],
    values: list[Any],
    cache_dtype: torch.dtype = F32,
    rest: float = NAN,
) -> Batch:
    """One row over one block of 16 slots, `rest` in all that is not given."""
    caches: list[torch.Tensor] = []
    for given in (keys, values):
        cache = torch.full((2, 16, 1, 32), rest, device=DEVICE).to(cache_dtype)
        cache[1, : len(given)] = lanes(given, cache_dtype)
        caches.append(cache)
    ints = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, len(query)], [len(keys)], [[1]])]
    return Batch(lanes(query), caches[0], caches[1], ints[0], ints[1], ints[2])


def first_lane(kernel: Any, batch: Batch, **options: Any) -> list[float]:
    out, _ = run(kernel, batch, Options(**{"scale": 1.0, **options}))
    return [float(x) for x in out[:, 0, 0]]


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


# --- writing the cache -------------------------------------------------------------------


AWKWARD = [0.0, -0.0, 1.0, 1.0625, 1.1875, -1.3125, 447.0, 464.0, 1e4, -6e4, INF, -INF, NAN,
           2**-6, 2**-7, 2**-9, 2**-10, 1.5 * 2**-9, 2.5 * 2**-9, 2**-14, 2**-16, 1.5 * 2**-16,
           2.5 * 2**-16, 2**-17, 1e-30, 57344.0, 61440.0, 3.3, -0.007, 0.1, 17.0, 19.0]  # fmt: skip


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def stored(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None and x.dtype == dtype:
        return x
    x = x.float() if scale is None else x.float() / scale[:, None]
    if scale is not None or dtype in FLOAT8:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


@pytest.mark.parametrize("scale", [None, [1.0], [0.3, 7.0]], ids=str)
@pytest.mark.parametrize("cache_dtype", [F32, F16, BF16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_cache_write_stores_what_torch_would(
    dtype: torch.dtype, cache_dtype: torch.dtype, scale: Any
) -> None:
    rng = torch.Generator().manual_seed(1)
    key = torch.randn(4, 2, 32, generator=rng) * 20
    key[0] = torch.tensor(AWKWARD)
    key = key.to(DEVICE, dtype)
    scales = None if scale is None else torch.tensor(scale, dtype=F32, device=DEVICE)
    cache = make_cache("HND", 3, 16, 2, 32, cache_dtype)
    slots = torch.tensor([17, -1, 47, 0], device=DEVICE)
    before = cache.clone()
    cache_write(key, key * 0.5, cache[:, 0], cache[:, 1], slots, k_scale=scales, v_scale=scales)
    for token, slot in ((0, 17), (2, 47), (3, 0)):
        for part, new in ((0, key), (1, key * 0.5)):
            before[slot // 16, part, slot % 16] = stored(new[token], cache_dtype, scales)
    same = bits(cache) == bits(before)
    both_nan = (cache.float().isnan() & before.float().isnan()).contiguous()
    assert (same.view(*both_nan.shape, -1).all(-1) | both_nan).all()


@pytest.mark.parametrize("layout", ["NHD", "HND", "layers interleaved"])
def test_cache_write_of_unequal_head_sizes_and_strides(layout: str) -> None:
    cache = make_cache(layout, 3, 48, 3, 96, F16)
    k_BSHD, v_BSHD = cache[:, 0][..., :40], cache[:, 1]
    key = torch.randn(3, 5, 40, device=DEVICE, dtype=F16).transpose(0, 1)
    value = torch.randn(5, 3, 200, device=DEVICE, dtype=F16)[..., :96]
    slots = torch.tensor([143, -1, 0, 48, 95], device=DEVICE)
    cache_write(key, value, k_BSHD, v_BSHD, slots)
    written = torch.zeros(3, 48, dtype=torch.bool, device=DEVICE)
    for token, slot in ((0, 143), (2, 0), (3, 48), (4, 95)):
        written[slot // 48, slot % 48] = True
        assert torch.equal(k_BSHD[slot // 48, slot % 48], key[token])
        assert torch.equal(v_BSHD[slot // 48, slot % 48], value[token])
    assert cache[:, 0][..., 40:].isnan().all()
    assert k_BSHD[~written].isnan().all()
    assert v_BSHD[~written].isnan().all()


# --- merging states ----------------------------------------------------------------------


def merged(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = poison(tuple(out_a.shape), out_a.dtype), poison(tuple(lse_a.shape), F32)
    merge_attention_states(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def test_merging_two_empty_states_is_empty() -> None:
    zeros = torch.zeros(1, 1, 2, device=DEVICE)
    empty = torch.full((1, 1), -INF, device=DEVICE)
    out, lse = merged(zeros, empty, zeros, empty)
    assert torch.equal(out, zeros)
    assert torch.equal(lse, empty)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("rest", [0.0, NAN])
def test_the_empty_state_is_the_identity_bit_for_bit(dtype: torch.dtype, rest: float) -> None:
    x = torch.randn(3, 5, 40, device=DEVICE).to(dtype)
    x[0, 0, :2] = torch.tensor([-0.0, 1e-7])
    lse_x = torch.randn(3, 5, device=DEVICE) * 30
    nothing, empty = torch.full_like(x, rest), torch.full_like(lse_x, -INF)
    for states in ((x, lse_x, nothing, empty), (nothing, empty, x, lse_x)):
        out, lse = merged(*states)
        assert torch.equal(bits(out), bits(x))
        assert torch.equal(bits(lse), bits(lse_x))


def test_merge_of_known_weights() -> None:
    one, zero = torch.ones(1, 1, 8, device=DEVICE), torch.zeros(1, 1, 8, device=DEVICE)
    lse_a = torch.zeros(1, 1, device=DEVICE)
    out, lse = merged(one, lse_a, zero, torch.full_like(lse_a, math.log(3)))
    assert out.flatten().tolist() == pytest.approx([0.25] * 8)
    assert lse.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("strided", ["a", "b", "both, and the result"])
def test_each_state_is_read_with_its_own_strides(strided: str) -> None:
    a, b = (torch.randn(2, 3, 128, device=DEVICE) for _ in range(2))
    lse_a, lse_b = (torch.randn(2, 3, device=DEVICE) for _ in range(2))
    right, right_lse = merged(a, lse_a, b, lse_b)
    padded = [torch.full((2, 3, 192), NAN, device=DEVICE)[..., :128].copy_(x) for x in (a, b)]
    turned = lse_a.t().contiguous().t()
    if strided == "a":
        out, lse = merged(padded[0], turned, b, lse_b)
    elif strided == "b":
        out, lse = merged(a, lse_a, padded[1], lse_b)
    else:
        out = torch.full((128, 2, 3), NAN, device=DEVICE).permute(1, 2, 0)
        lse = torch.full((3, 2), NAN, device=DEVICE).t()
        merge_attention_states(padded[0], turned, padded[1], lse_b, out, lse)
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)


def test_merge_of_two_halves_is_attention_over_all_keys() -> None:
    rng = torch.Generator().manual_seed(3)
    q = torch.randn(3, 4, 32, generator=rng, dtype=torch.float64).to(DEVICE)
    k, v = (torch.randn(20, 4, 32, generator=rng, dtype=torch.float64).to(DEVICE) for _ in "kv")
    options = Options(causal=False)
    whole, whole_lse = dense_attention(q, k, v, options)
    halves = [dense_attention(q, k[s], v[s], options) for s in (slice(7), slice(7, 20))]
    (out_a, lse_a), (out_b, lse_b) = [[x.float() for x in half] for half in halves]
    out, lse = merged(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out, whole.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse.float(), rtol=1e-6, atol=1e-6)


# --- what is refused ---------------------------------------------------------------------

SPLITS_OF: dict[Any, dict[str, int]] = {paged_decode_attention: {"num_splits": 2}}


def zeros(*shape: int, dtype: torch.dtype = F16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap is -1.0"),
        ({"alibi_slopes": SLOPES[:3]}, "alibi_slopes"),
        ({"sinks": SINKS.double()}, "sinks"),
        ({"k_scale": torch.ones(3, device=DEVICE)}, "k_scale"),
        ({"v_scale": torch.ones(1, device=DEVICE, dtype=F16)}, "v_scale"),
        ({"lse": torch.zeros(9, 4, device=DEVICE, dtype=F16)}, "lse"),
    ],
)
def test_an_option_out_of_range_is_refused(change: dict[str, Any], message: str) -> None:
    batch = make_batch(MIXED)
    with pytest.raises(ValueError, match=message):
        paged_attention(*batch.tensors(torch.empty_like(batch.query)), scale=1.0, **change)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("query", zeros(11, 4, 32, dtype=torch.float64), "query.dtype is torch.float64"),
        ("query", zeros(11, 3, 32), "query heads is 3"),
        ("query", zeros(11, 4, 36)[..., :36], "head size"),
        ("key_cache", zeros(3, 8, 2, 32), "value_cache.shape"),
        ("seq_lens", zeros(6, dtype=torch.int64), r"seq_lens\.dtype is torch\.int64"),
        ("query_start_loc", zeros(6, dtype=torch.int32), "query_start_loc is 6"),
        ("block_table", zeros(5, 3, dtype=torch.int32), "rows of block_table is 5"),
        ("block_table", zeros(6, 6, dtype=torch.int32)[:, ::2], "last stride of block_table is 2"),
        ("query_start_loc", zeros(7, 1, dtype=torch.int32), "query_start_loc.shape"),
        ("query", zeros(11, 4, 64)[..., ::2], "last stride of query is 2"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, value: torch.Tensor, message: str) -> None:
    batch = make_batch(MIXED)
    setattr(batch, name, value)
    with pytest.raises(ValueError, match=message):
        paged_attention(*batch.tensors(zeros(11, 4, 32)), scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["key_cache", "query_start_loc", "seq_lens", "block_table"])
def test_a_tensor_on_another_device_is_refused_by_name(name: str) -> None:
    batch = make_batch(DECODE)
    setattr(batch, name, getattr(batch, name).cpu())
    for kernel in (paged_attention, paged_decode_attention):
        with pytest.raises(ValueError, match=f"device of {name} is cpu; allowed: cuda:0"):
            run(kernel, batch, Options())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "k_scale", "lse", "workspace"])
def test_an_optional_tensor_on_another_device_is_refused_by_name(name: str) -> None:
    batch = make_batch(DECODE)
    output = torch.empty_like(batch.query)
    sizes = {"k_scale": (1,), "lse": batch.query.shape[:2], "workspace": (9999,)}
    given = {"num_splits": 2, name: torch.zeros(sizes.get(name, (4,)))}
    with pytest.raises(ValueError, match=f"device of {name} is cpu"):
        paged_decode_attention(*batch.tensors(output), scale=1.0, **given)


@pytest.mark.gpu
def test_writers_and_merges_refuse_another_device_by_name() -> None:
    new, cache = torch.zeros(3, 2, 32), torch.zeros(2, 16, 2, 32, device=DEVICE)
    slots = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="device of slot_mapping is cpu"):
        cache_write(new.to(DEVICE), new.to(DEVICE), cache, cache, slots)
    with pytest.raises(ValueError, match="device is cpu"):
        cache_write(new, new, cache, cache, slots)
    state, lse = torch.zeros(2, 3, 8, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    with pytest.raises(ValueError, match="device of lse_b is cpu"):
        merge_attention_states(state, lse, state, lse.cpu(), state, lse)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kernel", [paged_attention, paged_decode_attention])
def test_a_launch_follows_its_tensors_to_a_device_that_is_not_current(kernel: Any) -> None:
    batch = make_batch(DECODE)
    right, _ = run(kernel, batch, Options(), **SPLITS_OF.get(kernel, {}))
    there = tuple(x.to("cuda:1") for x in batch.tensors(poison(tuple(right.shape), F16)))
    kernel(*there, scale=Options().scale, **SPLITS_OF.get(kernel, {}))
    assert torch.cuda.current_device() == 0
    assert torch.equal(there[3].cpu(), right.cpu())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"num_splits": 0}, "num_splits is 0"),
        ({"num_splits": 2, "workspace": zeros(10, dtype=F32)}, "workspace is .* 544 elements"),
        ({"num_splits": 2, "workspace": zeros(9999)}, "workspace"),
    ],
)
def test_splits_that_do_not_fit_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(paged_decode_attention, make_batch([(1, 2), (1, 2)]), Options(), **extra)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_row_of_two_tokens_in_a_decode_batch_does_not_pass_for_one(num_splits: int) -> None:
    batch = make_batch([(2, 20), (0, 0), (1, 9)])
    out, lse = run(paged_decode_attention, batch, Options(), num_splits=num_splits)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert not out[2].isnan().any()


def test_more_tokens_than_rows_is_not_a_decode_batch() -> None:
    with pytest.raises(ValueError, match="number of tokens is 3"):
        run(paged_decode_attention, make_batch([(2, 2), (1, 2)]), Options())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, "slot_mapping"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, "slot_mapping"),
        ({"value": torch.zeros(3, 1, 32)}, "value.shape"),
        ({"key": torch.zeros(3, 2, 32, dtype=torch.float64)}, "key.dtype"),
        ({"k_scale": torch.ones(5)}, "k_scale"),
    ],
)
def test_a_cache_write_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    cache = torch.zeros(2, 2, 16, 2, 32, device=DEVICE)
    new = torch.zeros(3, 2, 32, device=DEVICE)
    slots = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    arguments = {"key": new, "value": new, "key_cache": cache[:, 0], "value_cache": cache[:, 1],
                 "slot_mapping": slots, **{k: v.to(DEVICE) for k, v in change.items()}}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        cache_write(**arguments)


def test_a_merge_that_does_not_fit_is_refused() -> None:
    x, lse = torch.zeros(2, 3, 8, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    with pytest.raises(ValueError, match=r"out_b\.shape"):
        merge_attention_states(x, lse, x[:1], lse, x, lse)
    with pytest.raises(ValueError, match="lse_b"):
        merge_attention_states(x, lse, x, lse.half(), x, lse)


# --- launches ----------------------------------------------------------------------------


def test_availability_gives_a_reason() -> None:
    assert unavailable_reason(DEVICE) is None
    assert "mps" in str(unavailable_reason("mps"))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("kind", ["prefill", "short", "decode"])
def test_tiles_are_powers_of_two_that_hold_the_group(kind: Any, dtype: torch.dtype) -> None:
    for group in (1, 3, 8, 24, 128):
        for size in (32, 80, 128, 192, 256):
            tile = tile_config(dtype, size, group, kind)
            for extent in (tile.block_m, tile.block_n):
                assert extent >= 16
                assert extent & (extent - 1) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="the interpreter compiles nothing")
def test_lengths_do_not_compile_anew() -> None:
    compiled: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    for tokens, length in ((17, 33), (32, 48), (33, 160), (48, 161), (64, 75)):
        if tokens == 32:
            triton.knobs.runtime.jit_post_compile_hook = lambda **info: compiled.append(str(info))
        try:
            run(paged_attention, make_batch([(tokens, tokens + length)]), Options())
            rows = [(1, length)] * tokens
            run(paged_decode_attention, make_batch(rows), Options(), num_splits=2)
        finally:
            if tokens != 32:
                triton.knobs.runtime.jit_post_compile_hook = before
    assert compiled == []
