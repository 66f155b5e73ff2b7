"""What `paged_hopper` works on, tile by tile, and the group of warps that copies its keys and values.

Legend: T tokens, H query heads, D head size, G query heads of a kv head, S block size, M = 64 rows of a
group, of which a tile has two, N keys of a step, P keys of a page in one copy.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_parts import load_block

M = gl.constexpr(64)
# Triton 3.6 has a method of a private name.
_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def find_request(
    starts_ptr: gl.tensor, tile: gl.tensor, num_requests: gl.tensor, G: gl.constexpr, WARPS: gl.constexpr
) -> gl.tuple:
    """(request, first row in it) of a tile; num_requests for tokens past the last request."""
    # Every warp counts all requests: nothing is exchanged between warps.
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    count = 0
    for start in range(0, num_requests + 1, 128):
        request = start + gl.arange(0, 128, LANES)
        inside = request <= num_requests
        first = gl.load(starts_ptr + request, mask=inside, other=0) * G // (2 * M) + request
        count += gl.sum((inside & (first <= tile)).to(gl.int32), 0)
    request = count - 1
    return request, (tile - (gl.load(starts_ptr + request) * G // (2 * M) + request)) * (2 * M)


@gluon.jit
def find_work(
    turn: gl.tensor, batch: gl.tuple, G: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr
) -> gl.tuple:
    """(kv head, place) of this program's work in a turn; no rows where there is none.

    The last tile of a prompt sees the most keys: it comes first. Programs take turns in reversed order, so
    that each gets about as many keys.
    """
    starts_ptr, seq_lens_ptr, num_tokens, num_requests, num_tiles, kv_heads = batch
    program, programs = gl.program_id(0), gl.num_programs(0)
    work = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    exists = work < num_tiles * kv_heads
    tile = gl.where(exists, num_tiles - 1 - work // kv_heads, 0)
    request, first = find_request(starts_ptr, tile, num_requests, G, WARPS)
    real = request < num_requests
    begin = gl.load(starts_ptr + request)
    end = gl.load(starts_ptr + request + 1, mask=real, other=0)
    seq_len = gl.load(seq_lens_ptr + request, mask=real, other=0)
    tokens = gl.where(exists, gl.where(real, end, num_tokens) - begin, 0)
    last_token = (gl.minimum(first + 2 * M, tokens * G) - 1) // G
    top = (gl.maximum(seq_len - tokens + last_token + 1, 0) + N - 1) // N - 1
    rows = gl.minimum(gl.maximum(tokens * G - first, 0), 2 * M)
    return work % kv_heads, request, rows, (begin, tokens, first, seq_len, top)


@gluon.jit
def in_pieces(buffers: gl.shared_memory_descriptor, P: gl.constexpr) -> gl.shared_memory_descriptor:
    """Buffers [STAGES, N, D] as pieces [P, 64], one after the other by stage, columns and keys."""
    COUNT: gl.constexpr = buffers.shape[0] * (buffers.shape[1] // P) * (buffers.shape[2] // 64)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([P, 64], buffers.dtype)
    if _IS_PUBLIC:
        return buffers.reinterpret(buffers.dtype, [COUNT, P, 64], LAYOUT)
    else:  # noqa: RET505 (Triton wants both branches)
        return buffers._reinterpret(buffers.dtype, [COUNT, P, 64], LAYOUT)


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
    _, keys, values = buffers
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
    _, keys, values = buffers
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
def copy_keys(
    own_descs: gl.tuple,
    descs: gl.tuple,
    table_ptr: gl.tensor,
    table_row: gl.tensor,
    buffers: gl.tuple,
    barriers: gl.tuple,
    batch: gl.tuple,
    turns: gl.tensor,
    own_columns: gl.tuple,
    strides: gl.tuple,
    G: gl.constexpr,
    S: gl.constexpr,
) -> None:
    """The group that copies."""
    N: gl.constexpr = buffers[1].shape[1]
    k_block, k_row, k_column, v_block, v_row, v_column = strides
    done = 0
    for turn in range(turns):
        kv_head, request, rows, place = find_work(turn, batch, G, N, 1)
        begin, tokens, _, seq_len, top = place
        if (rows > 0) & (top >= 0):
            table = table_ptr + request.to(gl.int64) * table_row
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
            done += top + 1
