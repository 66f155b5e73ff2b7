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
SHORT, SHORT_KEYS = 1024, 64
"""Keys of a request up to which steps are short: less of them is masked. Measured on an H200."""
GROUP_ROWS = 64
"""Of a group of warps: query tokens times query heads of one kv head."""
MIN_TOKENS = 128
"""Fewest tokens a request, in the mean, whose tiles are not mostly empty."""
_AHEAD_TOKENS = 4096
"""Fewest tokens of prompts that take less time than with FlashAttention 3: with them a layer takes longer
than its launch on the host."""
_AHEAD = {64: (4096, 1), 128: (2048, 4), 256: (2048, 4)}
"""Head size -> keys of their longest at most, and how many as long the tokens would make at least, so that
all programs get some."""
_AHEAD_ON_PAGES = {64: (8192, 1)}
"""As `_AHEAD`, where FlashAttention 3 would read pages, too."""
_HELD_KEYS = {128: 256, 256: 128}
"""Head size -> keys of all steps that are held."""
_EARLY_SIZES = (64, 128)
"""Head sizes that leave room for a tile's queries beside the output of the tile before."""
_MAX_ROWS = 2**31
_PLAIN = {"CAUSAL": True, "REACH": "all", "HAS_CAP": False}


class Shape(NamedTuple):
    """Of programs."""

    keys: int
    """Of a step."""
    stages: int
    """Steps whose keys and values are held."""
    groups: int = 2
    """Of warps that compute, each rows of its own of a tile."""
    programs: int = 1
    """That share a multiprocessor."""
    holds_queries: bool = False
    """In registers, not in shared memory."""
    attend_registers: int = 232
    """Of a thread of the second group that computes; what is left is the first's: as much."""
    copy_registers: int = 40
    registers: int | None = None
    """Of a thread at launch, where programs share a multiprocessor."""


ALONE = Shape(64, 3, groups=1, programs=3, copy_registers=24, registers=80)
"""For heads of 64 and tiles of not too many steps: programs hide each other's first and last."""
LONG = Shape(128, 3, holds_queries=True)
"""For heads of 64 and more steps: programs of one group would read keys twice as often."""
ALONE_KEYS = 4096
"""Keys of a request up to which `ALONE` takes less time than `LONG`. Measured on an H200."""


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


def is_ahead(
    tokens: int, rows: int, longest: int, head_size: int, dtype: torch.dtype, device: torch.device,
    on_pages: bool = False,
) -> bool:  # fmt: skip
    """Whether prompts without context take less time than FlashAttention 3 does, on an H200."""
    if head_size not in KEYS or dtype.itemsize != 2 or tokens < MIN_TOKENS * rows:
        return False
    most, requests = (_AHEAD | _AHEAD_ON_PAGES if on_pages else _AHEAD)[head_size]
    is_enough = tokens >= max(_AHEAD_TOKENS, requests * longest)
    return is_enough and longest <= most and device_problem(device) is None


@lru_cache(maxsize=64)
def _layout(dtype: torch.dtype, *block: int) -> Any:
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def _descriptor(tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(tensor, shape, strides, block, _layout(tensor.dtype, *block))


def _descriptors(sides: Sides, tensors: tuple[Any, Any], block: list[int]) -> list[Any]:
    return [
        _descriptor(tensor, [m.rows, m.columns], [m.stride, 1], block)
        for tensor, m in zip(tensors, sides, strict=True)
    ]


def _own_descriptors(own: OwnTokens, block: list[int]) -> tuple[list[Any], tuple[int, int]]:
    """Of the new tokens' keys and values, where they can be read, and columns from one head to the next."""
    sides = None if own.key is None or own.value is None else sides_of(own.key, own.value)
    if sides is None:
        return [None, None], (0, 0)
    columns = sides.key.head_columns, sides.value.head_columns
    return _descriptors(sides, (own.key, own.value), block), columns


def _token_descriptor(tokens: torch.Tensor, group: int) -> Any:
    """Of queries or outputs, for the copy engine; None where tiles are not whole tokens, or not aligned."""
    aligned = tokens.data_ptr() % 16 == 0 and not any(stride % 8 for stride in tokens.stride()[:2])
    if GROUP_ROWS % group or tokens.shape[2] not in _EARLY_SIZES or not aligned:
        return None
    block = [GROUP_ROWS // group, group, 64]
    return _descriptor(tokens, list(tokens.shape), list(tokens.stride()), block)


def keys_of_step(size: int, longest: int) -> int:
    """From the head size and a bound of the keys of a request."""
    return min(SHORT_KEYS, KEYS[size]) if longest <= SHORT else KEYS[size]


def shape_of(size: int, longest: int) -> Shape:
    """From the head size and a bound of the keys of a request."""
    if size == 64:
        return ALONE if longest <= ALONE_KEYS else LONG
    keys = keys_of_step(size, longest)
    return Shape(keys, _HELD_KEYS[size] // keys)


def launch_hopper(launch: Launch, own: OwnTokens, longest: int) -> None:
    """Write output and LSE; `longest` bounds the keys of a request."""
    from .paged_hopper import paged_hopper_kernel

    query, key, value, output, lse, starts, lens, table = launch.tensors[:8]
    constants = launch.plan.constants
    size, block_size, group = constants["D"], constants["S"], launch.plan.group
    shape, sides = shape_of(size, longest), sides_of(key, value)
    assert sides is not None, "problem() refuses such strides"
    own_descs, columns = _own_descriptors(own, [shape.keys, size])
    tiles = launch.tokens * group // (shape.groups * GROUP_ROWS) + launch.rows + 1
    programs = min(tiles * launch.kv_heads, shape.programs * processor_count(query.device))
    q_desc = _token_descriptor(query, group)
    limit = {} if shape.registers is None else {"maxnreg": shape.registers}
    paged_hopper_kernel[(programs,)](
        *_descriptors(sides, (key, value), [math.gcd(block_size, shape.keys), 64]), *own_descs, q_desc,
        None if q_desc is None else _token_descriptor(output, group),
        query.new_zeros(1, dtype=torch.int32), query, output, lse, starts, lens, table,
        launch.numbers[0] * LOG2_E, *query.stride()[:2], *output.stride()[:2],
        *((0, 0) if lse is None else lse.stride()),
        table.stride(0), *sides.key[3:], *sides.value[3:], *columns, launch.tokens, launch.rows,
        tiles, launch.kv_heads, G=group, S=block_size, D=size, N=shape.keys, STAGES=shape.stages,
        LAYOUT=_layout(query.dtype, shape.keys, size), GROUPS=shape.groups, HOLDS=shape.holds_queries,
        ATTEND_REGS=shape.attend_registers, COPY_REGS=shape.copy_registers, num_warps=4, **limit,
    )  # fmt: skip
