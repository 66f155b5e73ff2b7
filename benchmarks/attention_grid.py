"""The shapes that attention is measured on, and tensors for them.

Shape legend: T tokens, R rows, H query heads, K key-value heads, D head size, B blocks, S block_size,
W table width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from attnbackend import CommonAttentionMetadata
from attnbackend.impl import AttentionParams

__all__ = ["GRID", "QUICK", "SHORT", "SPREAD", "WIDE", "Inputs", "Point", "make_inputs"]

HEADS = ((32, 8, 128), (64, 8, 128), (16, 16, 64), (8, 1, 256))
_MIXED = {
    "chunk_512_and_32_decodes": ((1,) * 32 + (512,), (2048,) * 33),
    "chunk_2048_and_64_decodes": ((1,) * 64 + (2048,), (4096,) * 65),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One place of the grid."""

    work: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    kv_cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.head_size}"
        return f"{self.work} {heads} page {self.block_size} cache {self.kv_cache_dtype}"

    @property
    def is_decode(self) -> bool:
        return max(self.query_lens) == 1

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that must be read at least once."""
        size = 1 if self.kv_cache_dtype.startswith("fp8") else 2
        return 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_size * size

    @property
    def flops(self) -> int:
        """Of both matrix products, over the keys that a causal mask lets through."""
        pairs = sum(
            q * (n - q) + q * (q + 1) // 2 for q, n in zip(self.query_lens, self.seq_lens, strict=True)
        )
        return 4 * pairs * self.num_heads * self.head_size

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_size=self.head_size,
            dtype=torch.bfloat16, kv_cache_dtype=self.kv_cache_dtype, block_size=self.block_size,
            device_type="cuda", scale=self.head_size**-0.5,
        )  # fmt: skip


def _work() -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    for rows, length in product((1, 8, 64, 256), (512, 4096, 32768)):
        yield f"decode B{rows} L{length}", (1,) * rows, (length,) * rows
    for rows, length in ((1, 8192), (4, 2048), (1, 32768), (16, 512)):
        yield f"prefill {rows}x{length}", (length,) * rows, (length,) * rows
    yield "4 tokens B64 L4096", (4,) * 64, (4096,) * 64
    for name, (queries, lens) in _MIXED.items():
        yield name, queries, lens


def _grid() -> Iterator[Point]:
    for (heads, kv_heads, size), block, dtype in product(HEADS, (16, 64), ("auto", "fp8_e4m3")):
        for work, queries, lens in _work():
            yield Point(
                work=work, query_lens=queries, seq_lens=lens, num_heads=heads, num_kv_heads=kv_heads,
                head_size=size, block_size=block, kv_cache_dtype=dtype,
            )  # fmt: skip


def _is_main(point: Point) -> bool:
    return (point.num_heads, point.num_kv_heads, point.block_size, point.kv_cache_dtype) == (
        32,
        8,
        16,
        "auto",
    )


_QUICK_WORK = (
    "decode B1 L4096", "decode B1 L32768", "decode B8 L4096", "decode B64 L512", "decode B64 L4096",
    "decode B256 L4096", "prefill 1x8192", "prefill 4x2048", "prefill 16x512", "4 tokens B64 L4096",
    "chunk_512_and_32_decodes",
)  # fmt: skip
_SPREAD_WORK = (
    "decode B8 L4096", "decode B64 L4096", "decode B256 L512", "prefill 4x2048", "4 tokens B64 L4096",
    "chunk_2048_and_64_decodes",
)  # fmt: skip
_WIDE_WORK = (
    "decode B1 L32768", "decode B64 L4096", "decode B256 L512", "prefill 1x8192", "chunk_2048_and_64_decodes",
)  # fmt: skip
_SHORT_LENS = ((32, 128), (64, 256), (16, 512), (8, 1024), (4, 2048))
_SHORT_WORK = {
    **{f"prefill {rows}x{length}": (length,) * rows for rows, length in _SHORT_LENS},
    "prefill 24 of 100 to 600": tuple(100 + 137 * i % 501 for i in range(24)),
}
GRID = tuple(_grid())
QUICK = tuple(p for p in GRID if _is_main(p) and p.work in _QUICK_WORK)
"""Some work of the main shape: kernels that need no compiling."""
SPREAD = tuple(p for p in GRID if _is_main(p) or p.work in _SPREAD_WORK)
"""All work of the main shape, some of every other."""
WIDE = tuple(p for p in GRID if p.work in _WIDE_WORK)
"""The same five of every shape: all heads, pages and caches."""
SHORT = tuple(
    Point(work=work, query_lens=lens, seq_lens=lens, num_heads=heads, num_kv_heads=kv_heads, head_size=size)
    for heads, kv_heads, size in HEADS
    for work, lens in _SHORT_WORK.items()
)
"""Short prompts without context."""


@dataclass(frozen=True)
class Inputs:
    """What every side of a point is given."""

    query: Tensor
    """[T, H, D]."""
    key: Tensor
    value: Tensor
    kv_cache: Tensor
    """[B, 2, S, K, D]; the new tokens are in it."""
    common: CommonAttentionMetadata

    @property
    def max_query_len(self) -> int:
        return self.common.max_query_len


def make_inputs(point: Point, seed: int = 0) -> Inputs:
    """Unit-normal data on the current CUDA device, pages in random order."""
    torch.manual_seed(seed)
    rows, width = len(point.seq_lens), -(-max(point.seq_lens) // point.block_size)
    starts = torch.tensor([0, *point.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lens = torch.tensor(point.seq_lens, dtype=torch.int32)
    table = (torch.randperm(rows * width, device="cuda") + 1).int().view(rows, width)
    cache = _cache(point, rows * width + 1)
    tokens = int(starts[-1])
    query = torch.randn(tokens, point.num_heads, point.head_size, device="cuda", dtype=torch.bfloat16)
    key, value = _new_tokens(point, cache, table, starts)
    common = CommonAttentionMetadata(
        query_start_loc=starts.cuda(), seq_lens=lens.cuda(), block_table=table, num_reqs=rows,
        num_actual_tokens=tokens, max_query_len=max(point.query_lens), max_seq_len=max(point.seq_lens),
        query_start_loc_cpu=starts, seq_lens_cpu=lens,
    )  # fmt: skip
    return Inputs(query, key, value, cache, common)


def _cache(point: Point, blocks: int) -> Tensor:
    shape = (blocks, 2, point.block_size, point.num_kv_heads, point.head_size)
    if point.kv_cache_dtype == "auto":
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
    cache = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
    for part in cache.split(4096):
        part.copy_(torch.randn(part.shape, device="cuda"))
    return cache


def _new_tokens(point: Point, cache: Tensor, table: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the new tokens, as the cache holds them."""
    slots = []
    for row, (queries, length) in enumerate(zip(point.query_lens, point.seq_lens, strict=True)):
        positions = torch.arange(length - queries, length, device="cuda")
        page = table[row, positions // point.block_size].long()
        slots.append(page * point.block_size + positions % point.block_size)
    slot_T = torch.cat(slots)
    block_T, offset_T = slot_T // point.block_size, slot_T % point.block_size
    bits = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    key, value = (bits[block_T, side, offset_T].view(cache.dtype).to(torch.bfloat16) for side in (0, 1))
    return key, value
