"""The latent cache: one row a token, of a latent that gives keys and values of all heads, and a rotated key.

Shape legend: T tokens, S slots, L kv_lora_rank, R qk_rope_head_dim, G groups of a latent.

A row of "fp8_ds_mla" is bytes: L of float8_e4m3fn, one float32 scale for each 128 of them, R bfloat16 of the
rotated key; 656 for L = 512 and R = 64, the one shape that kernels know.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbackend.kv_cache import bits_of, quantize_to_cache

__all__ = ["PACKED", "mla_row_width", "read_mla_cache", "write_mla_cache"]

PACKED = "fp8_ds_mla"
"""The cache type whose rows are packed bytes with scales of their own."""
_PACKED_HEAD_SIZE, _PACKED_BYTES, _GROUP = 576, 656, 128
_PACKED_RANK = 512
_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


def mla_row_width(head_size: int, kv_cache_dtype: str) -> int:
    """Elements of a cached row: L + R, or the bytes of a packed one.

    Raises:
        ValueError: a packed cache for another head size than 512 + 64.
    """
    if kv_cache_dtype != PACKED:
        return head_size
    if head_size != _PACKED_HEAD_SIZE:
        raise ValueError(
            f"head_size={head_size} with kv_cache_dtype={PACKED!r}; its rows hold a latent of 512 and a "
            "rotated key of 64: choose 'fp8' or 'auto' for other sizes"
        )
    return _PACKED_BYTES


def write_mla_cache(
    kv_c_TL: Tensor, k_pe_TR: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None,
    kv_cache_dtype: str,
) -> None:  # fmt: skip
    """Writes new rows to their slots, with torch ops.

    Args:
        kv_c_TL: [T, L], the normalised latents.
        k_pe_TR: [T, R], the rotated keys.
        kv_cache: [num_blocks, block_size, W], any strides; written.
        slot_mapping: int64 [T], ``block * block_size + offset``; negative: do not write.
        k_scale: float32 [1], stored = real / k_scale, for "fp8" caches; None: 1.
    """
    written = slot_mapping >= 0
    blocks, offsets = _places(kv_cache, slot_mapping[written])
    latents, keys = kv_c_TL[written], k_pe_TR[written]
    if kv_cache_dtype == PACKED:
        kv_cache[blocks, offsets] = _packed(latents, keys)
        return
    rows = torch.cat([latents, keys], -1).unsqueeze(1)
    bits_of(kv_cache)[blocks, offsets] = bits_of(quantize_to_cache(rows, k_scale, kv_cache.dtype).squeeze(1))


def read_mla_cache(
    kv_cache: Tensor, slots_S: Tensor, k_scale: Tensor | None, kv_cache_dtype: str, kv_lora_rank: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Latents [S, L] and rotated keys [S, R] at slots, in ``dtype``; arguments as `write_mla_cache`'s."""
    blocks, offsets = _places(kv_cache, slots_S)
    rows = bits_of(kv_cache)[blocks, offsets].view(kv_cache.dtype)
    if kv_cache_dtype == PACKED:
        return _unpacked(rows, dtype)
    real = rows.to(dtype) if k_scale is None else (rows.float() * k_scale).to(dtype)
    return real[:, :kv_lora_rank], real[:, kv_lora_rank:]


def _places(kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    block_size = kv_cache.shape[1]
    return slots // block_size, slots % block_size


def _packed(kv_c_TL: Tensor, k_pe_TR: Tensor) -> Tensor:
    """Rows of bytes; a group's scale is its largest magnitude over the largest of float8."""
    groups_TGN = kv_c_TL.float().unflatten(-1, (-1, _GROUP))
    # A tensor: CUDA multiplies by the rounded reciprocal of a number.
    largest = torch.full((), _E4M3_MAX, device=groups_TGN.device)
    scale_TG1 = groups_TGN.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    latent = (groups_TGN / scale_TG1).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).flatten(1)
    parts = (latent, scale_TG1.squeeze(-1), k_pe_TR.bfloat16())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def _unpacked(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales_end = _PACKED_RANK + 4 * (_PACKED_RANK // _GROUP)
    latent, scale, rope = rows.tensor_split((_PACKED_RANK, scales_end), dim=-1)
    groups_SGN = latent.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, _GROUP))
    scale_SG1 = scale.contiguous().view(torch.float32).unsqueeze(-1)
    real = (groups_SGN * scale_SG1).flatten(1).to(dtype)
    return real, rope.contiguous().view(torch.bfloat16).to(dtype)
