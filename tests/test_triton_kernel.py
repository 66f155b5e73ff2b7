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
pytest.importorskip("triton")

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
    SHARED_MEMORY_LIMIT,
    TileConfig,
    heads_per_tile,
    pieces_per_kv_head,
    tile_config,
    tile_heads,
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


def dense_attention(
    q_THD: torch.Tensor, k_LHD: torch.Tensor, v_LHD: torch.Tensor, options: Options
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
        s_HTL = s_HTL + (options.alibi_slopes[:, None, None] * (key - at)).to(s_HTL.dtype)
    mask = torch.ones(n, length, dtype=torch.bool, device=q_THD.device)
    if options.causal:
        mask &= key <= at
    if options.sliding_window is not None:
        mask &= key > at - options.sliding_window
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
    block_table: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def tensors(self, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        caches = self.query, self.key_cache, self.value_cache, output
        return *caches, self.query_start_loc, self.seq_lens, self.block_table


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype in FLOAT8:  # 0x7F is NaN in both formats
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=DEVICE).view(dtype)
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)


def make_cache(
    layout: str, blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype
) -> torch.Tensor:
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
    scales = [
        None if s is None else torch.tensor(s, dtype=F32, device=DEVICE) for s in (k_scale, v_scale)
    ]
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
    shape = *batch.query.shape[:2], batch.value_cache.shape[3]
    out = torch.zeros(shape, dtype=torch.float64, device=DEVICE)
    lse = torch.full(shape[:2], -INF, dtype=torch.float64, device=DEVICE)
    starts = batch.query_start_loc.tolist()
    for row, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        span = slice(starts[row], starts[row + 1])
        if span.start == span.stop or len(keys) == 0:
            continue
        q, k, v = (x.to(dtype) for x in (batch.query[span], keys, values))
        row_out, row_lse = dense_attention(q, k, v, options)
        out[span], lse[span] = row_out.double(), row_lse.double()
    return out, lse


def run(kernel: Any, batch: Batch, options: Options, **extra: Any) -> tuple[torch.Tensor, ...]:
    """A kernel's output and LSE, written over NaN."""
    shape = *batch.query.shape[:2], batch.value_cache.shape[3]
    out = poison(shape, batch.query.dtype)
    lse = poison(shape[:2], F32)
    kernel(
        *batch.tensors(out),
        **vars(options),
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
        lse=lse,
        **extra,
    )
    return out, lse


def assert_close(
    found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype
) -> None:
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


