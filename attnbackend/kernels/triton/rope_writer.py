"""Queries and keys normalised head by head and rotated, keys and values written to a paged cache, at once.

Legend: T tokens, H query heads, Hk kv heads, D head size, R rotated elements of a head, S block size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cache_writer import copy_heads, finite_max
from .checks import QUERY_DTYPES, check_device, check_same_device, fail, names, scale_stride
from .codec import FINITE_MAX, decode, encode, kernel_view, stored_format
from .config import padded_size
from .launch import on_device_of

WHERE = "rope_cache_write"
TILE_ELEMENTS = 512
"""Elements that one program rotates: a decode step of one token still makes enough programs."""


@triton.jit
def _part(
    source: tl.tensor, out: tl.tensor, START: tl.constexpr, COUNT: tl.constexpr, PAD: tl.constexpr,
    FMT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Elements START to START + COUNT of rows of pointers, as float32; 0 beyond COUNT."""
    column = tl.arange(0, PAD)[None, :]
    value = tl.load(source + START + column, mask=out & (column < COUNT), other=0.0)
    return decode(value, FMT).to(tl.float32)


@triton.jit
def _put(
    x: tl.tensor, out_ptrs: tl.tensor, cache_ptrs: tl.tensor, keep: tl.tensor, into_cache: tl.tensor,
    scale: tl.tensor, limit: tl.tensor, START: tl.constexpr, COUNT: tl.constexpr, PAD: tl.constexpr,
    FMT: tl.constexpr, CACHE_FMT: tl.constexpr, IS_KEY: tl.constexpr, SCALED: tl.constexpr,
    CLAMP: tl.constexpr,
) -> None:  # fmt: skip
    """Stores a part of the rotated heads and, of keys, what of it belongs in the cache."""
    column = tl.arange(0, PAD)[None, :]
    within = column < COUNT
    stored = encode(x, out_ptrs.dtype.element_ty, FMT)
    tl.store(out_ptrs + START + column, stored, mask=keep & within)
    if IS_KEY:
        # What the cache gets is what the caller gets: rounded first, then quantised.
        value = decode(stored, FMT).to(tl.float32)
        if SCALED:
            value = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
        if CLAMP:
            value = tl.where(value > limit, limit, value)
            value = tl.where(value < -limit, -limit, value)
        value = encode(value, cache_ptrs.dtype.element_ty, CACHE_FMT)
        tl.store(cache_ptrs + START + column, value, mask=into_cache & within)


