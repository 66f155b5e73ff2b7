"""Rows of a latent cache, written and read: quantised on the way in, and back to the model's type out.

Legend: T tokens, N slots, B blocks, S block size, L kv_lora_rank, R qk_rope_head_dim, G groups of a latent
that have a scale each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cache_writer import cache_write
from .checks import QUERY_DTYPES, check_device, check_same_device, check_vector, fail, names
from .codec import decode, encode, kernel_view, stored_format
from .config import padded_size
from .latent_cache import PACKED_GROUP, LatentCache, latent_cache
from .launch import on_device_of

WRITE, GATHER = "write_latents", "gather_latents"
_E4M3_MAX = tl.constexpr(448.0)
_SLOTS = 4
"""Rows that one program reads."""


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def pack_rows_kernel(
    kv_c_ptr: tl.tensor,
    k_pe_ptr: tl.tensor,
    latent_ptr: tl.tensor,
    rope_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    kv_c_token: tl.tensor,
    k_pe_token: tl.tensor,
    latent_block: tl.tensor,
    latent_slot: tl.tensor,
    rope_block: tl.tensor,
    rope_slot: tl.tensor,
    scales_block: tl.tensor,
    scales_slot: tl.tensor,
    S: tl.constexpr,
    G: tl.constexpr,
    SIZE: tl.constexpr,
    R: tl.constexpr,
    SOURCE_FMT: tl.constexpr,
    L_FMT: tl.constexpr,
    R_FMT: tl.constexpr,
) -> None:
    """One token: a group's scale is its largest magnitude over the largest of float8_e4m3fn."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    block, offset = slot // S, slot % S
    group, rope = tl.arange(0, G), tl.arange(0, R)
    places = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = decode(tl.load(kv_c_ptr + token * kv_c_token + places), SOURCE_FMT).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), 1), 1e-12)
    scale = tl.div_rn(largest, tl.full([G], _E4M3_MAX, tl.float32))
    scaled = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    scaled = tl.minimum(tl.maximum(scaled, -_E4M3_MAX), _E4M3_MAX)
    latent_ptr += block * latent_block + offset * latent_slot
    tl.store(latent_ptr + places, encode(scaled, latent_ptr.dtype.element_ty, L_FMT))
    tl.store(scales_ptr + block * scales_block + offset * scales_slot + group, scale)
    rotated = decode(tl.load(k_pe_ptr + token * k_pe_token + rope), SOURCE_FMT).to(tl.float32)
    rope_ptr += block * rope_block + offset * rope_slot
    tl.store(rope_ptr + rope, encode(rotated, rope_ptr.dtype.element_ty, R_FMT))


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_ptr", "k_scale_ptr"])
def gather_rows_kernel(
    latent_ptr: tl.tensor,
    rope_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    kv_c_ptr: tl.tensor,
    k_pe_ptr: tl.tensor,
    latent_block: tl.tensor,
    latent_slot: tl.tensor,
    rope_block: tl.tensor,
    rope_slot: tl.tensor,
    scales_block: tl.tensor,
    scales_slot: tl.tensor,
    num_slots: tl.tensor,
    S: tl.constexpr,
    SIZE: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    L_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    L_FMT: tl.constexpr,
    R_FMT: tl.constexpr,
    OUT_FMT: tl.constexpr,
    N: tl.constexpr,
) -> None:
    """N rows, dequantised in float32; contiguous results."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    inside = row < num_slots
    slot = tl.load(slot_ptr + row, mask=inside, other=0)
    block, offset, row64 = slot // S, slot % S, row.to(tl.int64)
    column, rope = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    keep = inside[:, None] & (column < L)[None, :]
    keep_rope = inside[:, None] & (rope < R)[None, :]
    places = latent_ptr + (block * latent_block + offset * latent_slot)[:, None] + column[None, :]
    latents = decode(tl.load(places, mask=keep, other=0.0), L_FMT).to(tl.float32)
    places = rope_ptr + (block * rope_block + offset * rope_slot)[:, None] + rope[None, :]
    rotated = decode(tl.load(places, mask=keep_rope, other=0.0), R_FMT).to(tl.float32)
    if scales_ptr is not None:
        scale_rows = scales_ptr + (block * scales_block + offset * scales_slot)[:, None]
        latents *= tl.load(scale_rows + (column // SIZE)[None, :], mask=keep, other=0.0)
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr)
        latents *= k_scale
        rotated *= k_scale
    kv_c = kv_c_ptr + (row64 * L)[:, None] + column[None, :]
    tl.store(kv_c, encode(latents, kv_c_ptr.dtype.element_ty, OUT_FMT), mask=keep)
    k_pe = k_pe_ptr + (row64 * R)[:, None] + rope[None, :]
    tl.store(k_pe, encode(rotated, k_pe_ptr.dtype.element_ty, OUT_FMT), mask=keep_rope)


def write_latents(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
) -> None:
    """Write new latents and rotated keys to their slots; nothing is waited for.

    kv_c [T, L] and k_pe [T, R]: float32, float16 or bfloat16, last stride 1; kv_cache as `mla_attention`'s;
    slot_mapping int64 [T], negative: do not write; k_scale float32 [1], stored = real / k_scale. Values
    beyond those of a cache of float8 saturate.

    Raises ValueError for shapes, dtypes or options outside of these.
    """
    _check_sources(kv_c, k_pe, slot_mapping)
    check_same_device(WRITE, kv_c, ("kv_cache", "k_scale"), (kv_cache, k_scale))
    cache = latent_cache(WRITE, kv_cache, kv_c.shape[1], k_pe.shape[1])
    if cache.scales is not None:
        if k_scale is not None:
            fail(WRITE, "k_scale", "given", "None, since packed rows have scales of their own")
        _pack(kv_c, k_pe, cache, slot_mapping)
        return
    rank = kv_c.shape[1]
    cache_BS1W = kv_cache.unsqueeze(2)
    cache_write(
        kv_c.unsqueeze(1), k_pe.unsqueeze(1), cache_BS1W[..., :rank], cache_BS1W[..., rank:], slot_mapping,
        k_scale=k_scale, v_scale=k_scale,
    )  # fmt: skip


def _pack(kv_c: torch.Tensor, k_pe: torch.Tensor, cache: LatentCache, slot_mapping: torch.Tensor) -> None:
    assert cache.scales is not None
    if kv_c.shape[0] == 0:
        return
    source_format = stored_format(kv_c.dtype, kv_c.device)
    with on_device_of(kv_c):
        pack_rows_kernel[(kv_c.shape[0],)](
            kernel_view(kv_c, source_format), kernel_view(k_pe, source_format), cache.latent, cache.rope,
            cache.scales, slot_mapping, kv_c.stride(0), k_pe.stride(0), *cache.strides,
            cache.latent.shape[1], kv_c.shape[1] // PACKED_GROUP, PACKED_GROUP, k_pe.shape[1],
            source_format, *cache.formats, num_warps=4,
        )  # fmt: skip


def _check_sources(kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    check_device(WRITE, kv_c)
    check_same_device(WRITE, kv_c, ("k_pe", "slot_mapping"), (k_pe, slot_mapping))
    for name, tensor in (("kv_c", kv_c), ("k_pe", k_pe)):
        if tensor.dim() != 2 or tensor.stride(1) != 1 or tensor.shape[0] != kv_c.shape[0]:
            found = f"{tuple(tensor.shape)}, strides {tensor.stride()}"
            fail(WRITE, name, found, f"[{kv_c.shape[0]}, size], last stride 1")
        if tensor.dtype not in QUERY_DTYPES or tensor.dtype != kv_c.dtype:
            fail(WRITE, f"{name}.dtype", tensor.dtype, f"{names(QUERY_DTYPES)}, one for both")
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != kv_c.shape[:1]:
        found = f"{tuple(slot_mapping.shape)} of {slot_mapping.dtype}"
        fail(WRITE, "slot_mapping", found, f"torch.int64 of shape {tuple(kv_c.shape[:1])}")


def gather_latents(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    rank: int,
    rope_size: int,
    dtype: torch.dtype,
    *,
    k_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [N, L] and rotated keys [N, R] at slots, int64 [N], dequantised into `dtype`.

    Raises ValueError for shapes, dtypes or options outside of those of `write_latents`.
    """
    check_device(GATHER, kv_cache)
    check_same_device(GATHER, kv_cache, ("slots", "k_scale"), (slots, k_scale))
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        fail(GATHER, "slots", f"{tuple(slots.shape)} of {slots.dtype}", "contiguous torch.int64 [N]")
    if k_scale is not None:
        check_vector(GATHER, "k_scale", k_scale, (torch.float32,), (1,))
    cache = latent_cache(GATHER, kv_cache, rank, rope_size)
    count = slots.shape[0]
    kv_c = torch.empty(count, rank, dtype=dtype, device=kv_cache.device)
    k_pe = torch.empty(count, rope_size, dtype=dtype, device=kv_cache.device)
    out_format = stored_format(dtype, kv_cache.device)
    if count:
        with on_device_of(kv_cache):
            gather_rows_kernel[(-(-count // _SLOTS),)](
                cache.latent, cache.rope, cache.scales, k_scale, slots, kernel_view(kv_c, out_format),
                kernel_view(k_pe, out_format), *cache.strides, count, kv_cache.shape[1], PACKED_GROUP,
                rank, rope_size, padded_size(rank), padded_size(rope_size), *cache.formats, out_format,
                _SLOTS, num_warps=4,
            )  # fmt: skip
    return kv_c, k_pe
