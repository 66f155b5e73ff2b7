"""The latent cache as kernels take it: where latents, rotated keys and scales lie, and in which formats.

Legend: B blocks, S block size, L kv_lora_rank, R qk_rope_head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import CACHE_DTYPES, fail, names
from .codec import kernel_view, stored_format

PACKED_BYTES = 656
"""A row of "fp8_ds_mla": 512 of float8_e4m3fn, 4 float32 scales of 128 each, 64 bfloat16."""
PACKED_RANK, PACKED_ROPE, PACKED_GROUP = 512, 64, 128


class LatentCache(NamedTuple):
    """Views of one cache, in the elements of their own types."""

    latent: torch.Tensor
    """[B, S, L]"""
    rope: torch.Tensor
    """[B, S, R]"""
    scales: torch.Tensor | None
    """[B, S, L / 128] float32 where rows are packed."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """Of latents and rotated keys, before `kernel_view`."""
    formats: tuple[str, str]

    @property
    def strides(self) -> tuple[int, ...]:
        """Block and slot strides of latents, rotated keys and scales."""
        scales = (0, 0) if self.scales is None else self.scales.stride()[:2]
        return (*self.latent.stride()[:2], *self.rope.stride()[:2], *scales)


def latent_cache(where: str, kv_cache: torch.Tensor, rank: int, rope_size: int) -> LatentCache:
    """Views of kv_cache [B, S, L + R], or uint8 [B, S, 656] with packed rows.

    Raises ValueError for another width, a dtype that no kernel reads, or a last stride other than 1.
    """
    if kv_cache.dim() != 3 or kv_cache.stride(2) != 1:
        found = f"{tuple(kv_cache.shape)}, strides {kv_cache.stride()}"
        fail(where, "kv_cache", found, "3 dimensions, the last of stride 1")
    if kv_cache.dtype == torch.uint8:
        return _packed_views(where, kv_cache, rank, rope_size)
    if kv_cache.dtype not in CACHE_DTYPES:
        fail(where, "kv_cache.dtype", kv_cache.dtype, f"{names(CACHE_DTYPES)}, torch.uint8 for packed rows")
    if kv_cache.shape[2] != rank + rope_size:
        allowed = f"{rank + rope_size}, a latent of {rank} and a rotated key of {rope_size}"
        fail(where, "width of kv_cache", kv_cache.shape[2], allowed)
    dtypes = kv_cache.dtype, kv_cache.dtype
    return _views(kv_cache[..., :rank], kv_cache[..., rank:], None, dtypes)


def _packed_views(where: str, kv_cache: torch.Tensor, rank: int, rope_size: int) -> LatentCache:
    sizes = kv_cache.shape[2], rank, rope_size
    if sizes != (PACKED_BYTES, PACKED_RANK, PACKED_ROPE):
        allowed = f"{(PACKED_BYTES, PACKED_RANK, PACKED_ROPE)}"
        fail(where, "bytes of a packed row, latent and rotated key", sizes, allowed)
    block, slot, _ = kv_cache.stride()
    if block % 4 or slot % 4 or kv_cache.storage_offset() % 4:
        fail(where, "strides of packed rows", kv_cache.stride(), "multiples of 4 bytes")
    scales_end = PACKED_RANK + 4 * (PACKED_RANK // PACKED_GROUP)
    latent = kv_cache[..., :PACKED_RANK].view(torch.float8_e4m3fn)
    scales = kv_cache[..., PACKED_RANK:scales_end].view(torch.float32)
    rope = kv_cache[..., scales_end:].view(torch.bfloat16)
    return _views(latent, rope, scales, (torch.float8_e4m3fn, torch.bfloat16))


def _views(
    latent: torch.Tensor,
    rope: torch.Tensor,
    scales: torch.Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> LatentCache:
    device = latent.device
    formats = stored_format(dtypes[0], device), stored_format(dtypes[1], device)
    return LatentCache(
        kernel_view(latent, formats[0]), kernel_view(rope, formats[1]), scales, dtypes, formats
    )
