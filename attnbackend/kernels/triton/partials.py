"""Keys split over programs: where the splits lie, what each leaves behind, and how those are merged.

A part is the softmax state of one query token and head over one split of its keys. The buffer of
partial results holds, in float32, the weighted sums of values of all parts [P, DV], then their
greatest scores [P], then their sums of weights [P].

Legend: P parts, DV head size of V, padded to a power of two in DV_PAD, N keys of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import check_same_device, fail
from .launch import Launch
from .quantize import group_places, store_output
from .splits import decode_workspace_size
from .tile import divide, natural_lse, power, store_rows

MERGE_STEP = 16
"""Partial results that a merge reads at once."""
MAXIMA = tl.constexpr(128)
"""Greatest scores of parts that a merge reads at once."""


def merge_step(num_splits: int, padded_size: int) -> int:
    """Partial results of heads of `padded_size` that four warps read at once: all there are, if they can."""
    most = max(MERGE_STEP, 8192 // padded_size)
    return min(most, MERGE_STEP if num_splits <= MERGE_STEP else 64)


@triton.jit
def split_size(
    num_keys: tl.tensor, num_splits: tl.tensor, MIN_KEYS: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    """Keys of one split: a multiple of UNIT, and not so few that merging costs more than it saves."""
    size = tl.maximum((num_keys + num_splits - 1) // num_splits, MIN_KEYS)
    return (size + UNIT - 1) // UNIT * UNIT


@triton.jit
def store_partial(
    partial_ptr: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    keep: tl.tensor,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
) -> None:
    """Write the states of a tile's rows as their 64-bit `part` of `parts`, where `keep`."""
    store_rows(partial_ptr, part * DV, acc.to(tl.float32), keep, DV, DV_PAD, "native")
    tl.store(partial_ptr + parts * DV + part, row_max, mask=keep)
    tl.store(partial_ptr + parts * (DV + 1) + part, row_sum.to(tl.float32), mask=keep)


@triton.jit
def merged(
    partial_ptr: tl.tensor,
    first_part: tl.tensor,
    parts: tl.tensor,
    used: tl.tensor,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    STEP: tl.constexpr,
    PRECISE: tl.constexpr,
) -> tl.tensor:
    """(mean of values [DV_PAD], greatest score, sum of weights) of `used` parts from `first_part`."""
    columns = tl.arange(0, DV_PAD)
    max_parts = partial_ptr + parts * DV + first_part
    top = float("-inf")
    for first in range(0, used, MAXIMA):
        split = first + tl.arange(0, MAXIMA)
        part_max = tl.load(max_parts + split, mask=split < used, other=float("-inf"))
        top = tl.maximum(top, tl.max(part_max, 0))
    pivot = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    acc = tl.zeros([DV_PAD], tl.float32)
    for first in range(0, used, STEP):
        split = first + tl.arange(0, STEP)
        part_max = tl.load(max_parts + split, mask=split < used, other=float("-inf"))
        part_sum = tl.load(max_parts + parts + split, mask=split < used, other=0.0)
        shrink = power(part_max - pivot, PRECISE)
        ptrs = partial_ptr + (first_part + split)[:, None] * DV + columns[None, :]
        # What a part without keys leaves in place of values is not read.
        mask = (part_max != float("-inf"))[:, None] & (columns < DV)[None, :]
        part = tl.load(ptrs, mask=mask, other=0.0)
        acc += tl.sum(part * shrink[:, None], 0)
        total += tl.sum(part_sum * shrink, 0)
    divisor = tl.broadcast_to(tl.where(total == 0.0, 1.0, total), acc.shape)
    return divide(acc, divisor, PRECISE), top, total


@triton.jit
def store_head(
    out_ptr: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    out_scale_ptr: tl.tensor,
    block_scale_ptr: tl.tensor,
    block_scale_token: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    OUT_FMT: tl.constexpr,
    OUT_LIMIT: tl.constexpr,
    OUT_GROUP: tl.constexpr,
) -> None:
    """Write one float32 row [DV_PAD] of the output: a tile of one."""
    first = tl.zeros([1], tl.int64)
    token64, head64 = first + token, first + head
    store_output(
        out_ptr, token64 * out_token + head64 * out_head, row[None, :], first == 0, out_scale_ptr,
        block_scale_ptr, group_places(token64, head64, block_scale_token, DV, OUT_GROUP),
        DV, DV_PAD, OUT_FMT, OUT_LIMIT, OUT_GROUP,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["lse_ptr", "out_scale_ptr", "block_scale_ptr", "partial_ptr"],
)
def merge_tokens_kernel(
    partial_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_scale_ptr: tl.tensor,
    block_scale_ptr: tl.tensor,
    block_scale_token: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    lse_token: tl.tensor,
    lse_head: tl.tensor,
    num_splits: tl.tensor,
    OUT_FMT: tl.constexpr,
    OUT_LIMIT: tl.constexpr,
    OUT_GROUP: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    STEP: tl.constexpr,
    PRECISE: tl.constexpr,
) -> None:
    """One token and head: all of its splits have written their part."""
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    token64 = tl.program_id(1).to(tl.int64)
    first_part = (token64 * num_heads + head) * num_splits
    parts = tl.num_programs(1).to(tl.int64) * num_heads * num_splits
    mean, top, total = merged(partial_ptr, first_part, parts, num_splits, DV, DV_PAD, STEP, PRECISE)
    store_head(
        out_ptr, token64, head, mean, out_scale_ptr, block_scale_ptr, block_scale_token, out_token, out_head,
        DV, DV_PAD, OUT_FMT, OUT_LIMIT, OUT_GROUP,
    )  # fmt: skip
    if lse_ptr is not None:
        lse = natural_lse(top, total, PRECISE)
        tl.store(lse_ptr + token64 * lse_token + head.to(tl.int64) * lse_head, lse)


def partial_buffer(
    where: str, query: torch.Tensor, launch: Launch, count: int, num_splits: int,
    workspace: torch.Tensor | None,
) -> torch.Tensor | None:  # fmt: skip
    """Room for the parts of `count` tokens (or rows of one), None for one split.

    ValueError for num_splits < 1 and for a workspace that does not fit.
    """
    if num_splits < 1:
        fail(where, "num_splits", num_splits, "None, or at least 1")
    if num_splits == 1:
        return None
    needed = decode_workspace_size(count, launch.heads, launch.value_size, num_splits)
    if workspace is None:
        return torch.empty(needed, dtype=torch.float32, device=query.device)
    check_same_device(where, query, ("workspace",), (workspace,))
    fits = workspace.numel() >= needed and workspace.is_contiguous()
    if workspace.dtype != torch.float32 or not fits:
        value = f"{tuple(workspace.shape)} of {workspace.dtype}, strides {workspace.stride()}"
        fail(where, "workspace", value, f"contiguous torch.float32, {needed} elements or more")
    return workspace


def launch_merge_tokens(launch: Launch, num_splits: int, partial: torch.Tensor) -> None:
    """Merge the parts of every token into the launch's output and LSE."""
    constants = launch.plan.constants
    out, lse = launch.tensors[3:5]
    merge_tokens_kernel[(launch.heads, launch.tokens)](
        partial, out, lse, *launch.out_scales, *launch.out_strides, num_splits, constants["OUT_FMT"],
        constants["OUT_LIMIT"], constants["OUT_GROUP"], launch.value_size,
        constants["DV_PAD"], MERGE_STEP, constants["PRECISE"], num_warps=2,
    )  # fmt: skip
