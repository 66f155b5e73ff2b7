"""A block table as one list of pages, row after row, for kernels that want it so.

Legend: R rows, W table width, P pages of all rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import check_device, check_same_device, fail
from .launch import on_device_of

WHERE = "gather_page_indices"
TILE = 256


@triton.jit(do_not_specialize=["table_row", "limit"])
def gather_kernel(
    table_ptr: tl.tensor,
    page_starts_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    table_row: tl.tensor,
    limit: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(page_starts_ptr + row)
    pages = tl.load(page_starts_ptr + row + 1) - start
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    keep = (column < pages) & (start + column < limit)
    page = tl.load(table_ptr + row * table_row + column, mask=keep, other=0)
    tl.store(indices_ptr + start + column, page, mask=keep)


def gather_page_indices(block_table: torch.Tensor, page_starts: torch.Tensor, indices: torch.Tensor) -> None:
    """indices[page_starts[r] + j] = block_table[r, j], for every page j of every row r.

    block_table int32 [R, W]; page_starts int32 [R+1], non-decreasing, differences at most W; indices int32
    [P'], written up to page_starts[-1] and left alone behind it. Nothing is waited for.

    Raises ValueError for shapes or dtypes outside of these.
    """
    check_device(WHERE, block_table)
    check_same_device(WHERE, block_table, ("page_starts", "indices"), (page_starts, indices))
    for name, tensor in (("block_table", block_table), ("page_starts", page_starts), ("indices", indices)):
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            fail(WHERE, name, f"{tensor.dtype}, strides {tensor.stride()}", "torch.int32, last stride 1")
    rows, width = block_table.shape
    if page_starts.shape != (rows + 1,):
        fail(WHERE, "page_starts.shape", tuple(page_starts.shape), f"({rows} + 1,)")
    if rows == 0 or width == 0:
        return
    with on_device_of(block_table):
        gather_kernel[(rows, -(-width // TILE))](
            block_table, page_starts, indices, block_table.stride(0), indices.shape[0], TILE, num_warps=4
        )
