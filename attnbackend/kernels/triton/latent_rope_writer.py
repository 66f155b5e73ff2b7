"""Queries and keys of latent attention rotated, latents normalised, and rows of the cache written, at once.

Legend: T tokens, H query heads, L kv_lora_rank, R qk_rope_head_dim, B blocks, S block size, G groups of a
latent that have a scale each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cache_writer import finite_max
from .checks import QUERY_DTYPES, check_device, check_same_device, check_vector, fail, names
from .codec import FINITE_MAX, decode, encode, kernel_view, stored_format
from .config import padded_size
from .latent_cache import PACKED_GROUP, latent_cache
from .launch import on_device_of

WHERE = "latent_rope_write"
TILE_ELEMENTS = 512
"""Elements that one program rotates."""


@triton.jit
def turned(
    source: tl.tensor, half: tl.tensor, keep: tl.tensor, cos: tl.tensor, sin: tl.tensor, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, FMT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """First and second elements of pairs, turned, in float32."""
    HALF: tl.constexpr = R // 2
    if INTERLEAVED:
        first_ptrs, second_ptrs = source + 2 * half, source + 2 * half + 1
    else:
        first_ptrs, second_ptrs = source + half, source + HALF + half
    first = decode(tl.load(first_ptrs, mask=keep, other=0.0), FMT).to(tl.float32)
    second = decode(tl.load(second_ptrs, mask=keep, other=0.0), FMT).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def cached(
    x: tl.tensor, scale_ptr: tl.tensor, limit: tl.tensor, DTYPE: tl.constexpr, FMT: tl.constexpr,
    CLAMP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """float32 values in the cache's format."""
    if scale_ptr is not None:
        x = tl.div_rn(x, tl.zeros(x.shape, tl.float32) + tl.load(scale_ptr))
    if CLAMP:
        # Comparisons, so that NaN stays NaN.
        x = tl.where(x > limit, limit, x)
        x = tl.where(x < -limit, -limit, x)
    return encode(x, DTYPE, FMT)


