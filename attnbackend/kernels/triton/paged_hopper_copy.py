"""The warp of `paged_hopper` that takes tiles and copies their queries, keys and values.

Legend: T tokens, H query heads, D head size, G query heads of a kv head, S block size, M = 64 rows of a
group, of which a tile has two, N keys of a step, P keys of a page in one copy.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_parts import load_block, seen_as, token_pieces
from .paged_hopper_turns import M, announce, find_work, take


@gluon.jit
def in_pieces(buffers: gl.shared_memory_descriptor, P: gl.constexpr) -> gl.shared_memory_descriptor:
    """Buffers [STAGES, N, D] as pieces [P, 64], one after the other by stage, columns and keys."""
    COUNT: gl.constexpr = buffers.shape[0] * (buffers.shape[1] // P) * (buffers.shape[2] // 64)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([P, 64], buffers.dtype)
    return seen_as(buffers, [COUNT, P, 64], LAYOUT)


@gluon.jit
def page_rows(
    table_ptr: gl.tensor,
    step: gl.tensor,
    last_key: gl.tensor,
    block_rows: gl.tensor,
    S: gl.constexpr,
    P: gl.constexpr,
    N: gl.constexpr,
) -> gl.tuple:
    """Rows of the cache, taken as a matrix, where the pieces of a step begin; behind the last key any."""
    rows: gl.tuple = ()
    for j in gl.static_range(N // P):
        key = gl.minimum(step * N + j * P, last_key)
        row = gl.load(table_ptr + key // S) * block_rows + key % S // P * P
        rows = rows + (row,)  # noqa: RUF005 (Triton takes no starred tuple)
    return rows


@gluon.jit
def copy_pages(
    descs: gl.tuple,
    table_ptr: gl.tensor,
    buffers: gl.tuple,
    barriers: gl.tuple,
    done: gl.tensor,
    top: gl.tensor,
    last_key: gl.tensor,
    strides: gl.tuple,
    S: gl.constexpr,
) -> None:
    """Keys from the last to the first, of a request with context; `done` steps were before."""
    _, keys, values, _ = buffers
    k_full, k_free, v_full, v_free = barriers
    k_desc, v_desc = descs
    k_block, k_row, k_column, v_block, v_row, v_column = strides
    STAGES: gl.constexpr = keys.shape[0]
    N: gl.constexpr = keys.shape[1]
    D: gl.constexpr = keys.shape[2]
    P: gl.constexpr = k_desc.block_shape[0]
    PIECES: gl.constexpr = N // P * (D // 64)
    k_pieces, v_pieces = in_pieces(keys, P), in_pieces(values, P)
    for i in range(top + 1):
        stage, phase = (done + i) % STAGES, (done + i) // STAGES & 1 ^ 1
        k_rows = page_rows(table_ptr, top - i, last_key, k_block, S, P, N)
        v_rows = page_rows(table_ptr, top - i, last_key, v_block, S, P, N)
        mbarrier.wait(k_free.index(stage), phase)
        full = k_full.index(stage)
        mbarrier.expect(full, N * D * 2)
        for j in gl.static_range(N // P):
            for p in gl.static_range(D // 64):
                piece = k_pieces.index(stage * PIECES + p * (N // P) + j)
                load_block(k_desc, [k_rows[j] + k_row, k_column + 64 * p], full, piece)
        mbarrier.wait(v_free.index(stage), phase)
        full = v_full.index(stage)
        mbarrier.expect(full, N * D * 2)
        for j in gl.static_range(N // P):
            for p in gl.static_range(D // 64):
                piece = v_pieces.index(stage * PIECES + p * (N // P) + j)
                load_block(v_desc, [v_rows[j] + v_row, v_column + 64 * p], full, piece)


@gluon.jit
def copy_own(
    descs: gl.tuple,
    buffers: gl.tuple,
    barriers: gl.tuple,
    done: gl.tensor,
    top: gl.tensor,
    begin: gl.tensor,
    k_column: gl.tensor,
    v_column: gl.tensor,
) -> None:
    """As `copy_pages`, of a request without context: the keys are the tokens' own from `begin` on."""
    _, keys, values, _ = buffers
    k_full, k_free, v_full, v_free = barriers
    k_desc, v_desc = descs
    STAGES: gl.constexpr = keys.shape[0]
    N: gl.constexpr = keys.shape[1]
    for i in range(top + 1):
        stage, phase = (done + i) % STAGES, (done + i) // STAGES & 1 ^ 1
        row = begin + (top - i) * N
        mbarrier.wait(k_free.index(stage), phase)
        full = k_full.index(stage)
        mbarrier.expect(full, k_desc.block_type.nbytes)
        load_block(k_desc, [row, k_column], full, keys.index(stage))
        mbarrier.wait(v_free.index(stage), phase)
        full = v_full.index(stage)
        mbarrier.expect(full, v_desc.block_type.nbytes)
        load_block(v_desc, [row, v_column], full, values.index(stage))


