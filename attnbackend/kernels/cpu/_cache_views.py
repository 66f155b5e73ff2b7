"""What both kernels need to know of a paged KV cache.

Shapes: B blocks, S slots a block, Hk kv heads, D head size, Dv value head size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnbackend.kernels.cpu import _checks


class CacheViews(NamedTuple):
    """Sizes, strides and dtype of key_cache [B, S, Hk, D] and value_cache [B, S, Hk, Dv]."""

    blocks: int
    block_size: int
    kv_heads: int
    head_size: int
    value_size: int
    dtype_code: int
    strides: tuple[int, ...]  # block, slot and head of K, then of V, in elements


def cache_views(key_cache: Tensor, value_cache: Tensor) -> CacheViews:
    """Checks the two caches against each other. ValueError where they do not fit."""
    _checks.require_rank("key_cache", key_cache, 4, "[B, S, Hk, D]")
    _checks.require_rank("value_cache", value_cache, 4, "[B, S, Hk, Dv]")
    blocks, block_size, kv_heads, head_size = key_cache.shape
    value_size = value_cache.shape[3]
    expected = (blocks, block_size, kv_heads, value_size)
    _checks.require_shape("value_cache", value_cache, expected, "[B, S, Hk, Dv] of key_cache")
    if block_size < 1:
        raise ValueError(f"key_cache has shape {list(key_cache.shape)}: a block has no slots")
    if key_cache.dtype != value_cache.dtype:
        raise ValueError(
            f"key_cache is {key_cache.dtype} and value_cache {value_cache.dtype}; they must agree"
        )
    code = _checks.dtype_code("key_cache", key_cache, _checks.CACHE_CODES)
    k_stride, v_stride = key_cache.stride(), value_cache.stride()
    _checks.require_last_stride("key_cache", key_cache, k_stride)
    _checks.require_last_stride("value_cache", value_cache, v_stride)
    strides = (*k_stride[:3], *v_stride[:3])
    return CacheViews(blocks, block_size, kv_heads, head_size, value_size, code, strides)
