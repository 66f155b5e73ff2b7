"""The key tiles that each query tile reads, listed from intervals, never from a dense mask.

Shape legend: Q query tiles, P the longest list of any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TileLists", "list_tiles"]

_LEAST = 2
"""Fewest columns of a list: compiled code takes a size of 1 for a constant."""


@dataclass(frozen=True)
class TileLists:
    """A block mask's lists, as ``BlockMask.from_kv_blocks`` takes them: int32."""

    partial_count: Tensor
    """[1, 1, Q]: tiles in which some query does not see some key."""
    partial: Tensor
    """[1, 1, Q, P]."""
    full_count: Tensor
    """[1, 1, Q]: tiles in which every query sees every key."""
    full: Tensor
    """[1, 1, Q, P], as wide as ``partial``: torch's kernel steps through both with the strides of one."""


def list_tiles(
    touched: tuple[Tensor, Tensor],
    filled: tuple[Tensor, Tensor],
    first_tile: Tensor,
    size: int,
    count: int,
    device: torch.device,
) -> TileLists:
    """Lists of tiles from intervals of keys, counted from the first key of each query tile's request.

    Args:
        touched: int64 on the host, first and one past the last key that some query of the tile sees.
        filled: likewise, what all of its queries see.
        first_tile: the tile of the request's first key.
        size: keys of a tile.
        count: query tiles wanted; those behind the given ones see nothing.
        device: where the lists will be.
    """
    low = touched[0] // size
    high = torch.maximum((touched[1] + size - 1) // size, low)
    full_low = torch.minimum((filled[0] + size - 1) // size, high)
    full_high = torch.maximum(filled[1] // size, full_low)
    # Partial tiles lie before and behind the full ones; with none of these they are one run.
    partial_count, full_count = (high - low) - (full_high - full_low), full_high - full_low
    width = max(_LEAST, *(int(x.max()) if len(x) else 0 for x in (partial_count, full_count)))
    table = torch.zeros(5, count, dtype=torch.int64)
    columns = (partial_count, low + first_tile, full_low - low, full_count, full_low + first_tile)
    for line, values in zip(table, columns, strict=True):
        line[: len(values)] = values
    return _expand(table.to(device, torch.int32, non_blocking=True), width)


def _expand(table: Tensor, width: int) -> TileLists:
    partial_count, low, before, full_count, full_low = table.unsqueeze(-1)
    p_P = torch.arange(width, device=table.device, dtype=torch.int32)
    partial = low + p_P + torch.where(p_P >= before, full_count, 0)
    partial = torch.where(p_P < partial_count, partial, 0)
    full = torch.where(p_P < full_count, full_low + p_P, 0)
    counts = (partial_count.view(1, 1, -1), full_count.view(1, 1, -1))
    return TileLists(counts[0].contiguous(), partial[None, None], counts[1].contiguous(), full[None, None])
