"""Tiles and splits of the latent-attention kernels, from shapes, dtypes and the device alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .config import TileConfig, padded_size

MIN_SPLIT_KEYS = 256
"""Fewest keys worth a split of their own."""
MAX_SPLITS = 64
_LARGE_SHARED_MEMORY = 200 << 10


@lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may use on a CUDA device; on any other device nothing is short."""
    if device.type != "cuda":
        return _LARGE_SHARED_MEMORY
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@lru_cache(maxsize=256)
def mla_tile(product: torch.dtype, rank: int, heads: int, device: torch.device) -> TileConfig:
    """Tile of `mla_decode_kernel` for a matrix product in `product`."""
    if product == torch.float32:
        return TileConfig(16, 16, 8, 1)
    if shared_memory(device) >= _LARGE_SHARED_MEMORY:
        rows = min(64, padded_size(heads))
        return TileConfig(rows, 64 if rank <= 512 else 32, 8 if rows > 32 else 4, 2)
    # A step's latents, twice in flight, beside the queries: 100 KiB is the least that GPUs have.
    return TileConfig(16, 32 if shared_memory(device) >= 150 << 10 else 16, 4, 2)


def mla_num_splits(num_tiles: int, max_keys: int, num_processors: int) -> int:
    """Splits that fill the device in one wave of one program a multiprocessor."""
    wanted = num_processors // max(1, num_tiles)
    return max(1, min(wanted, max_keys // MIN_SPLIT_KEYS, MAX_SPLITS))


def mla_workspace_size(tokens: int, heads: int, rank: int, num_splits: int) -> int:
    """float32 elements that `mla_attention` needs in `workspace` (0 for one split)."""
    return 0 if num_splits == 1 else tokens * heads * num_splits * (rank + 2)
