"""Pages of a float8 cache as pages of 16 bits, one after the other, for kernels that read no float8.

Legend: R rows, W table width, B cache blocks, S block size, Hk kv heads, D head size, P pages of all rows and
N slots of each, where they are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import QUERY_DTYPES, check_device, check_same_device, fail, names, scale_stride
from .codec import FLOAT8_FORMATS, decode, encode, kernel_view, stored_format
from .config import padded_size
from .launch import on_device_of

WHERE = "widen_pages"
TILE_ELEMENTS = 4096
"""Elements that one program converts, of keys or of values."""


@triton.jit
def widen_lines(
    source_ptr: tl.tensor,
    offsets: tl.tensor,
    known: tl.tensor,
    out_ptr: tl.tensor,
    places: tl.tensor,
    inside: tl.tensor,
    scale_ptr: tl.tensor,
    scales: tl.tensor,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    FMT: tl.constexpr,
    OUT_FMT: tl.constexpr,
) -> None:
    """Write heads [TILE, D] of stored values as real ones, those not `known` as zeros."""
    column = tl.arange(0, D_PAD)[None, :]
    mask = known[:, None] & (column < D)
    x = tl.load(source_ptr + offsets[:, None] + column, mask=mask, other=0.0)
    # By way of float32 always: from float16 straight to bfloat16 is a conversion at a quarter of the rate.
    x = decode(x, FMT).to(tl.float32)
    if scale_ptr is not None:
        x *= tl.load(scale_ptr + scales)[:, None]
    x = encode(x, out_ptr.dtype.element_ty, OUT_FMT)
    tl.store(out_ptr + places[:, None] + column, x, mask=inside[:, None] & (column < D))


@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=[
        "table_ptr",
        "seq_lens_ptr",
        "page_rows_ptr",
        "page_keys_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
    ],
)
def widen_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    v_out_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    page_rows_ptr: tl.tensor,
    page_keys_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    k_head: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    v_head: tl.tensor,
    k_scale_head: tl.tensor,
    v_scale_head: tl.tensor,
    table_row: tl.tensor,
    S: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    FMT: tl.constexpr,
    OUT_FMT: tl.constexpr,
) -> None:
    page = tl.program_id(0).to(tl.int64)
    row = tl.load(page_rows_ptr + page).to(tl.int64)
    line = tl.program_id(1) * TILE + tl.arange(0, TILE)
    head = line % HEADS
    key = tl.load(page_keys_ptr + page) + line // HEADS
    inside = line < N * HEADS
    # What is behind the last key is 0: a weight of 0 times NaN is NaN.
    known = inside & (key < tl.load(seq_lens_ptr + row))
    block = tl.load(table_ptr + row * table_row + key // S, mask=known, other=0).to(tl.int64)
    slot = key % S
    places = (page * (N * HEADS) + line) * D
    if tl.program_id(2) == 0:
        widen_lines(
            k_ptr, block * k_block + slot * k_slot + head * k_head, known, k_out_ptr, places, inside,
            k_scale_ptr, head * k_scale_head, D, D_PAD, FMT, OUT_FMT,
        )  # fmt: skip
    else:
        widen_lines(
            v_ptr, block * v_block + slot * v_slot + head * v_head, known, v_out_ptr, places, inside,
            v_scale_ptr, head * v_scale_head, D, D_PAD, FMT, OUT_FMT,
        )  # fmt: skip


def widen_pages(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_rows: torch.Tensor,
    page_keys: torch.Tensor,
    output: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Keys and values of some rows, times their scales, in the type of `output`.

    key_cache and value_cache [B, S, Hk, D]: float8, any strides but the last; block_table [R, W] and seq_lens
    [R]: int32; output [2, P, N, Hk, D], contiguous: page p gets row page_rows[p]'s keys from page_keys[p] on,
    both int32 [P], and zeros behind the row's last. k_scale, v_scale float32 [1] or [Hk]: real value = stored
    * scale.

    Raises ValueError for shapes or dtypes outside of these.
    """
    check_device(WHERE, key_cache)
    check_same_device(
        WHERE, key_cache,
        ("value_cache", "block_table", "seq_lens", "page_rows", "page_keys", "output", "k_scale", "v_scale"),
        (value_cache, block_table, seq_lens, page_rows, page_keys, output, k_scale, v_scale),
    )  # fmt: skip
    _check_caches(key_cache, value_cache, output)
    _, pages, slots, heads, size = output.shape
    _check_metadata(block_table, seq_lens, page_rows, page_keys, pages)
    if pages == 0:
        return
    fmt, out_fmt = (stored_format(t.dtype, t.device) for t in (key_cache, output))
    tile = max(1, TILE_ELEMENTS // padded_size(size))
    sides = (kernel_view(t, fmt) for t in (key_cache, value_cache))
    with on_device_of(output):
        widen_kernel[(pages, -(-slots * heads // tile), 2)](
            *sides, *kernel_view(output, out_fmt).unbind(0), block_table, seq_lens, page_rows, page_keys,
            k_scale, v_scale, *key_cache.stride()[:3], *value_cache.stride()[:3],
            scale_stride(WHERE, "k_scale", k_scale, heads), scale_stride(WHERE, "v_scale", v_scale, heads),
            block_table.stride(0), key_cache.shape[1], slots, heads, size, padded_size(size), tile, fmt,
            out_fmt, num_warps=4,
        )  # fmt: skip


def _check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor, output: torch.Tensor) -> None:
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype not in FLOAT8_FORMATS or cache.dtype != key_cache.dtype:
            fail(WHERE, f"{name}.dtype", cache.dtype, f"one of {names(tuple(FLOAT8_FORMATS))} for both sides")
        if cache.dim() != 4 or cache.shape != key_cache.shape or cache.stride(3) != 1:
            found = f"{tuple(cache.shape)}, strides {cache.stride()}"
            fail(WHERE, name, found, "[B, S, Hk, D], both alike, the last stride 1")
    shape = (2, *output.shape[1:3], *key_cache.shape[2:])
    if output.dtype not in QUERY_DTYPES or output.shape != shape or not output.is_contiguous():
        found = f"{tuple(output.shape)} of {output.dtype}, strides {output.stride()}"
        allowed = f"contiguous [2, P, N, {', '.join(map(str, shape[3:]))}] of {names(QUERY_DTYPES)}"
        fail(WHERE, "output", found, allowed)


def _check_metadata(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_rows: torch.Tensor,
    page_keys: torch.Tensor,
    pages: int,
) -> None:
    rows = block_table.shape[0]
    given = (("seq_lens", seq_lens, rows), ("page_rows", page_rows, pages), ("page_keys", page_keys, pages))
    for name, tensor, length in given:
        if tensor.dtype != torch.int32 or tensor.shape != (length,) or tensor.stride(0) != 1:
            found = f"{tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}"
            fail(WHERE, name, found, f"torch.int32 of shape {(length,)}, stride 1")
    if block_table.dtype != torch.int32 or block_table.dim() != 2 or block_table.stride(1) != 1:
        found = f"{tuple(block_table.shape)} of {block_table.dtype}, strides {block_table.stride()}"
        fail(WHERE, "block_table", found, "torch.int32 [R, W], the last stride 1")
