"""Prompts on Hopper GPUs (compute capability 9), in Gluon: paged attention of many query tokens a request.

A tile is 128 rows, the query heads of one kv head of consecutive tokens. There is a program for each
multiprocessor, and programs take tiles by turns, in three groups of warps:

- one copies keys and values to shared memory (TMA), up to two steps ahead of their use: from pages, or
  for requests without context from the new tokens' own, which lie one after the other;
- two compute 64 rows each. The scores of the next step are computed beside the weighted sum of this one's
  values, and the softmax of one group beside the products of the other.

Keys are visited from the last to the first: what must be masked, or is no key at all, comes first.

Legend: T tokens, H query heads, D head size, G query heads of a kv head, S block size, M = 64 rows, N keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_parts import LN_2, TILE_COPY, copy_queries, load_block, sync_group

M = gl.constexpr(64)
# Triton 3.6 has a method of a private name.
_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
ATTEND_REGISTERS, COPY_REGISTERS = 240, 24
"""Of a thread of the second and the third group; what they leave is the first's: as much as the second's."""


@gluon.jit
def find_request(
    starts_ptr: gl.tensor, tile: gl.tensor, num_requests: gl.tensor, G: gl.constexpr, WARPS: gl.constexpr
) -> gl.tuple:
    """(request, first row in it) of a tile; num_requests for tokens past the last request."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
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


@gluon.jit
def clear_behind(values: gl.shared_memory_descriptor, keys: gl.tensor) -> None:
    """Zeros in the rows from `keys`: they may hold NaN, and a weight of 0 times NaN is NaN."""
    N: gl.constexpr = values.shape[0]
    D: gl.constexpr = values.shape[1]
    row = gl.arange(0, N, gl.SliceLayout(1, TILE_COPY))
    for first in gl.static_range(0, D, 64):
        part = values.slice(first, 64, dim=1)
        found = part.load(TILE_COPY)
        part.store(gl.where((row < keys)[:, None], found, gl.zeros_like(found)))


