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
"""Elements of K (and of V) that one program converts."""
WARPS = 4


@triton.jit
def store_wide(
    out_ptr: tl.tensor,
    places: tl.tensor,
    mask: tl.tensor,
    x: tl.tensor,
    scale_ptr: tl.tensor,
    scale_head: tl.tensor,
    head: tl.tensor,
    FMT: tl.constexpr,
    OUT_FMT: tl.constexpr,
) -> None:
    """Write stored values as real ones."""
    # By way of float32 always: from float16 straight to bfloat16 is a conversion at a quarter of the rate.
    x = decode(x, FMT).to(tl.float32)
    if scale_ptr is not None:
        x *= tl.load(scale_ptr + head * scale_head)[:, None]
    tl.store(out_ptr + places, encode(x, out_ptr.dtype.element_ty, OUT_FMT), mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "table_row"],
    do_not_specialize_on_alignment=[
        "table_ptr",
        "seq_lens_ptr",
        "page_ends_ptr",
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
    page_ends_ptr: tl.tensor,
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
    num_rows: tl.tensor,
    S: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    FMT: tl.constexpr,
    OUT_FMT: tl.constexpr,
) -> None:
    page = tl.program_id(0)
    row = 0
    for first in range(0, num_rows, 128):
        other = first + tl.arange(0, 128)
        inside = other < num_rows
        row += tl.sum((inside & (tl.load(page_ends_ptr + other, mask=inside, other=0) <= page)).to(tl.int32))
    if row == num_rows:
        return
    before = tl.load(page_ends_ptr + row - 1, mask=row > 0, other=0)
    line = tl.program_id(1) * TILE + tl.arange(0, TILE)
    head = line % HEADS
    key = (page - before) * N + line // HEADS
    inside = line < N * HEADS
    known = inside & (key < tl.load(seq_lens_ptr + row))
    table = table_ptr + tl.cast(row, tl.int64) * table_row
    block = tl.load(table + key // S, mask=known, other=0).to(tl.int64)
    slot = key % S
    column = tl.arange(0, D_PAD)[None, :]
    here = known[:, None] & (column < D)
    # What is behind the last key is 0: a weight of 0 times NaN is NaN.
    k = tl.load(
        k_ptr + (block * k_block + slot * k_slot + head * k_head)[:, None] + column, mask=here, other=0.0
    )
    v = tl.load(
        v_ptr + (block * v_block + slot * v_slot + head * v_head)[:, None] + column, mask=here, other=0.0
    )
    places = ((page.to(tl.int64) * (N * HEADS) + line) * D)[:, None] + column
    mask = inside[:, None] & (column < D)
    store_wide(k_out_ptr, places, mask, k, k_scale_ptr, k_scale_head, head, FMT, OUT_FMT)
    store_wide(v_out_ptr, places, mask, v, v_scale_ptr, v_scale_head, head, FMT, OUT_FMT)


def widen_pages(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_ends: torch.Tensor,
    output: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Keys and values of some rows, times their scales, in the type of `output`.

    key_cache and value_cache [B, S, Hk, D]: float8, any strides but the last; block_table [R, W], seq_lens
    [R] and page_ends [R], where the pages of each row end: int32; output [2, P, N, Hk, D], contiguous: row
    r's keys are written from page page_ends[r - 1] on, with zeros behind the last up to its page's end. Pages
    of no row are left alone. k_scale, v_scale float32 [1] or [Hk]: real value = stored * scale.

    Raises ValueError for shapes or dtypes outside of these.
    """
    check_device(WHERE, key_cache)
    check_same_device(
        WHERE, key_cache,
        ("value_cache", "block_table", "seq_lens", "page_ends", "output", "k_scale", "v_scale"),
        (value_cache, block_table, seq_lens, page_ends, output, k_scale, v_scale),
    )  # fmt: skip
    _check(key_cache, value_cache, block_table, seq_lens, page_ends, output)
    _, pages, slots, heads, size = output.shape
    if pages == 0 or seq_lens.shape[0] == 0:
        return
    fmt, out_fmt = (stored_format(t.dtype, t.device) for t in (key_cache, output))
    tile = max(1, TILE_ELEMENTS // padded_size(size))
    sides = (kernel_view(t, fmt) for t in (key_cache, value_cache))
    with on_device_of(output):
        widen_kernel[(pages, -(-slots * heads // tile))](
            *sides, *kernel_view(output, out_fmt).unbind(0), block_table, seq_lens, page_ends, k_scale,
            v_scale, *key_cache.stride()[:3], *value_cache.stride()[:3],
            scale_stride(WHERE, "k_scale", k_scale, heads), scale_stride(WHERE, "v_scale", v_scale, heads),
            block_table.stride(0), seq_lens.shape[0], key_cache.shape[1], slots, heads, size,
            padded_size(size), tile, fmt, out_fmt, num_warps=WARPS,
        )  # fmt: skip


def _check(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_ends: torch.Tensor,
    output: torch.Tensor,
) -> None:
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
    rows = seq_lens.shape[0]
    for name, tensor in (("block_table", block_table), ("seq_lens", seq_lens), ("page_ends", page_ends)):
        fits = tensor.dim() == (2 if name == "block_table" else 1) and tensor.shape[0] == rows
        if tensor.dtype != torch.int32 or not fits or tensor.stride(-1) != 1:
            found = f"{tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}"
            fail(WHERE, name, found, f"torch.int32, {rows} rows, last stride 1")
