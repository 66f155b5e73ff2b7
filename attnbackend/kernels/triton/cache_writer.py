"""Writing new keys and values into a paged cache.

Legend: T tokens, Hk kv heads, D and Dv head sizes, B cache blocks, S block size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import (
    CACHE_DTYPES,
    QUERY_DTYPES,
    check_device,
    check_same_device,
    fail,
    names,
    scale_stride,
)
from .codec import FINITE_MAX, decode, encode, kernel_view, stored_format
from .config import padded_size
from .launch import on_device_of

WHERE = "cache_write"
TILE_ELEMENTS = 2048
"""Elements of K (and of V) that one program copies: 16 for each thread of 4 warps."""


@triton.jit
def copy_heads(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    source_head: tl.tensor,
    target_head: tl.tensor,
    scale_ptr: tl.tensor,
    scale_head: tl.tensor,
    limit: tl.tensor,
    num_heads: tl.tensor,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    SOURCE_FMT: tl.constexpr,
    TARGET_FMT: tl.constexpr,
    COPY: tl.constexpr,
    CLAMP: tl.constexpr,
    HEADS: tl.constexpr,
    FIRST_TILE: tl.tensor = 0,
) -> None:
    """Write the heads of one token, quantised unless COPY (equal dtypes, no scale).

    FIRST_TILE: the program of axis 1 that writes the first heads.
    """
    head = (tl.program_id(1) - FIRST_TILE) * HEADS + tl.arange(0, HEADS)
    head64 = head.to(tl.int64)
    column = tl.arange(0, PAD)
    mask = (head < num_heads)[:, None] & (column < WIDTH)[None, :]
    source = source_ptr + (head64 * source_head)[:, None] + column[None, :]
    target = target_ptr + (head64 * target_head)[:, None] + column[None, :]
    value = tl.load(source, mask=mask, other=0.0)
    if not COPY:
        value = decode(value, SOURCE_FMT).to(tl.float32)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + head * scale_head, mask=head < num_heads, other=1.0)
            value = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
        if CLAMP:
            # Comparisons, so that NaN stays NaN.
            value = tl.where(value > limit, limit, value)
            value = tl.where(value < -limit, -limit, value)
        value = encode(value, target_ptr.dtype.element_ty, TARGET_FMT)
    tl.store(target, value, mask=mask)


@triton.jit(
    do_not_specialize=["num_heads"],
    do_not_specialize_on_alignment=["slot_ptr", "k_scale_ptr", "v_scale_ptr"],
)
def cache_write_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    k_head: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    v_head: tl.tensor,
    k_scale_head: tl.tensor,
    v_scale_head: tl.tensor,
    k_limit: tl.tensor,
    v_limit: tl.tensor,
    num_heads: tl.tensor,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    KEY_FMT: tl.constexpr,
    VALUE_FMT: tl.constexpr,
    K_FMT: tl.constexpr,
    V_FMT: tl.constexpr,
    COPY_K: tl.constexpr,
    COPY_V: tl.constexpr,
    CLAMP_K: tl.constexpr,
    CLAMP_V: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    block = slot // S
    offset = slot % S
    copy_heads(
        key_ptr + token * key_token, k_ptr + block * k_block + offset * k_slot,
        key_head, k_head, k_scale_ptr, k_scale_head, k_limit, num_heads,
        D, D_PAD, KEY_FMT, K_FMT, COPY_K, CLAMP_K, HEADS,
    )  # fmt: skip
    copy_heads(
        value_ptr + token * value_token, v_ptr + block * v_block + offset * v_slot,
        value_head, v_head, v_scale_ptr, v_scale_head, v_limit, num_heads,
        DV, DV_PAD, VALUE_FMT, V_FMT, COPY_V, CLAMP_V, HEADS,
    )  # fmt: skip


def cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write key [T, Hk, D] and value [T, Hk, Dv] to the slots of `slot_mapping` int64 [T].

    key_cache [B, S, Hk, D] and value_cache [B, S, Hk, Dv]: any strides but the last; slot =
    block * S + offset, negative: not written. k_scale, v_scale float32 [1] or [Hk]: what is
    stored is clamp(x / scale) to the format's finite range, rounded to nearest even. float8
    caches clamp without a scale too.

    Raises ValueError for shapes or dtypes outside of these. Slots are not checked.
    """
    check_device(WHERE, key)
    check_same_device(
        WHERE, key, ("value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale"),
        (value, key_cache, value_cache, slot_mapping, k_scale, v_scale),
    )  # fmt: skip
    _check(key, value, key_cache, value_cache, slot_mapping)
    tokens, heads, size = key.shape
    value_size = value.shape[2]
    if tokens == 0:
        return
    device = key.device
    formats = [stored_format(t.dtype, device) for t in (key, value, key_cache, value_cache)]
    views = [
        kernel_view(t, fmt) for t, fmt in zip((key, value, key_cache, value_cache), formats, strict=True)
    ]
    widths = padded_size(size), padded_size(value_size)
    tile_heads = max(1, min(padded_size(heads), TILE_ELEMENTS // max(widths)))
    with on_device_of(key):
        cache_write_kernel[(tokens, -(-heads // tile_heads))](
            *views, slot_mapping, k_scale, v_scale,
            *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
            scale_stride(WHERE, "k_scale", k_scale, heads),
            scale_stride(WHERE, "v_scale", v_scale, heads),
            finite_max(key_cache.dtype), finite_max(value_cache.dtype), heads,
            key_cache.shape[1], size, value_size, *widths, *formats,
            COPY_K=k_scale is None and key.dtype == key_cache.dtype,
            COPY_V=v_scale is None and value.dtype == value_cache.dtype,
            CLAMP_K=k_scale is not None or key_cache.dtype in FINITE_MAX,
            CLAMP_V=v_scale is not None or value_cache.dtype in FINITE_MAX,
            HEADS=tile_heads, num_warps=4,
        )  # fmt: skip


def finite_max(dtype: torch.dtype) -> float:
    """Largest finite value of a dtype."""
    return FINITE_MAX.get(dtype) or torch.finfo(dtype).max


def _check(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if new.dim() != 3 or cache.dim() != 4 or new.shape[1:] != cache.shape[2:]:
            allowed = f"[T, {', '.join(str(n) for n in cache.shape[2:])}], as its cache"
            fail(WHERE, f"{name}.shape", tuple(new.shape), allowed)
        if new.dtype not in QUERY_DTYPES:
            fail(WHERE, f"{name}.dtype", new.dtype, names(QUERY_DTYPES))
        if cache.dtype not in CACHE_DTYPES:
            fail(WHERE, f"dtype of the {name} cache", cache.dtype, names(CACHE_DTYPES))
        if new.stride(2) != 1 or cache.stride(3) != 1:
            strides = (new.stride(2), cache.stride(3))
            fail(WHERE, f"last strides of {name} and its cache", strides, "1 and 1")
    if key_cache.shape[:3] != value_cache.shape[:3] or key.shape[:2] != value.shape[:2]:
        shapes = (tuple(value.shape), tuple(value_cache.shape))
        fail(WHERE, "shapes of value and its cache", shapes, "those of key up to the head size")
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != key.shape[:1]:
        found = f"{tuple(slot_mapping.shape)} of {slot_mapping.dtype}"
        fail(WHERE, "slot_mapping", found, f"torch.int64 of shape {tuple(key.shape[:1])}")
    if not slot_mapping.is_contiguous():
        fail(WHERE, "stride of slot_mapping", slot_mapping.stride(0), "1")