@gluon.jit
def softmax_step(
    scores: gl.tensor,
    row_max: gl.tensor,
    row_sum: gl.tensor,
    first_key: gl.tensor,
    end_key: gl.tensor,
    scale: gl.tensor,
    MASKED: gl.constexpr,
) -> gl.tuple:
    """(weights, row_max, row_sum, factor of what was summed before); scale holds log2(e)."""
    LAYOUT: gl.constexpr = scores.type.layout
    if MASKED:
        N: gl.constexpr = scores.shape[1]
        key = first_key + gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(key[None, :] < end_key[:, None], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    # -inf minus -inf is NaN: a row that has seen no key yet subtracts 0.
    pivot = gl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = gl.exp2(scores * scale - pivot[:, None])
    shrink = gl.exp2(row_max - pivot)
    return weights, new_max, row_sum * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def release(free: gl.shared_memory_descriptor) -> None:
    """The group is done with a buffer: all of its warps are."""
    sync_group()
    mbarrier.arrive(free)


@gluon.jit
def start_scores(query: gl.shared_memory_descriptor, keys: gl.shared_memory_descriptor) -> gl.tensor:
    """The products of queries and keys, begun."""
    N: gl.constexpr = keys.shape[0]
    zeros = gl.zeros([M, N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))
    return warpgroup_mma(query, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def attend_steps(
    acc: gl.tensor,
    weights: gl.tensor,
    row_max: gl.tensor,
    row_sum: gl.tensor,
    query: gl.shared_memory_descriptor,
    buffers: gl.tuple,
    barriers: gl.tuple,
    done: gl.tensor,
    begin: gl.tensor,
    end: gl.tensor,
    top: gl.tensor,
    end_key: gl.tensor,
    scale: gl.tensor,
    MASKED: gl.constexpr,
) -> gl.tuple:
    """Steps from `begin` to `end`; `weights` are the step before's, not yet multiplied with its values."""
    _, keys, values = buffers
    k_full, k_free, v_full, v_free = barriers
    STAGES: gl.constexpr = keys.shape[0]
    N: gl.constexpr = keys.shape[1]
    VALUE: gl.constexpr = acc.type.layout
    WEIGHT: gl.constexpr = weights.type.layout
    for i in range(begin, end):
        stage, before = (done + i) % STAGES, (done + i - 1) % STAGES
        phase = (done + i - 1) // STAGES & 1
        mbarrier.wait(k_full.index(stage), (done + i) // STAGES & 1)
        scores = start_scores(query, keys.index(stage))
        mbarrier.wait(v_full.index(before), phase)
        acc = warpgroup_mma(weights, values.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        release(k_free.index(stage))
        new, row_max, row_sum, shrink = softmax_step(
            scores, row_max, row_sum, (top - i) * N, end_key, scale, MASKED
        )
        following = gl.convert_layout(new.to(keys.dtype), WEIGHT)
        # This wait is over already. ptxas moves no softmax behind it, as it does behind the next one: the
        # softmax is to run beside the product.
        mbarrier.wait(v_full.index(before), phase)
        acc, following = warpgroup_mma_wait(0, deps=[acc, following])
        release(v_free.index(before))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, VALUE))[:, None]
        weights = following
    return acc, weights, row_max, row_sum


@gluon.jit
def attend(
    queries: gl.tuple,
    buffers: gl.tuple,
    barriers: gl.tuple,
    results: gl.tuple,
    batch: gl.tuple,
    turns: gl.tensor,
    scale: gl.tensor,
    G: gl.constexpr,
    PART: gl.constexpr,
) -> None:
    """A group that computes: rows of each tile from PART * M on."""
    N: gl.constexpr = buffers[1].shape[1]
    done = 0
    for turn in range(turns):
        kv_head, _, rows, place = find_work(turn, batch, G, N, 4)
        top = place[4]
        if rows > 0:
            if top >= 0:
                attend_tile(queries, buffers, barriers, results, place, done, scale, kv_head, G, PART)
                done += top + 1
            else:
                store_nothing(results, place, kv_head, G, buffers[1].shape[2], PART)


@gluon.jit
def attend_tile(
    queries: gl.tuple,
    buffers: gl.tuple,
    barriers: gl.tuple,
    results: gl.tuple,
    place: gl.tuple,
    done: gl.tensor,
    scale: gl.tensor,
    kv_head: gl.tensor,
    G: gl.constexpr,
    PART: gl.constexpr,
) -> None:
    """One tile; `done` steps were before."""
    q_ptr, q_token, q_head = queries
    query, keys, values = buffers
    k_full, k_free, v_full, v_free = barriers
    begin, tokens, first, seq_len, top = place
    STAGES: gl.constexpr = keys.shape[0]
    N: gl.constexpr = keys.shape[1]
    D: gl.constexpr = keys.shape[2]
    dtype: gl.constexpr = keys.dtype
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    VALUE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, VALUE, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    query = query.index(PART)
    first += PART * M
    row = first + gl.arange(0, M, ROW)
    token, head64 = row // G, (kv_head * G + row % G).to(gl.int64)
    token64, keep = (begin + token).to(gl.int64), token < tokens
    # Keys before end_key are a row's own, those before all_see every row's.
    context = seq_len - tokens
    end_key = gl.where(keep, context + token + 1, 0)
    all_see = gl.maximum(context + first // G + 1, 0)
    masked = gl.minimum(gl.maximum(top + 1 - all_see // N, 1), top + 1)
    # The output of the tile before was read from there.
    sync_group()
    copy_queries(query, q_ptr, token64 * q_token + head64 * q_head, keep)
    fence_async_shared()
    sync_group()
    row_max = gl.full([M], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([M], gl.float32, ROW)
    acc = gl.zeros([M, D], gl.float32, VALUE)
    stage, phase = done % STAGES, done // STAGES & 1
    mbarrier.wait(k_full.index(stage), phase)
    scores = warpgroup_mma_wait(0, deps=[start_scores(query, keys.index(stage))])
    release(k_free.index(stage))
    if seq_len < (top + 1) * N:
        # Both groups do: they write the same.
        mbarrier.wait(v_full.index(stage), phase)
        clear_behind(values.index(stage), seq_len - top * N)
        fence_async_shared()
        sync_group()
    new, row_max, row_sum, _ = softmax_step(scores, row_max, row_sum, top * N, end_key, scale, True)
    weights = gl.convert_layout(new.to(dtype), WEIGHT)
    acc, weights, row_max, row_sum = attend_steps(
        acc, weights, row_max, row_sum, query, buffers, barriers, done, 1, masked, top, end_key, scale, True
    )
    acc, weights, row_max, row_sum = attend_steps(
        acc, weights, row_max, row_sum, query, buffers, barriers, done, masked, top + 1, top, end_key, scale,
        False,
    )  # fmt: skip
    stage, phase = (done + top) % STAGES, (done + top) // STAGES & 1
    mbarrier.wait(v_full.index(stage), phase)
    acc = warpgroup_mma(weights, values.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(v_free.index(stage))
    total = gl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, VALUE))[:, None]
    store_output(acc, query, results, token64, head64, keep)
    store_lse(results, row_max, row_sum, token64, head64, keep)


@gluon.jit
def store_output(
    acc: gl.tensor,
    room: gl.shared_memory_descriptor,
    results: gl.tuple,
    token64: gl.tensor,
    head64: gl.tensor,
    keep: gl.tensor,
) -> None:
    """Write rows by way of shared memory, from where they go in lines of 16 bytes a thread."""
    out_ptr, _, out_token, out_head, _, _ = results
    D: gl.constexpr = room.shape[1]
    room.store(acc.to(room.dtype))
    offsets = gl.convert_layout(token64 * out_token + head64 * out_head, gl.SliceLayout(1, TILE_COPY))
    mask = gl.convert_layout(keep, gl.SliceLayout(1, TILE_COPY))
    column = gl.arange(0, 64, gl.SliceLayout(0, TILE_COPY))
    sync_group()
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


@gluon.jit(
    do_not_specialize=[
        "num_tokens",
        "num_requests",
        "num_tiles",
        "kv_heads",
        "k_block",
        "v_block",
        "k_row",
        "v_row",
        "table_row",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "starts_ptr", "seq_lens_ptr", "table_ptr"],
)
def paged_hopper_kernel(
    k_desc: gl.tensor,
    v_desc: gl.tensor,
    new_k_desc: gl.tensor,
    new_v_desc: gl.tensor,
    q_ptr: gl.tensor,
    out_ptr: gl.tensor,
    lse_ptr: gl.tensor,
    starts_ptr: gl.tensor,
    seq_lens_ptr: gl.tensor,
    table_ptr: gl.tensor,
    scale: gl.tensor,
    q_token: gl.tensor,
    q_head: gl.tensor,
    out_token: gl.tensor,
    out_head: gl.tensor,
    lse_token: gl.tensor,
    lse_head: gl.tensor,
    table_row: gl.tensor,
    k_block: gl.tensor,
    k_row: gl.tensor,
    k_column: gl.tensor,
    v_block: gl.tensor,
    v_row: gl.tensor,
    v_column: gl.tensor,
    new_k_column: gl.tensor,
    new_v_column: gl.tensor,
    num_tokens: gl.tensor,
    num_requests: gl.tensor,
    num_tiles: gl.tensor,
    kv_heads: gl.tensor,
    G: gl.constexpr,
    S: gl.constexpr,
    D: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT: gl.constexpr,
    ATTEND_REGS: gl.constexpr,
    COPY_REGS: gl.constexpr,
) -> None:
    """k_desc, v_desc: a side of the cache as a matrix, in pieces of pages [P, 64]; new_k_desc, new_v_desc:
    the tokens' own, in blocks [N, D], or None. A kv head begins `row` rows and `column` columns after the one
    before it, a block `block` rows."""
    dtype: gl.constexpr = k_desc.dtype
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
    buffers = (
        gl.allocate_shared_memory(dtype, [2, M, D], Q_LAYOUT),
        gl.allocate_shared_memory(dtype, [STAGES, N, D], LAYOUT),
        gl.allocate_shared_memory(dtype, [STAGES, N, D], LAYOUT),
    )
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    sync_group()
    barriers = (k_full, k_free, v_full, v_free)
    batch = (starts_ptr, seq_lens_ptr, num_tokens, num_requests, num_tiles, kv_heads)
    turns = (num_tiles * kv_heads + gl.num_programs(0) - 1) // gl.num_programs(0)
    queries = (q_ptr, q_token, q_head)
    results = (out_ptr, lse_ptr, out_token, out_head, lse_token, lse_head)
    gl.warp_specialize(
        [
            (attend, (queries, buffers, barriers, results, batch, turns, scale, G, 0)),
            (attend, (queries, buffers, barriers, results, batch, turns, scale, G, 1)),
            (
                copy_keys,
                (
                    (new_k_desc, new_v_desc), (k_desc, v_desc), table_ptr, table_row, buffers, barriers,
                    batch, turns, (new_k_column, new_v_column),
                    (k_block, k_row, k_column, v_block, v_row, v_column), G, S,
                ),
            ),
        ],
        [4, 1],
        [ATTEND_REGS, COPY_REGS],
    )  # fmt: skip