@gluon.jit
def copy_tile_queries(
    q_desc: gl.tensor, rooms: gl.shared_memory_descriptor, q_barriers: gl.tuple, tiles: gl.tensor,
    place: gl.tuple, kv_head: gl.tensor, G: gl.constexpr,
) -> None:  # fmt: skip
    """All groups' queries, when those of the tile before have been read; `tiles` were before."""
    full, free = q_barriers
    begin, _, first, _, _ = place
    GROUPS: gl.constexpr = rooms.shape[0]
    D: gl.constexpr = rooms.shape[2]
    pieces = token_pieces(rooms, G)
    mbarrier.wait(free, tiles & 1 ^ 1)
    mbarrier.expect(full, GROUPS * M * D * 2)
    for part in gl.static_range(GROUPS):
        for p in gl.static_range(D // 64):
            token = begin + first // G + part * (M // G)
            load_block(q_desc, [token, kv_head * G, 64 * p], full, pieces.index(part * (D // 64) + p))


@gluon.jit
def copy_tiles(parts: gl.tuple, G: gl.constexpr, S: gl.constexpr) -> None:
    """The warp that copies."""
    q_desc, own_descs, descs, table_ptr, table_row, counter_ptr, buffers, barriers, q_barriers = parts[:9]
    board, batch, own_columns, strides = parts[9:]
    N: gl.constexpr = buffers[1].shape[1]
    ROWS: gl.constexpr = buffers[0].shape[0] * M
    _, _, _, _, num_tiles, kv_heads = batch
    done, turn, tiles = 0, 0, 0
    work = gl.program_id(0)
    while work < num_tiles * kv_heads:
        kv_head, request, rows, place = find_work(work, batch, G, N, ROWS)
        begin, tokens, first, seq_len, top = place
        if rows > 0:
            announce(board, turn, (rows, kv_head, begin, tokens, first, seq_len, top))
            turn += 1
            if top >= 0:
                if q_desc is not None:
                    copy_tile_queries(q_desc, buffers[0], q_barriers, tiles, place, kv_head, G)
                table = table_ptr + request.to(gl.int64) * table_row
                copy_tile_keys(
                    own_descs, descs, table, buffers, barriers, done, place, kv_head, own_columns, strides, S
                )
                tiles += 1
                done += top + 1
        work = take(counter_ptr) + gl.num_programs(0)
    announce(board, turn, (0, 0, 0, 0, 0, 0, 0))


@gluon.jit
def copy_tile_keys(
    own_descs: gl.tuple,
    descs: gl.tuple,
    table: gl.tensor,
    buffers: gl.tuple,
    barriers: gl.tuple,
    done: gl.tensor,
    place: gl.tuple,
    kv_head: gl.tensor,
    own_columns: gl.tuple,
    strides: gl.tuple,
    S: gl.constexpr,
) -> None:
    """Keys and values of a tile; `done` steps were before."""
    begin, tokens, _, seq_len, top = place
    k_block, k_row, k_column, v_block, v_row, v_column = strides
    own = (kv_head * k_row, kv_head * k_column, kv_head * v_row, kv_head * v_column)
    head_strides = (k_block, own[0], own[1], v_block, own[2], own[3])
    if own_descs[0] is None:
        copy_pages(descs, table, buffers, barriers, done, top, seq_len - 1, head_strides, S)
    else:
        if seq_len == tokens:
            columns = (kv_head * own_columns[0], kv_head * own_columns[1])
            copy_own(own_descs, buffers, barriers, done, top, begin, columns[0], columns[1])
        else:
            copy_pages(descs, table, buffers, barriers, done, top, seq_len - 1, head_strides, S)
