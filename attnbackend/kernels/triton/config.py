"""Tile sizes of the attention kernels: one pure function of dtype, head size, group and kind.

A tile holds `block_m` rows (query tokens times the heads that share a kv head) and walks over
keys `block_n` at a time, `num_stages` tiles of K and V in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

Kind = Literal["prefill", "short", "decode"]

PREFILL_TOKENS_PER_ROW = 16
"""Mean query length from which a batch counts as prefill. Below it, big tiles are mostly empty."""


@dataclass(frozen=True)
class TileConfig:
    """Launch parameters of one attention kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def batch_kind(num_tokens: int, num_rows: int) -> Kind:
    """Kind of a batch from its shapes alone, so that no length is read from the device."""
    return "prefill" if num_tokens >= PREFILL_TOKENS_PER_ROW * num_rows else "short"


def padded_size(head_size: int) -> int:
    """Smallest power of two that holds a head: Triton's blocks have such extents only."""
    return max(16, 1 << (head_size - 1).bit_length())


@lru_cache(maxsize=1024)
def tile_config(dtype: torch.dtype, head_size: int, group: int, kind: Kind) -> TileConfig:
    """Tile for a matrix product in `dtype`, `group` query heads for each kv head.

    `head_size` is the larger of those of K and V.
    """
    width = padded_size(head_size)
    if dtype == torch.float32:
        return _full_precision_tile(width, group, kind)
    if kind == "prefill":
        return _prefill_tile(width)
    return _narrow_tile(width, group, kind)


def _full_precision_tile(width: int, group: int, kind: Kind) -> TileConfig:
    # Products in float32 run on FMA units, unrolled over registers: steps of more keys than this
    # spill (17 KB a thread for 32 rows by 32 keys by 256, none for 16 keys). Those in float64,
    # of float32 queries, have tensor cores but hold twice as much.
    rows = 32 if kind == "prefill" else _rows_for(group, kind, most=32)
    return TileConfig(rows, 16 if width >= 128 else 32, 8, 2)


def _prefill_tile(width: int) -> TileConfig:
    # 128 rows are two warp groups of 64 rows, the m of Hopper's wgmma; 8 warps hold the
    # accumulator without spilling. K and V of two or three stages fill shared memory.
    if width <= 64:
        return TileConfig(128, 128, 8, 3)
    if width == 128:
        return TileConfig(128, 128, 8, 2)
    return TileConfig(128, 64, 8, 2)


def _narrow_tile(width: int, group: int, kind: Kind) -> TileConfig:
    # Few rows make this a memory copy with some arithmetic: what counts is bytes in flight,
    # about 64 KiB for each program, and two programs or more on each multiprocessor.
    rows = _rows_for(group, kind, most=64)
    keys = 64 if width <= 128 else 32
    return TileConfig(rows, keys, 4, 4 if width <= 64 else 3)


def _rows_for(group: int, kind: Kind, most: int) -> int:
    # A short batch holds a few tokens of each request in a tile, decode exactly one.
    rows = group if kind == "decode" else 4 * group
    return min(most, padded_size(rows))


def heads_per_tile(group: int, block_m: int) -> int:
    """Query heads of one tile. They all share one kv head, whatever the group."""
    return min(group, block_m)


def pieces_per_kv_head(group: int, block_m: int) -> int:
    """Tiles that the group of one kv head is cut into (1 unless the group exceeds the tile)."""
    return -(-group // heads_per_tile(group, block_m))


def tile_heads(head_tile: int, group: int, block_m: int) -> tuple[int, list[int]]:
    """The kv head and the query heads of a head tile: the mapping that the kernels compute.

    Cutting the global head axis in tiles instead would let a tile straddle two kv heads.
    """
    pieces = pieces_per_kv_head(group, block_m)
    kv_head, piece = divmod(head_tile, pieces)
    per_tile = heads_per_tile(group, block_m)
    stop = min(group, (piece + 1) * per_tile)
    return kv_head, [kv_head * group + h for h in range(piece * per_tile, stop)]
