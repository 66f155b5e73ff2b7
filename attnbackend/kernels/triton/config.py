"""Tile sizes of the attention kernels: one pure function of dtype, head size, group and kind.

A tile holds `block_m` rows (query tokens times the heads that share a kv head) and walks over
keys `block_n` at a time, `num_stages` tiles of K and V in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

Kind = Literal["long prefill", "prefill", "short prefill", "short", "decode"]

PREFILL_TOKENS_PER_ROW: tuple[tuple[int, Kind], ...] = (
    (4096, "long prefill"), (1024, "prefill"), (16, "short prefill"),
)  # fmt: skip
"""Mean query lengths from which a batch is of a kind. Big tiles of shorter ones are mostly empty."""


@dataclass(frozen=True)
class TileConfig:
    """Launch parameters of one attention kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_processor: int = 1
    """Programs that run on one multiprocessor at once: what shared memory has room for."""
    leads_in_a_wave: bool = False
    """Measured to be ahead of other tiles of decode where one wave of it has room for all programs."""


def batch_kind(num_tokens: int, num_rows: int) -> Kind:
    """Kind of a batch from its shapes alone, so that no length is read from the device."""
    for tokens, kind in PREFILL_TOKENS_PER_ROW:
        if num_tokens >= tokens * num_rows:
            return kind
    return "short"


def is_prefill(kind: Kind) -> bool:
    return kind.endswith("prefill")


def padded_size(head_size: int) -> int:
    """Smallest power of two that holds a head: Triton's blocks have such extents only."""
    return max(16, 1 << (head_size - 1).bit_length())


@lru_cache(maxsize=1024)
def tile_config(
    dtype: torch.dtype, head_size: int, group: int, kind: Kind, float8_keys: bool = False
) -> TileConfig:
    """Tile for a matrix product in `dtype`, `group` query heads for each kv head.

    `head_size` is the larger of those of K and V.
    """
    width = padded_size(head_size)
    if dtype == torch.float32:
        return _full_precision_tile(width, group, kind)
    if is_prefill(kind):
        return _prefill_tile(width, kind)
    return _narrow_tile(width, group, kind, float8_keys)


def _full_precision_tile(width: int, group: int, kind: Kind) -> TileConfig:
    # Products in float32 run on FMA units, unrolled over registers: steps of more keys than this
    # spill (17 KB a thread for 32 rows by 32 keys by 256, none for 16 keys). Those in float64,
    # of float32 queries, have tensor cores but hold twice as much.
    rows = 32 if is_prefill(kind) else _rows_for(group, kind, most=32)
    return TileConfig(rows, 16 if width >= 128 else 32, 8, 2)


def _prefill_tile(width: int, kind: Kind) -> TileConfig:
    # Tiles of 128 rows read each key half as often as those of 64, the m of Hopper's wgmma, of which two
    # run on a multiprocessor at once: what one does at its ends, the other hides. Steps of more keys cost
    # less each, and waste more where a tile ends.
    if width > 128:
        return TileConfig(128, 64, 8, 2)
    if width <= 64 or kind == "short prefill":
        return TileConfig(64, 64, 4, 3, 2)
    return TileConfig(128, 128 if kind == "long prefill" else 64, 8, 3)


def _narrow_tile(width: int, group: int, kind: Kind, float8_keys: bool) -> TileConfig:
    # Few rows make this a memory copy with some arithmetic: what counts is bytes in flight,
    # about 64 KiB for each program, and two programs or more on each multiprocessor.
    rows = _rows_for(group, kind, most=64)
    stages = 4 if width <= 64 else 3
    if kind == "short" and not float8_keys:
        stages -= 1
    return TileConfig(rows, 64 if width <= 128 else 32, 4, stages, 2)


@lru_cache(maxsize=1024)
def decode_tiles(dtype: torch.dtype, head_size: int, group: int, float8_keys: bool) -> tuple[TileConfig, ...]:
    """Tiles that decode may choose of, by how many programs there are: see `decode_shape`.

    A device that the programs of one tile fill in a single wave may need two of the other, the second
    half empty. Steps of float8 keys are half as many bytes: one tile is both.
    """
    wide = tile_config(dtype, head_size, group, "decode")
    if dtype == torch.float32:
        return (replace(wide, per_processor=2),)
    if float8_keys:
        return (TileConfig(wide.block_m, wide.block_n, 2, 3, 4),)
    if wide.num_stages > 3:
        return wide, replace(wide, num_stages=3, per_processor=4, leads_in_a_wave=True)
    return wide, replace(wide, block_n=wide.block_n // 2, per_processor=4)


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
