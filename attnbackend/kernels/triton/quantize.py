"""Outputs in float8, written by the kernels that compute them.

A row is the output of one token and head. It is divided by one scale that is given, or each of its groups of
elements by a scale that is found, limited to the format's finite range, and rounded once.

Legend: M rows of a tile, DV head size of V, padded to a power of two in PAD.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import QUERY_DTYPES, fail, names
from .codec import FINITE_MAX
from .tile import store_rows


@triton.jit
def store_output(
    out_ptr: tl.tensor,
    offsets: tl.tensor,
    rows: tl.tensor,
    keep: tl.tensor,
    scale_ptr: tl.tensor,
    block_scale_ptr: tl.tensor,
    block_offsets: tl.tensor,
    DV: tl.constexpr,
    PAD: tl.constexpr,
    FMT: tl.constexpr,
    LIMIT: tl.constexpr,
    OUT_GROUP: tl.constexpr,
) -> None:
    """Write float32 rows [M, PAD] at 64-bit `offsets`, and the scales of their groups at `block_offsets`.

    Exactly as they are where LIMIT is 0: the output is not quantised.
    """
    if scale_ptr is not None:
        rows = tl.div_rn(rows, tl.zeros(rows.shape, tl.float32) + tl.load(scale_ptr))
    if block_scale_ptr is not None:
        groups = tl.reshape(rows, [rows.shape[0], PAD // OUT_GROUP, OUT_GROUP])
        size = tl.max(tl.abs(groups), 2)
        scales = tl.div_rn(size, tl.full(size.shape, LIMIT, tl.float32))
        places = block_offsets[:, None] + tl.arange(0, PAD // OUT_GROUP)[None, :]
        tl.store(block_scale_ptr + places, scales, mask=keep[:, None])
        divisor = tl.where(scales == 0.0, 1.0, scales)[:, :, None]
        rows = tl.reshape(tl.div_rn(groups, tl.broadcast_to(divisor, groups.shape)), rows.shape)
    if LIMIT > 0:
        # Comparisons, so that NaN stays NaN.
        rows = tl.where(rows > LIMIT, LIMIT, rows)
        rows = tl.where(rows < -LIMIT, -LIMIT, rows)
    store_rows(out_ptr, offsets, rows, keep, DV, PAD, FMT)


@triton.jit
def group_places(
    token: tl.tensor, head: tl.tensor, block_scale_token: tl.tensor, DV: tl.constexpr, OUT_GROUP: tl.constexpr
) -> tl.tensor:
    """Offset of the scale of a head's first group, for rows of 64-bit token and head."""
    per_head: tl.constexpr = DV // OUT_GROUP if OUT_GROUP > 0 else 0
    return token * block_scale_token + head * per_head


def takes_output_groups(group: int, head_size: int) -> bool:
    """Whether the kernels find scales for groups of so many elements: whole ones in each head."""
    both_powers = all(size & (size - 1) == 0 for size in (group, head_size))
    return both_powers and 0 < group <= head_size


def output_group(
    where: str, output: torch.Tensor, scale: torch.Tensor | None, block_scale: torch.Tensor | None
) -> int:
    """Elements of a group that has a scale of its own; 0: there are none.

    ValueError for scales that do not fit the output [T, H, Dv], or that the kernels do not take.
    """
    if scale is None and block_scale is None:
        if output.dtype in FINITE_MAX:
            fail(where, "output.dtype", output.dtype, f"{names(QUERY_DTYPES)} where no scale is given")
        return 0
    if output.dtype not in FINITE_MAX:
        fail(where, "dtype of an output with scales", output.dtype, " or ".join(map(str, FINITE_MAX)))
    if scale is not None:
        if block_scale is not None:
            fail(where, "output_scale and output_block_scale", "both given", "one of the two")
        if scale.dtype != torch.float32 or scale.numel() != 1:
            fail(where, "output_scale", f"{tuple(scale.shape)} of {scale.dtype}", "one torch.float32 number")
        return 0
    assert block_scale is not None
    tokens, heads, size = output.shape
    groups = block_scale.shape[1] if block_scale.dim() == 2 else 0
    group = heads * size // groups if groups and heads * size % groups == 0 else 0
    if block_scale.dtype != torch.float32 or len(block_scale) != tokens or block_scale.stride(-1) != 1:
        found = f"{tuple(block_scale.shape)} of {block_scale.dtype}, strides {block_scale.stride()}"
        fail(where, "output_block_scale", found, f"torch.float32 ({tokens}, groups), the last with stride 1")
    if not takes_output_groups(group, size):
        fail(where, "elements of a group", group, f"powers of 2 up to a head size that is one, {size} here")
    return group
