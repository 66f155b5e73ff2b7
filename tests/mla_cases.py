"""Batches of absorbed queries over a latent cache, whose unused memory holds NaN, and what they must give.

Written against the description of the format alone: nothing here comes from the code that is tested.

Legend: T tokens, Q requests, H heads, B blocks, S block size, W table width, K selected keys of a token,
L kv_lora_rank, R qk_rope_head_dim, N keys of one request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GARBAGE_BLOCK = 1 << 29


@dataclass
class MLABatch:
    """A paged batch, and the dense rows that it stands for."""

    query: Tensor
    """[T, H, L + R]"""
    kv_cache: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    rows: list[Tensor]
    """Of each request, its cached rows in float64 [N, L + R]."""
    rank: int
    topk_indices: Tensor | None = None
    k_scale: Tensor | None = None

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        """The latent and the rotated part, views of one tensor."""
        return self.query[..., : self.rank], self.query[..., self.rank :]

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def empty_results(self) -> tuple[Tensor, Tensor]:
        """An output [T, H, L] and an LSE [T, H] full of NaN."""
        shape = *self.query.shape[:2], self.rank
        device = self.query.device
        output = torch.full(shape, NAN, dtype=self.query.dtype, device=device)
        return output, torch.full(shape[:2], NAN, device=device)


def poisoned_cache(blocks: int, block_size: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """[B, S, width] of NaN: bytes of 0x7F are NaN in both kinds of float8, 0xFF in packed rows."""
    if dtype in FLOAT8:
        bits = torch.full((blocks, block_size, width), 0x7F, dtype=torch.uint8, device=device)
        return bits.view(dtype)
    fill = 0xFF if dtype == torch.uint8 else NAN
    return torch.full((blocks, block_size, width), fill, dtype=dtype, device=device)


def packed(rows_NW: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [N, 656] of rows [N, 576], and what they mean, in float64."""
    groups = rows_NW[:, :512].float().reshape(-1, 4, 128)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    scales = largest / torch.full_like(largest, 448)  # CUDA divides by a number as times its reciprocal.
    latent = (groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    rope = rows_NW[:, 512:].to(torch.bfloat16)
    parts = (latent.reshape(-1, 512), scales.reshape(-1, 4), rope)
    real = (latent.double() * scales.double()).reshape(-1, 512)
    return torch.cat([p.contiguous().view(torch.uint8) for p in parts], 1), torch.cat(
        [real, rope.double()], 1
    )


def make_batch(
    requests: list[tuple[int, int]],
    *,
    heads: int = 4,
    rank: int = 64,
    rope: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    cache_dtype: torch.dtype | None = None,
    k_scale: float | None = None,
    topk: int | None = None,
    tail: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> MLABatch:
    """Requests of (query_len, seq_len) and `tail` tokens past the last one; blocks in random order.

    cache_dtype torch.uint8 makes packed rows. topk makes selections of at most that many positions.
    """
    rng = torch.Generator().manual_seed(seed)
    cache_dtype = cache_dtype or dtype
    pages = [-(-length // block_size) for _, length in requests]
    order = (torch.randperm(sum(pages) + 2, generator=rng) + 1).tolist()
    width = 656 if cache_dtype == torch.uint8 else rank + rope
    cache = poisoned_cache(sum(pages) + 3, block_size, width, cache_dtype, device)
    table = torch.full((len(requests), max([1, *pages])), GARBAGE_BLOCK, dtype=torch.int32)
    starts = torch.tensor([0, *(n for n, _ in requests)]).cumsum(0).to(torch.int32)
    query = torch.randn(int(starts[-1]) + tail, heads, rank + rope, generator=rng).to(device, dtype)
    rows = []
    for request, (_, length) in enumerate(requests):
        mine = torch.tensor([order.pop() for _ in range(pages[request])], dtype=torch.int64)
        table[request, : len(mine)] = mine.to(torch.int32)
        new = torch.randn(length, rank + rope, generator=rng).to(device)
        stored, real = packed(new) if width == 656 else (new.to(cache_dtype), new.to(cache_dtype).double())
        at = torch.arange(length)
        bits = (lambda x: x.view(torch.uint8)) if cache_dtype in FLOAT8 else (lambda x: x)
        bits(cache)[mine[at // block_size].to(device), (at % block_size).to(device)] = bits(stored)
        rows.append(real * (k_scale or 1.0))
    lens = torch.tensor([length for _, length in requests], dtype=torch.int32)
    batch = MLABatch(query, cache, starts.to(device), lens.to(device), table.to(device), rows, rank)
    if k_scale is not None:
        batch.k_scale = torch.tensor([k_scale], device=device)
    if topk is not None:
        batch.topk_indices = _selection(requests, len(query), topk, rng).to(device)
    return batch


def _selection(requests: list[tuple[int, int]], tokens: int, topk: int, rng: torch.Generator) -> Tensor:
    """Random positions, positions behind the token among them, in random places between -1."""
    chosen = torch.full((tokens, topk), -1, dtype=torch.int32)
    token = 0
    for query_len, length in requests:
        for _ in range(query_len):
            count = min(length, topk - 1)
            places = torch.randperm(topk, generator=rng)[:count]
            chosen[token, places] = torch.randperm(length, generator=rng)[:count].to(torch.int32)
            token += 1
    return chosen


def expected(batch: MLABatch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and LSE (natural) of the whole batch, computed densely in `dtype`, returned in float64."""
    output, lse = (x.double() for x in batch.empty_results())
    output.zero_()
    lse.fill_(-INF)
    starts = batch.query_start_loc.tolist()
    for request, rows in enumerate(batch.rows):
        tokens = starts[request + 1] - starts[request]
        for i in range(tokens):
            token, position = starts[request] + i, len(rows) - tokens + i
            keys = torch.arange(max(position + 1, 0), device=rows.device)
            if batch.topk_indices is not None:
                keys = batch.topk_indices[token].long()
                keys = keys[(keys >= 0) & (keys <= position)]
            if len(keys) == 0:
                continue
            rows_NW = rows[keys].to(dtype)
            scores_HN = batch.query[token].to(dtype) @ rows_NW.T * batch.scale
            lse[token] = scores_HN.logsumexp(-1).double()
            output[token] = (scores_HN.softmax(-1) @ rows_NW[:, : batch.rank]).double()
    return output, lse
