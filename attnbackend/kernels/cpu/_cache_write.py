"""The cache writer in C++.

Shapes: T tokens, Hk kv heads, D head size, Dv value head size, B cache blocks, S slots a block.
"""

from __future__ import annotations

from ctypes import CDLL
from typing import NoReturn

import torch
from torch import Tensor

from attnbackend.kernels.cpu import _checks
from attnbackend.kernels.cpu._cache_views import CacheViews, cache_views
from attnbackend.kernels.cpu._library import library, raise_refusal
from attnbackend.kernels.cpu._structs import WRITE_STRUCT

_NAMES = "key value key_cache value_cache"


def _require_new_tokens(key: Tensor, value: Tensor, slot_mapping: Tensor, cache: CacheViews) -> None:
    _checks.require_rank("key", key, 3, "[T, Hk, D]")
    tokens, heads = key.shape[0], cache.kv_heads
    _checks.require_heads(heads, heads, cache.head_size, cache.value_size)
    _checks.require_shape("key", key, (tokens, heads, cache.head_size), "[T, Hk, D]")
    _checks.require_shape("value", value, (tokens, heads, cache.value_size), "[T, Hk, Dv]")
    _checks.require_vector("slot_mapping", slot_mapping, torch.int64, tokens)
    if key.dtype != value.dtype:
        raise ValueError(f"key is {key.dtype} and value {value.dtype}; they must agree")


def _strides(key: Tensor, value: Tensor, cache: CacheViews) -> tuple[int, ...]:
    """key_token .. v_head, as in args.h."""
    key_stride, value_stride = key.stride(), value.stride()
    _checks.require_last_stride("key", key, key_stride)
    _checks.require_last_stride("value", value, value_stride)
    return (*key_stride[:2], *value_stride[:2], *cache.strides)


def write_fields(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[int, ...]:
    """What `WRITE_STRUCT` packs. ValueError where tensors do not fit each other."""
    _checks.require_cpu(_NAMES, key, value, key_cache, value_cache)
    cache = cache_views(key_cache, value_cache)
    _require_new_tokens(key, value, slot_mapping, cache)
    return (
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        key.shape[0],
        cache.kv_heads,
        cache.head_size,
        cache.value_size,
        cache.blocks,
        cache.block_size,
        *_strides(key, value, cache),
        *_checks.scale_address("k_scale", k_scale, cache.kv_heads),
        *_checks.scale_address("v_scale", v_scale, cache.kv_heads),
        _checks.dtype_code("key", key, _checks.FLOAT_CODES),
        cache.dtype_code,
        torch.get_num_threads(),
    )


def raise_slot_refusal(loaded: CDLL, key_cache: Tensor) -> NoReturn:
    """Says which slot a call refused."""
    raise_refusal(loaded, slots=key_cache.shape[0] * key_cache.shape[1])


def cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Stores new keys and values at their slots of a paged KV cache.

    Bit for bit `(x.float() / scale).clamp(-max, max).to(cache dtype)` for the float8 formats, whose
    largest finite value is max, and the same without the clamp for the others. Slots must be
    distinct: of two tokens with one slot, either may be the one that stays.

    Args:
        key: [T, Hk, D] float32, float16 or bfloat16; outer strides are free here and below.
        value: [T, Hk, Dv], same dtype as key.
        key_cache: [B, S, Hk, D] float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
        value_cache: [B, S, Hk, Dv], same dtype as key_cache.
        slot_mapping: int64 [T]; block * S + offset, negative: the token is not written.
        k_scale, v_scale: float32, 1 or Hk elements; real value = stored * scale.

    Raises:
        ValueError: a shape, dtype, stride or slot that is not allowed; nothing was written then.
        RuntimeError: the kernels cannot be built here (see `unavailable_reason`).
    """
    loaded = library()
    fields = write_fields(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    if loaded.attnbackend_cache_write(WRITE_STRUCT.pack(*fields)):
        raise_slot_refusal(loaded, key_cache)
