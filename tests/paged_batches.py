"""Paged batches and dense float64 attention for tests of the Triton kernels.

Legend: T tokens, R rows, H query heads, Hk kv heads, D and Dv head sizes, B blocks, S block
size, W table width, L keys of one row.
"""

from __future__ import annotations

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
    paged_attention,
    paged_decode_attention,
    unavailable_reason,
)
from attnbackend.kernels.triton.config import (  # noqa: E402
    TileConfig,
)

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


def zeros(*shape: int, dtype: torch.dtype = F16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)
