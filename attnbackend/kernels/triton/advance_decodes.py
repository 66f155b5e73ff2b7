"""The inputs of the next step of the same decodes, made from those of this one.

Legend: R rows, W width of the block table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import on_device_of

TILE = 128


@triton.jit(do_not_specialize=["rows", "width"])
def advance_kernel(
    ids_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    table_ptr: tl.tensor,
    table_row: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    length = tl.load(lens_ptr + row, mask=row < rows, other=0)
    real = length > 0
    position = tl.load(positions_ptr + row, mask=real, other=0) + 1
    column = position // BLOCK_SIZE
    block = tl.load(table_ptr + row.to(tl.int64) * table_row + column, mask=real & (column < width), other=0)
    tl.store(input_ids_ptr + row, tl.load(ids_ptr + row, mask=real, other=0), mask=real)
    tl.store(positions_ptr + row, position, mask=real)
    tl.store(slots_ptr + row, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, mask=real)
    tl.store(lens_ptr + row, length + 1, mask=real)


def advance_decodes_on_gpu(
    ids: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor, block_table: torch.Tensor, block_size: int,
) -> None:  # fmt: skip
    """As `attnbackend.runtime.advance_decodes`: one kernel, nothing is waited for."""
    rows, width = block_table.shape
    with on_device_of(ids):
        advance_kernel[(-(-rows // TILE),)](
            ids, input_ids, positions, slot_mapping, seq_lens, block_table, block_table.stride(0), rows,
            width, block_size, TILE, num_warps=4,
        )  # fmt: skip
