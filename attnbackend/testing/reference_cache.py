"""What a cache write must leave behind, bit for bit.

Shape suffixes: T tokens, K key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["reference_kv_cache_update", "store_in_format"]


def store_in_format(x_TKD: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """The stored form of ``x``: x / scale in float32, clamped to the finite range, rounded to even.

    Args:
        x_TKD: [T, K, D], any floating dtype.
        dtype: format of the cache.
        scale: one element or [K]; real value = stored value * scale. None is 1.

    Returns:
        [T, K, D] of ``dtype``. NaN stays NaN. With ``x`` already in ``dtype`` and no scale, ``x``
        itself, infinities included: that write is a copy.
    """
    if dtype == x_TKD.dtype and scale is None:
        return x_TKD
    wide_TKD = x_TKD.to(torch.float32)
    if scale is not None:
        wide_TKD = wide_TKD / scale.to(wide_TKD).reshape(-1, 1)
    limits = torch.finfo(dtype)
    return wide_TKD.clamp(limits.min, limits.max).to(dtype)


def reference_kv_cache_update(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """The cache after the new tokens are written; ``kv_cache`` itself is left alone.

    Args:
        key, value: [T, K, D], any floating dtype.
        kv_cache: logical [B, 2, S, K, D], any floating dtype and strides.
        slot_mapping: integers [T], slot = block * S + offset, -1 = do not write.
        k_scale, v_scale: one element or [K]; see :func:`store_in_format`.

    Returns:
        A new contiguous tensor of the cache's shape and dtype.

    Raises:
        ValueError: lengths differ, a slot is outside the cache or named twice.
    """
    _check_slots(key, value, kv_cache, slot_mapping)
    updated = kv_cache.clone(memory_format=torch.contiguous_format)
    rows = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[rows].to(torch.int64)
    block_size = kv_cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    for side, x, scale in ((0, key, k_scale), (1, value, v_scale)):
        stored = store_in_format(x[rows], kv_cache.dtype, scale)
        _as_bits(updated)[block, side, offset] = _as_bits(stored)
    return updated


def _as_bits(x: Tensor) -> Tensor:
    """fp8 tensors as bytes: indexing is not implemented for fp8 on every device and version."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _check_slots(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    lengths = (key.shape[0], value.shape[0], slot_mapping.shape[0])
    if len(set(lengths)) != 1:
        raise ValueError(
            "key, value and slot_mapping must have one row a token, got lengths "
            f"{lengths[0]}, {lengths[1]} and {lengths[2]}"
        )
    capacity = kv_cache.shape[0] * kv_cache.shape[2]
    used = [slot for slot in slot_mapping.tolist() if slot != -1]
    outside = [slot for slot in used if not 0 <= slot < capacity]
    if outside:
        raise ValueError(
            f"slot_mapping holds {outside[:5]}, allowed are -1 and 0..{capacity - 1} "
            f"({kv_cache.shape[0]} blocks of {kv_cache.shape[2]} tokens)"
        )
    if len(set(used)) != len(used):
        twice = sorted({slot for slot in used if used.count(slot) > 1})
        raise ValueError(f"slot_mapping names slots {twice[:5]} more than once, which has no right answer")