@triton.jit(
    do_not_specialize=["num_heads"],
    do_not_specialize_on_alignment=["slot_ptr", "k_scale_ptr"],
)
def latent_rope_write_kernel(
    q_ptr: tl.tensor, latent_ptr: tl.tensor, k_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor,
    q_out_ptr: tl.tensor, k_out_ptr: tl.tensor, kv_c_ptr: tl.tensor,
    cache_latent_ptr: tl.tensor, cache_rope_ptr: tl.tensor, scales_ptr: tl.tensor,
    slot_ptr: tl.tensor, weight_ptr: tl.tensor, k_scale_ptr: tl.tensor, eps: tl.tensor,
    q_token: tl.tensor, q_head: tl.tensor, latent_token: tl.tensor, k_token: tl.tensor,
    cos_token: tl.tensor, cos_element: tl.tensor, sin_token: tl.tensor, sin_element: tl.tensor,
    latent_block: tl.tensor, latent_slot: tl.tensor, rope_block: tl.tensor, rope_slot: tl.tensor,
    scales_block: tl.tensor, scales_slot: tl.tensor, limit: tl.tensor, num_heads: tl.tensor,
    S: tl.constexpr, L: tl.constexpr, R: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr,
    HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, FMT: tl.constexpr, ANGLE_FMT: tl.constexpr,
    WEIGHT_FMT: tl.constexpr, L_FMT: tl.constexpr, R_FMT: tl.constexpr, CLAMP: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """One token: a tile of its query heads, or its row of the cache."""
    HALF: tl.constexpr = R // 2
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF_PAD)[None, :]
    inside = half < HALF
    cos = decode(tl.load(cos_ptr + token * cos_token + half * cos_element, mask=inside, other=0.0), ANGLE_FMT)
    sin = decode(tl.load(sin_ptr + token * sin_token + half * sin_element, mask=inside, other=0.0), ANGLE_FMT)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    tile = tl.program_id(1)
    if tile < (num_heads + HEADS - 1) // HEADS:
        head = (tile * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        keep = (head < num_heads) & inside
        source = q_ptr + token * q_token + head * q_head
        first, second = turned(source, half, keep, cos, sin, R, INTERLEAVED, FMT)
        out = q_out_ptr + (token * num_heads + head) * R + half
        tl.store(out, encode(first, q_out_ptr.dtype.element_ty, FMT), mask=keep)
        tl.store(out + HALF, encode(second, q_out_ptr.dtype.element_ty, FMT), mask=keep)
        return

    slot = tl.load(slot_ptr + token)
    block, offset = tl.maximum(slot, 0) // S, tl.maximum(slot, 0) % S
    written = half < tl.where(slot >= 0, HALF, 0)
    first, second = turned(k_ptr + token * k_token, half, inside, cos, sin, R, INTERLEAVED, FMT)
    # What the cache gets is what the caller gets: rounded first, then quantised.
    first, second = (
        encode(first, k_out_ptr.dtype.element_ty, FMT),
        encode(second, k_out_ptr.dtype.element_ty, FMT),
    )
    k_out_ptr += token * R
    tl.store(k_out_ptr + half, first, mask=inside)
    tl.store(k_out_ptr + HALF + half, second, mask=inside)
    first, second = decode(first, FMT).to(tl.float32), decode(second, FMT).to(tl.float32)
    ROPE: tl.constexpr = cache_rope_ptr.dtype.element_ty
    CLAMP_ROPE: tl.constexpr = CLAMP and scales_ptr is None
    cache_rope_ptr += block * rope_block + offset * rope_slot
    tl.store(cache_rope_ptr + half, cached(first, k_scale_ptr, limit, ROPE, R_FMT, CLAMP_ROPE), mask=written)
    second = cached(second, k_scale_ptr, limit, ROPE, R_FMT, CLAMP_ROPE)
    tl.store(cache_rope_ptr + HALF + half, second, mask=written)

    places = tl.arange(0, G)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    keep = places < L
    values = decode(tl.load(latent_ptr + token * latent_token + places, mask=keep, other=0.0), FMT).to(
        tl.float32
    )
    if weight_ptr is not None:
        mean = tl.sum(tl.sum(values * values, 1), 0) / L
        weight = decode(tl.load(weight_ptr + places, mask=keep, other=0.0), WEIGHT_FMT).to(tl.float32)
        values = encode(values * tl.rsqrt(mean + eps) * weight, kv_c_ptr.dtype.element_ty, FMT)
        tl.store(kv_c_ptr + token * L + places, values, mask=keep)
        values = decode(values, FMT).to(tl.float32)
    LATENT: tl.constexpr = cache_latent_ptr.dtype.element_ty
    keep = places < tl.where(slot >= 0, L, 0)
    if scales_ptr is not None:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), 1), 1e-12), tl.zeros([G], tl.float32) + limit)
        group = tl.arange(0, G)
        scales_ptr += block * scales_block + offset * scales_slot
        tl.store(scales_ptr + group, scale, mask=group < tl.where(slot >= 0, G, 0))
        values = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    values = cached(values, k_scale_ptr, limit, LATENT, L_FMT, CLAMP)
    tl.store(cache_latent_ptr + block * latent_block + offset * latent_slot + places, values, mask=keep)


