"""How decode cuts its keys into splits, and how much scratch memory that takes.

Everything here depends on shapes alone: a captured graph keeps its number of splits, and the
kernel divides the real lengths by it at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from .config import TileConfig

MIN_SPLIT_KEYS = 64
"""Fewest keys worth a split of their own, a step of the kernel: one request of 512 keys was measured fastest
in 8 splits, and slowest in one."""

MAX_SPLITS = 128
EVEN_WAVES = 3
"""With more waves of programs than these no wave is waited for: programs end one by one."""


def decode_num_splits(num_programs: int, max_keys: int, num_slots: int) -> int:
    """Splits that fill the device in one wave.

    `num_programs` = rows * kv heads (* pieces of a group): what runs without splitting; `max_keys` =
    table width * block size; `num_slots` = programs that the device runs at once. Two splits of the
    fewest keys are not worth a second kernel to merge them.
    """
    if max_keys <= 2 * MIN_SPLIT_KEYS:
        return 1
    wanted = num_slots // max(1, num_programs)
    return max(1, min(wanted, max_keys // MIN_SPLIT_KEYS, MAX_SPLITS))


def split_unit(block_size: int, block_n: int) -> int:
    """What a split's keys are a multiple of: blocks, where whole ones make a step of `block_n` keys.

    Whole steps would be even less alike in bytes.
    """
    return block_size if block_n % block_size == 0 else block_n


def decode_shape(
    tiles: Sequence[TileConfig], num_programs: int, max_keys: int, num_processors: int
) -> tuple[TileConfig, int]:
    """The tile, and its splits, whose waves of programs leave the least of the device idle.

    Of tiles that do equally well it is the one with fewer waves, then the first; but the first with many
    waves anyway: 256 requests of 4,096 or of 32,768 keys were faster so on an H200.
    """
    for tile in tiles:
        slots = tile.per_processor * num_processors
        if tile.leads_in_a_wave and num_programs <= slots:
            return tile, decode_num_splits(num_programs, max_keys, slots)
    best: tuple[tuple[float, int], TileConfig, int] | None = None
    for tile in tiles:
        slots = tile.per_processor * num_processors
        splits = decode_num_splits(num_programs, max_keys, slots)
        waves = -(-num_programs * splits // slots)
        if waves > EVEN_WAVES and best is None:
            return tile, splits
        found = (round(num_programs * splits / max(1, waves * slots), 3), -waves), tile, splits
        if best is None or found[0] > best[0]:
            best = found
    assert best is not None, "no tile to choose of"
    return best[1], best[2]


def decode_workspace_size(num_rows: int, num_heads: int, value_head_size: int, num_splits: int) -> int:
    """float32 elements that `paged_decode_attention` needs in `workspace` (0 for one split).

    Of each split: the weighted sum of values, the greatest score and the sum of weights. (A
    log-sum-exp in their place, rounded to float32, would cost float32 results their last bits.)
    """
    if num_splits == 1:
        return 0
    return num_rows * num_heads * num_splits * (value_head_size + 2)


@lru_cache(maxsize=64)
def processor_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device, 1 for any other device."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
