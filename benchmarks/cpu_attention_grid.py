"""The batches that CPU attention is measured on.

Shape legend: T tokens, R requests, H query heads, K key-value heads, D head size, B blocks, S block_size,
W table width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

__all__ = ["GRID", "QUICK", "Inputs", "Point", "make_inputs"]

WORK = {
    "decode b1 ctx128": ((1,), (128,)),
    "decode b1 ctx2048": ((1,), (2048,)),
    "decode b8 ctx128": ((1,) * 8, (128,) * 8),
    "decode b8 ctx2048": ((1,) * 8, (2048,) * 8),
    "prefill 1x512": ((512,), (512,)),
    "prefill 1x2048": ((2048,), (2048,)),
    "mixed 4x(2048,1)+256": ((1,) * 4 + (256,), (2048,) * 4 + (256,)),
}
"""Name -> query lengths, sequence lengths."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One place of the grid."""

    work: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_size: int
    dtype: torch.dtype
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    kv_lora_rank: int | None = None
    """Of latent attention, whose values are so many elements of the one key; None: keys and values."""

    @property
    def name(self) -> str:
        if self.kv_lora_rank is not None:
            return f"latent {self.work} heads {self.num_heads} {str(self.dtype).removeprefix('torch.')}"
        return f"{self.work} block {self.block_size} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Inputs:
    """Tensors of a point."""

    query: Tensor
    """[T, H, D]."""
    kv_cache: Tensor
    """[B, 2, S, K, D], in memory [B, 2, K, S, D] as engines lay it out for CPU_ATTN, or [B, S, D] of latents;
    each request's blocks in random places."""
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    """int32 [R, W]."""
    scale: float
    kv_lora_rank: int | None = None

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.query.shape[:2], self.kv_lora_rank or self.query.shape[2])


def _points() -> Iterator[Point]:
    sizes, dtypes = (16, 128), (torch.float32, torch.bfloat16)
    for (work, (query_lens, seq_lens)), block_size, dtype in product(WORK.items(), sizes, dtypes):
        yield Point(
            work=work, query_lens=query_lens, seq_lens=seq_lens, block_size=block_size, dtype=dtype
        )  # fmt: skip
    decodes = [(work, batch) for work, batch in WORK.items() if work.startswith("decode")]
    for (work, (query_lens, seq_lens)), heads, dtype in product(decodes, (16, 128), dtypes):
        yield Point(
            work=work, query_lens=query_lens, seq_lens=seq_lens, block_size=16, dtype=dtype,
            num_heads=heads, num_kv_heads=1, head_size=576, kv_lora_rank=512,
        )  # fmt: skip


GRID = tuple(_points())
QUICK = tuple(p for p in GRID if p.block_size == 16 and "ctx128" in p.work and p.num_heads <= 32)


def make_inputs(point: Point, generator: torch.Generator) -> Inputs:
    """Normally distributed query, keys and values."""
    counts = [-(-length // point.block_size) for length in point.seq_lens]
    order = (torch.randperm(sum(counts), generator=generator) + 1).int()
    table_RW = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, blocks in zip(table_RW, order.split(counts), strict=True):
        row[: len(blocks)] = blocks
    blocks, size = sum(counts) + 1, point.head_size
    cache_shape: tuple[int, ...] = (blocks, point.block_size, size)
    if point.kv_lora_rank is None:
        cache_shape = (blocks, 2, point.num_kv_heads, point.block_size, size)
    kv_cache = torch.randn(cache_shape, generator=generator).to(point.dtype)
    query_shape = (sum(point.query_lens), point.num_heads, point.head_size)
    starts = torch.tensor((0, *point.query_lens)).cumsum(0)
    return Inputs(
        torch.randn(query_shape, generator=generator).to(point.dtype),
        kv_cache if point.kv_lora_rank is not None else kv_cache.transpose(2, 3),
        starts.int(), torch.tensor(point.seq_lens).int(), table_RW, point.head_size**-0.5,
        point.kv_lora_rank,
    )  # fmt: skip