def latent_rope_write(
    q_pe: torch.Tensor, latent: torch.Tensor, k_pe: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    q_out: torch.Tensor, k_out: torch.Tensor, kv_c_out: torch.Tensor | None, kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor, *, interleaved: bool, weight: torch.Tensor | None = None, eps: float = 0.0,
    k_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Rotates q_pe [T, H, R] to q_out and k_pe [T, R] to k_out, and writes rows of latent [T, L] and k_out.

    cos, sin [T, R / 2]: of pairs (2i, 2i + 1) where interleaved, else (i, i + R / 2); q_out and k_out,
    contiguous, hold first elements of all pairs, then second ones. With weight [L], the latent is first
    divided by its root mean square (of epsilon eps) and multiplied by it, and written to kv_c_out [T, L],
    contiguous. Inputs have any strides but the last of q_pe, latent and k_pe. Sums and products are in
    float32 and rounded once. Cache, slots and scale as in `write_latents`; rows of a negative slot are
    rotated like all others.

    Raises ValueError for shapes, dtypes or options outside of these.
    """
    cache = latent_cache(WHERE, kv_cache, latent.shape[-1], k_pe.shape[-1])
    _check(q_pe, latent, k_pe, cos, sin, q_out, k_out, kv_c_out, kv_cache, slot_mapping, weight, k_scale)
    if cache.scales is not None and k_scale is not None:
        fail(WHERE, "k_scale", "given", "None, since packed rows have scales of their own")
    tokens, heads, rope = q_pe.shape
    if tokens == 0:
        return
    tensors = (q_pe, latent, k_pe, cos, sin, q_out, k_out, kv_c_out, weight)
    formats = ["native" if t is None else stored_format(t.dtype, q_pe.device) for t in tensors]
    views = [t if t is None else kernel_view(t, f) for t, f in zip(tensors, formats, strict=True)]
    tile = max(1, min(padded_size(heads), TILE_ELEMENTS // padded_size(rope)))
    rank = latent.shape[1]
    groups = (1, padded_size(rank)) if cache.scales is None else (rank // PACKED_GROUP, PACKED_GROUP)
    with on_device_of(q_pe):
        latent_rope_write_kernel[(tokens, -(-heads // tile) + 1)](
            *views[:8], cache.latent, cache.rope, cache.scales, slot_mapping, views[8], k_scale, float(eps),
            *q_pe.stride()[:2], latent.stride(0), k_pe.stride(0), *cos.stride(), *sin.stride(),
            *cache.strides, finite_max(cache.dtypes[0]), heads, kv_cache.shape[1], rank, rope, *groups,
            padded_size(rope // 2), interleaved, formats[0], formats[3], formats[8], *cache.formats,
            k_scale is not None or cache.dtypes[0] in FINITE_MAX, tile, num_warps=4,
        )  # fmt: skip


def _check(
    q_pe: torch.Tensor, latent: torch.Tensor, k_pe: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    q_out: torch.Tensor, k_out: torch.Tensor, kv_c_out: torch.Tensor | None, kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor, weight: torch.Tensor | None, k_scale: torch.Tensor | None,
) -> None:  # fmt: skip
    check_device(WHERE, q_pe)
    check_same_device(
        WHERE, q_pe,
        ("latent", "k_pe", "cos", "sin", "kv_cache", "slot_mapping", "weight", "k_scale"),
        (latent, k_pe, cos, sin, kv_cache, slot_mapping, weight, k_scale),
    )  # fmt: skip
    tokens, _, rope = q_pe.shape
    rank = latent.shape[-1]
    if rope % 2 or not 2 <= rope <= 256:
        fail(WHERE, "qk_rope_head_dim", rope, "even, up to 256")
    if q_pe.dtype not in QUERY_DTYPES:
        fail(WHERE, "q_pe.dtype", q_pe.dtype, names(QUERY_DTYPES))
    shapes = {
        "latent": (latent, (tokens, rank)), "k_pe": (k_pe, (tokens, rope)), "q_pe": (q_pe, tuple(q_pe.shape)),
    }  # fmt: skip
    for name, (x, shape) in shapes.items():
        if x.shape != shape or x.dtype != q_pe.dtype or x.stride(-1) != 1:
            found = f"{tuple(x.shape)} of {x.dtype}, strides {x.stride()}"
            fail(WHERE, name, found, f"{shape} of {q_pe.dtype}, the last with stride 1")
    for name, x in (("cos", cos), ("sin", sin)):
        if x.shape != (tokens, rope // 2) or x.dtype not in QUERY_DTYPES or x.dtype != cos.dtype:
            fail(WHERE, name, f"{tuple(x.shape)} of {x.dtype}", f"{(tokens, rope // 2)}, floating point")
    for name, out, like in (("q_out", q_out, q_pe), ("k_out", k_out, k_pe), ("kv_c_out", kv_c_out, latent)):
        if out is not None and (
            out.shape != like.shape or out.dtype != like.dtype or not out.is_contiguous()
        ):
            fail(WHERE, name, f"{tuple(out.shape)} of {out.dtype}", f"contiguous, {tuple(like.shape)}")
    if (weight is None) != (kv_c_out is None):
        fail(WHERE, "weight and kv_c_out", "only one of the two", "both or neither")
    if weight is not None:
        check_vector(WHERE, "weight", weight, QUERY_DTYPES, (rank,))
    if k_scale is not None:
        check_vector(WHERE, "k_scale", k_scale, (torch.float32,), (1,))
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != (tokens,) or slot_mapping.stride(0) != 1:
        found = f"{tuple(slot_mapping.shape)} of {slot_mapping.dtype}"
        fail(WHERE, "slot_mapping", found, f"contiguous torch.int64 of shape {(tokens,)}")
