"""What `paged_hopper` writes: the rows of a tile, and their LSEs.

Legend: T tokens, H query heads, D head size, G query heads of a kv head, M = 64 rows of a group.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .gluon_parts import LN_2, TILE_COPY, send_block, sync_group, token_pieces
from .paged_hopper_turns import M


@gluon.jit
def store_tile(
    acc: gl.tensor,
    row_max: gl.tensor,
    row_sum: gl.tensor,
    rooms: gl.shared_memory_descriptor,
    out_desc: gl.tensor,
    results: gl.tuple,
    place: gl.tuple,
    kv_head: gl.tensor,
    G: gl.constexpr,
    PART: gl.constexpr,
) -> None:
    """Write a group's rows, by way of its room; with a descriptor, whole ones by the copy engine."""
    begin, tokens, first, _, _ = place
    ROW: gl.constexpr = row_max.type.layout
    row = first + PART * M + gl.arange(0, M, ROW)
    token, head64 = row // G, (kv_head * G + row % G).to(gl.int64)
    token64, keep = (begin + token).to(gl.int64), token < tokens
    total = gl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, acc.type.layout))[:, None]
    if out_desc is not None:
        tma.store_wait(0)  # The rows of the tile before have left.
        sync_group()
    rooms.index(PART).store(acc.to(rooms.dtype))
    fence_async_shared()
    sync_group()
    if out_desc is None:
        write_room(rooms.index(PART), results, token64, head64, keep)
    else:
        if first + PART * M + M <= tokens * G:
            send_room(out_desc, rooms, begin + first // G + PART * (M // G), kv_head * G, G, PART)
        else:
            write_room(rooms.index(PART), results, token64, head64, keep)
    store_lse(results, row_max, row_sum, token64, head64, keep)


@gluon.jit
def send_room(
    out_desc: gl.tensor, rooms: gl.shared_memory_descriptor, token: gl.tensor, head: gl.tensor,
    G: gl.constexpr, PART: gl.constexpr,
) -> None:  # fmt: skip
    """Rows that are whole tokens, written while the group goes on."""
    PIECES: gl.constexpr = rooms.shape[2] // 64
    pieces = token_pieces(rooms, G)
    for p in gl.static_range(PIECES):
        send_block(out_desc, [token, head, 64 * p], pieces.index(PART * PIECES + p))


@gluon.jit
def write_room(
    room: gl.shared_memory_descriptor,
    results: gl.tuple,
    token64: gl.tensor,
    head64: gl.tensor,
    keep: gl.tensor,
) -> None:
    """Write rows in lines of 16 bytes a thread."""
    out_ptr, _, out_token, out_head, _, _ = results
    D: gl.constexpr = room.shape[1]
    offsets = gl.convert_layout(token64 * out_token + head64 * out_head, gl.SliceLayout(1, TILE_COPY))
    mask = gl.convert_layout(keep, gl.SliceLayout(1, TILE_COPY))
    column = gl.arange(0, 64, gl.SliceLayout(0, TILE_COPY))
    for first in gl.static_range(0, D, 64):
        part = room.slice(first, 64, dim=1).load(TILE_COPY)
        gl.store(out_ptr + offsets[:, None] + (first + column)[None, :], part, mask=mask[:, None])


@gluon.jit
def store_lse(
    results: gl.tuple,
    row_max: gl.tensor,
    row_sum: gl.tensor,
    token64: gl.tensor,
    head64: gl.tensor,
    keep: gl.tensor,
) -> None:
    """Write natural LSEs, where they are wanted."""
    _, lse_ptr, _, _, lse_token, lse_head = results
    if lse_ptr is not None:
        total = gl.where(row_sum == 0.0, 1.0, row_sum)
        lse = gl.where(row_sum == 0.0, float("-inf"), (row_max + gl.log2(total)) * LN_2)
        gl.store(lse_ptr + token64 * lse_token + head64 * lse_head, lse, mask=keep)


@gluon.jit
def store_nothing(
    results: gl.tuple, place: gl.tuple, kv_head: gl.tensor, G: gl.constexpr, D: gl.constexpr,
    PART: gl.constexpr,
) -> None:  # fmt: skip
    """What rows without keys give."""
    out_ptr, _, out_token, out_head, _, _ = results
    begin, tokens, first, _, _ = place
    column = gl.arange(0, 64, gl.SliceLayout(0, TILE_COPY))
    row = first + PART * M + gl.arange(0, M, gl.SliceLayout(1, TILE_COPY))
    token, head64 = row // G, (kv_head * G + row % G).to(gl.int64)
    token64, keep = (begin + token).to(gl.int64), token < tokens
    zeros = gl.zeros([M, 64], out_ptr.dtype.element_ty, TILE_COPY)
    for first_column in gl.static_range(0, D, 64):
        rows = out_ptr + (token64 * out_token + head64 * out_head)[:, None]
        gl.store(rows + (first_column + column)[None, :], zeros, mask=keep[:, None])
    row_sum = gl.zeros([M], gl.float32, gl.SliceLayout(1, TILE_COPY))
    store_lse(results, row_sum, row_sum, token64, head64, keep)