@triton.jit
def rotate_heads(
    source_ptr: tl.tensor, source_head: tl.tensor, out_ptr: tl.tensor, cache_ptr: tl.tensor,
    cache_head: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, weight_ptr: tl.tensor, eps: tl.tensor,
    scale_ptr: tl.tensor, scale_head: tl.tensor, limit: tl.tensor, written_heads: tl.tensor,
    tile: tl.tensor, num_heads: tl.tensor, D: tl.constexpr, R: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, FMT: tl.constexpr, CACHE_FMT: tl.constexpr, ANGLE_FMT: tl.constexpr,
    WEIGHT_FMT: tl.constexpr, IS_KEY: tl.constexpr, CLAMP: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of one token's heads: halves x, y become x cos - y sin, y cos + x sin; the rest stays.

    Of keys, so many heads go to the cache: all, or none.
    """
    HALF: tl.constexpr = R // 2
    REST: tl.constexpr = D - R
    head = (tile * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    keep = head < num_heads
    source = source_ptr + head * source_head
    low = _part(source, keep, 0, HALF, HALF_PAD, FMT)
    high = _part(source, keep, HALF, HALF, HALF_PAD, FMT)
    if REST > 0:
        rest = _part(source, keep, R, REST, REST_PAD, FMT)
    one = tl.full([1, 1], 0, tl.int64)
    if weight_ptr is not None:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        low = low * factor * _part(weight_ptr + one, one == 0, 0, HALF, HALF_PAD, WEIGHT_FMT)
        high = high * factor * _part(weight_ptr + one, one == 0, HALF, HALF, HALF_PAD, WEIGHT_FMT)
        if REST > 0:
            rest = rest * factor * _part(weight_ptr + one, one == 0, R, REST, REST_PAD, WEIGHT_FMT)
    cos_low = _part(cos_ptr + one, one == 0, 0, HALF, HALF_PAD, ANGLE_FMT)
    cos_high = _part(cos_ptr + one, one == 0, HALF, HALF, HALF_PAD, ANGLE_FMT)
    sin_low = _part(sin_ptr + one, one == 0, 0, HALF, HALF_PAD, ANGLE_FMT)
    sin_high = _part(sin_ptr + one, one == 0, HALF, HALF, HALF_PAD, ANGLE_FMT)
    scale = tl.full([1, 1], 1.0, tl.float32)
    SCALED: tl.constexpr = scale_ptr is not None
    if SCALED:
        scale = tl.load(scale_ptr + head * scale_head, mask=keep, other=1.0)
    out = out_ptr + head * D
    cache = out
    if IS_KEY:
        cache = cache_ptr + head * cache_head
    into = head < written_heads
    _put(low * cos_low - high * sin_low, out, cache, keep, into, scale, limit, 0, HALF, HALF_PAD,
         FMT, CACHE_FMT, IS_KEY, SCALED, CLAMP)  # fmt: skip
    _put(high * cos_high + low * sin_high, out, cache, keep, into, scale, limit, HALF, HALF, HALF_PAD,
         FMT, CACHE_FMT, IS_KEY, SCALED, CLAMP)  # fmt: skip
    if REST > 0:
        _put(rest, out, cache, keep, into, scale, limit, R, REST, REST_PAD,
             FMT, CACHE_FMT, IS_KEY, SCALED, CLAMP)  # fmt: skip


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads"], do_not_specialize_on_alignment=["slot_ptr"])
def rope_cache_write_kernel(
    query_ptr: tl.tensor, key_ptr: tl.tensor, value_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor,
    q_out_ptr: tl.tensor, k_out_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, slot_ptr: tl.tensor,
    q_weight_ptr: tl.tensor, k_weight_ptr: tl.tensor, k_scale_ptr: tl.tensor, v_scale_ptr: tl.tensor,
    q_eps: tl.tensor, k_eps: tl.tensor,
    query_token: tl.tensor, query_head: tl.tensor, key_token: tl.tensor, key_head: tl.tensor,
    value_token: tl.tensor, value_head: tl.tensor, cos_token: tl.tensor, sin_token: tl.tensor,
    k_block: tl.tensor, k_slot: tl.tensor, k_head: tl.tensor,
    v_block: tl.tensor, v_slot: tl.tensor, v_head: tl.tensor,
    k_scale_head: tl.tensor, v_scale_head: tl.tensor, limit: tl.tensor,
    num_heads: tl.tensor, num_kv_heads: tl.tensor,
    S: tl.constexpr, D: tl.constexpr, R: tl.constexpr, D_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, FMT: tl.constexpr, CACHE_FMT: tl.constexpr, ANGLE_FMT: tl.constexpr,
    Q_WEIGHT_FMT: tl.constexpr, K_WEIGHT_FMT: tl.constexpr, COPY_V: tl.constexpr, CLAMP_K: tl.constexpr,
    CLAMP_V: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos = cos_ptr + token * cos_token
    sin = sin_ptr + token * sin_token
    slot = tl.load(slot_ptr + token)
    query_tiles = (num_heads + HEADS - 1) // HEADS
    if tile < query_tiles:
        rotate_heads(
            query_ptr + token * query_token, query_head, q_out_ptr + token * num_heads * D, q_out_ptr, 0,
            cos, sin, q_weight_ptr, q_eps, None, 0, limit, 0, tile, num_heads,
            D, R, HALF_PAD, REST_PAD, FMT, CACHE_FMT, ANGLE_FMT, Q_WEIGHT_FMT, False, False, HEADS,
        )  # fmt: skip
    else:
        tile = tile - query_tiles
        block = tl.maximum(slot, 0) // S
        offset = tl.maximum(slot, 0) % S
        rotate_heads(
            key_ptr + token * key_token, key_head, k_out_ptr + token * num_kv_heads * D,
            k_ptr + block * k_block + offset * k_slot, k_head, cos, sin, k_weight_ptr, k_eps,
            k_scale_ptr, k_scale_head, limit, tl.where(slot >= 0, num_kv_heads, 0), tile, num_kv_heads,
            D, R, HALF_PAD, REST_PAD, FMT, CACHE_FMT, ANGLE_FMT, K_WEIGHT_FMT, True, CLAMP_K, HEADS,
        )  # fmt: skip
        if slot >= 0:
            copy_heads(
                value_ptr + token * value_token, v_ptr + block * v_block + offset * v_slot,
                value_head, v_head, v_scale_ptr, v_scale_head, limit, num_kv_heads,
                D, D_PAD, FMT, CACHE_FMT, COPY_V, CLAMP_V, HEADS, query_tiles,
            )  # fmt: skip


def rope_cache_write(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    q_out: torch.Tensor, k_out: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, *, q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None,
    q_eps: float = 0.0, k_eps: float = 0.0, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Rotates query [T, H, D] to q_out, key [T, Hk, D] to k_out, and writes k_out and value to their slots.

    cos, sin [T, R]: of each element, R even and at most D; elements from R on are not rotated. q_weight,
    k_weight [D]: each head is divided by its root mean square (of epsilon q_eps, k_eps) and multiplied by
    these first. Inputs have any strides but the last; q_out and k_out are contiguous. Sums and products
    are in float32 and rounded once. Caches, slots and scales as in `cache_write`. Rows of a negative slot are
    rotated like all others.

    Raises ValueError for shapes or dtypes outside of these. Slots are not checked.
    """
    check_device(WHERE, query)
    check_same_device(
        WHERE, query,
        ("key", "value", "cos", "sin", "q_out", "k_out", "key_cache", "value_cache", "slot_mapping",
         "q_weight", "k_weight", "k_scale", "v_scale"),
        (key, value, cos, sin, q_out, k_out, key_cache, value_cache, slot_mapping, q_weight, k_weight,
         k_scale, v_scale),
    )  # fmt: skip
    _check(query, key, value, cos, sin, q_out, k_out, q_weight, k_weight)
    tokens, heads, size = query.shape
    kv_heads, rotated = key.shape[1], cos.shape[1]
    if tokens == 0:
        return
    width = padded_size(size)
    tile = max(1, min(padded_size(max(heads, kv_heads)), TILE_ELEMENTS // width))
    pads = width, padded_size(rotated // 2), padded_size(max(1, size - rotated))
    tensors = (query, key, value, cos, sin, q_out, k_out, key_cache, value_cache, q_weight, k_weight)
    formats = ["native" if t is None else stored_format(t.dtype, query.device) for t in tensors]
    q, k, v, c, s, qo, ko, kc, vc, qw, kw = (
        t if t is None else kernel_view(t, f) for t, f in zip(tensors, formats, strict=True)
    )  # fmt: skip
    clamp = key_cache.dtype in FINITE_MAX
    with on_device_of(query):
        rope_cache_write_kernel[(tokens, -(-heads // tile) + -(-kv_heads // tile))](
            q, k, v, c, s, qo, ko, kc, vc, slot_mapping, qw, kw, k_scale, v_scale, float(q_eps), float(k_eps),
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], cos.stride(0), sin.stride(0),
            *key_cache.stride()[:3], *value_cache.stride()[:3],
            scale_stride(WHERE, "k_scale", k_scale, kv_heads),
            scale_stride(WHERE, "v_scale", v_scale, kv_heads),
            finite_max(key_cache.dtype), heads, kv_heads,
            key_cache.shape[1], size, rotated, *pads, formats[0], formats[7], formats[3],
            formats[9], formats[10], v_scale is None and value.dtype == value_cache.dtype,
            clamp or k_scale is not None, clamp or v_scale is not None, tile, num_warps=4,
        )  # fmt: skip


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    q_out: torch.Tensor, k_out: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None,
) -> None:  # fmt: skip
    tokens, _, size = query.shape
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype not in QUERY_DTYPES or x.dtype != query.dtype:
            fail(WHERE, f"{name}.dtype", x.dtype, f"{names(QUERY_DTYPES)}, one for all three")
        if x.shape[0] != tokens or x.shape[2] != size or x.stride(2) != 1:
            found = f"{tuple(x.shape)} with strides {x.stride()}"
            fail(WHERE, name, found, f"({tokens}, heads, {size}), the last with stride 1")
    for name, x in (("cos", cos), ("sin", sin)):
        if x.shape != (tokens, cos.shape[-1]) or x.stride(-1) != 1 or x.dtype not in QUERY_DTYPES:
            found = f"{tuple(x.shape)} of {x.dtype} with strides {x.stride()}"
            fail(WHERE, name, found, f"({tokens}, rotated elements), floating point, the last with stride 1")
    if cos.shape[1] % 2 or not 2 <= cos.shape[1] <= size or cos.dtype != sin.dtype:
        fail(
            WHERE, "cos and sin", f"{cos.shape[1]} elements, {cos.dtype}, {sin.dtype}", f"even, up to {size}"
        )
    for name, out, like in (("q_out", q_out, query), ("k_out", k_out, key)):
        if out.shape != like.shape or out.dtype != like.dtype or not out.is_contiguous():
            fail(WHERE, name, f"{tuple(out.shape)} of {out.dtype}", f"contiguous, {tuple(like.shape)}")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and (weight.shape != (size,) or weight.stride(0) != 1):
            fail(WHERE, f"{name}.shape", tuple(weight.shape), f"({size},), contiguous")
