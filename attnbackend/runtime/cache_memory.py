"""How many blocks the caches of an engine have: as many as were asked for, if they fit, or as serve."""

from __future__ import annotations

import torch

from attnbackend.kv_cache import check_room
from attnbackend.platforms import free_memory

__all__ = ["count_blocks"]

_SHARE = {"cuda": 0.9, "cpu": 0.25}
"""Share of the free memory that the caches may take where the number of blocks is left open."""


def count_blocks(asked: int | None, wanted: int, block_bytes: int, device: torch.device) -> int:
    """The blocks that were asked for, or, for None, those that are wanted as far as memory allows.

    Args:
        asked: what the user said.
        wanted: blocks that all requests at full length would need.
        block_bytes: what a block takes in the caches of all layers.
        device: where the caches will be.

    Raises:
        ValueError: the device has no memory for them.
    """
    if asked is None:
        return min(wanted, _blocks_that_fit(block_bytes, device))
    check_room(asked, block_bytes, device)
    return asked


def _blocks_that_fit(block_bytes: int, device: torch.device) -> int:
    budget = int(free_memory(device) * _SHARE.get(device.type, 0.5))
    if budget < 2 * block_bytes:
        raise ValueError(
            f"a cache block of all layers takes {block_bytes} bytes and {budget} may be used on {device}; "
            "free memory, or choose a smaller kv_cache_dtype or block_size"
        )
    return budget // block_bytes
