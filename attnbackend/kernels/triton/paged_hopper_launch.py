"""When `paged_hopper` serves a call, and its launch.

Legend: T tokens, B blocks, S block size, Hk kv heads, D head size, P keys of a page in one copy, N of a step.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .launch import Launch, OwnTokens
from .mla_hopper_launch import LOG2_E, device_problem
from .splits import processor_count

KEYS = {64: 128, 128: 128, 256: 64}
"""Head size -> keys of a step: what accumulators and two steps of buffers leave room for."""
ROWS = 128
"""Of a tile: query tokens times query heads of one kv head."""
MIN_TOKENS = 128
"""Fewest tokens a request, in the mean, whose tiles are not mostly empty."""
STAGES = 2
_MAX_ROWS = 2**31
_PLAIN = {"CAUSAL": True, "REACH": "all", "HAS_CAP": False}


class Matrix(NamedTuple):
    """One side of a cache, or the tokens' own, as a matrix whose row is a slot."""

    rows: int
    columns: int
    stride: int
    block_rows: int
    """Rows from one block to the next."""
    head_rows: int
    head_columns: int
    """Where a head begins: rows and columns after the head before."""


def matrix_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> Matrix | None:
    """[B, S, Hk, D] of 16-bit values as a matrix; None where it is none, or not aligned to 16 bytes."""
    blocks, slots, heads, size = shape
    block, slot, head = strides[:3]
    if heads == 1:
        head = 0
    if slot < 1 or slot % 8 or head % 8 or block % slot or (blocks > 1 and block < slot):
        return None
    columns = (heads - 1) * head + size
    if columns <= slot:
        rows = (blocks - 1) * (block // slot) + slots
        return Matrix(rows, columns, slot, block // slot, 0, head)
    if head % slot or size > slot:
        return None
    rows = (blocks - 1) * (block // slot) + (heads - 1) * (head // slot) + slots
    return Matrix(rows, size, slot, block // slot, head // slot, 0)


class Sides(NamedTuple):
    """The matrices of keys and values."""

    key: Matrix
    value: Matrix


def sides_of(key: torch.Tensor, value: torch.Tensor) -> Sides | None:
    """Of a cache's sides [B, S, Hk, D], or of new tokens' [T, Hk, D]; None where the copy engine cannot."""
    found = []
    for tensor in (key, value):
        if tensor.dim() == 3:
            tensor = tensor.unsqueeze(0)
        matrix = matrix_of(tuple(tensor.shape), tensor.stride())
        if matrix is None or matrix.rows >= _MAX_ROWS or tensor.data_ptr() % 16:
            return None
        found.append(matrix)
    return Sides(*found)


def problem(launch: Launch, num_splits: int | None) -> str | None:
    """Why the kernel does not serve a call, or None."""
    query, key, value, output = launch.tensors[:4]
    if reason := device_problem(query.device):
        return reason
    if num_splits != 1 or launch.tokens < MIN_TOKENS * launch.rows:
        return f"it takes whole prompts, of {MIN_TOKENS} tokens or more in the mean"
    constants = launch.plan.constants
    if any(constants[name] != plain for name, plain in _PLAIN.items()):
        return "it is causal over all keys, without a soft-cap"
    if constants["S"] == 0:
        return "it reads keys from a cache"
    if constants["D"] != constants["DV"] or constants["D"] not in KEYS:
        return f"head size is {constants['D']}; it needs one of {tuple(KEYS)}"
    if query.dtype.itemsize != 2 or any(x.dtype != query.dtype for x in (key, value, output)):
        return "query, cache and output must be of one type of 16 bits"
    if any(x is not None for x in launch.tensors[8:]) or launch.numbers[0] <= 0:
        return "it takes no slopes, sinks, scales or ranges, and no scale of 0 or less"
    if query.data_ptr() % 16 or any(stride % 16 for stride in query.stride()[:2]):
        return f"strides {query.stride()} of the query do not make lines of 16 bytes"
    if sides_of(key, value) is None:
        return f"strides {key.stride()} and {value.stride()} of the cache do not make aligned matrices"
    return None


@lru_cache(maxsize=64)
def _layouts(dtype: torch.dtype, piece: int, size: int) -> tuple[Any, Any]:
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    blocks = [piece, 64], [KEYS[size], size]
    pieces, whole = (gl.NVMMASharedLayout.get_default_for(block, element) for block in blocks)
    return pieces, whole


def _descriptors(sides: Sides, tensors: tuple[Any, Any], block: list[int], layout: Any) -> list[Any]:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return [
        TensorDescriptor(tensor, [m.rows, m.columns], [m.stride, 1], block, layout)
        for tensor, m in zip(tensors, sides, strict=True)
    ]


def launch_hopper(launch: Launch, own: OwnTokens) -> None:
    """Write output and LSE."""
    from .paged_hopper import ATTEND_REGISTERS, COPY_REGISTERS, paged_hopper_kernel

    query, key, value, output, lse, starts, lens, table = launch.tensors[:8]
    constants = launch.plan.constants
    size, block_size, group = constants["D"], constants["S"], launch.plan.group
    piece = math.gcd(block_size, KEYS[size])
    pieces, whole = _layouts(query.dtype, piece, size)
    sides = sides_of(key, value)
    assert sides is not None, "problem() refuses such strides"
    cache = _descriptors(sides, (key, value), [piece, 64], pieces)
    new = None if own.key is None or own.value is None else sides_of(own.key, own.value)
    own_descs: list[Any] = [None, None]
    if new is not None:
        own_descs = _descriptors(new, (own.key, own.value), [KEYS[size], size], whole)
    columns = (0, 0) if new is None else (new.key.head_columns, new.value.head_columns)
    tiles = launch.tokens * group // ROWS + launch.rows + 1
    programs = min(tiles * launch.kv_heads, processor_count(query.device))
    paged_hopper_kernel[(programs,)](
        *cache, *own_descs, query, output, lse, starts, lens, table, launch.numbers[0] * LOG2_E,
        *query.stride()[:2], *output.stride()[:2], *((0, 0) if lse is None else lse.stride()),
        table.stride(0), *sides.key[3:], *sides.value[3:], *columns, launch.tokens, launch.rows,
        tiles, launch.kv_heads, G=group, S=block_size, D=size, N=KEYS[size], STAGES=STAGES, LAYOUT=whole,
        ATTEND_REGS=ATTEND_REGISTERS, COPY_REGS=COPY_REGISTERS, num_warps=4,
    )  # fmt: skip
