"""Prompts on Hopper GPUs (compute capability 9), in Gluon: paged attention of many query tokens a request.

A tile is 128 rows, the query heads of one kv head of consecutive tokens. There is a program for each
multiprocessor, which takes the next tile when it is done with one, in three groups of warps:

- one copies queries, keys and values to shared memory (TMA), keys as far ahead of their use as there is room:
  from pages, or for requests without context from the new tokens' own, which lie one after the other;
- two compute 64 rows each. The scores of the next step are computed beside the weighted sum of this one's
  values, and the softmax of one group beside the products of the other.

Or a tile is 64 rows, one group computes, and several programs share a multiprocessor: for heads of 64, whose
short requests have tiles of few steps, it is the first and the last of these that are to run beside others.

Keys are visited from the last to the first: what must be masked, or is no key at all, comes first.

Legend: T tokens, H query heads, D head size, G query heads of a kv head, S block size, M = 64 rows, N keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_parts import TILE_COPY, sync_group
from .paged_hopper_copy import copy_tiles
from .paged_hopper_store import store_nothing, store_tile
from .paged_hopper_turns import ROOM, SLOTS, M, hear

# The names of later versions than 3.6, and of that.
_is_later = hasattr(async_copy, "async_load")
copy_lines = async_copy.async_load if _is_later else async_copy.async_copy_global_to_shared


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
    keys: gl.shared_memory_descriptor,
    values: gl.shared_memory_descriptor,
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
def attend(parts: gl.tuple, G: gl.constexpr, PART: gl.constexpr, HOLDS: gl.constexpr) -> None:
    """A group that computes: rows of each tile from PART * M on."""
    queries, out_desc, buffers, barriers, q_barriers, board, results, scale = parts
    rooms, keys, values, out_rooms = buffers
    q_desc, q_ptr, q_token, q_head = queries
    N: gl.constexpr = keys.shape[1]
    D: gl.constexpr = keys.shape[2]
    # One place alone: with two by turns, ptxas 12.8 used descriptors that it had set in a loop it skipped.
    room = rooms.index(PART)
    VALUE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    done, turn, tiles = 0, 0, 0
    rows, kv_head, place = hear(board, turn)
    while rows > 0:
        top = place[4]
        if top >= 0:
            if q_desc is None:
                sync_group()  # The output of the tile before was read from there.
                copy_queries(room, (q_ptr, q_token, q_head), place, kv_head, G, PART)
            else:
                mbarrier.wait(q_barriers[0], tiles & 1)
            if HOLDS:
                query = room.load(
                    gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]), 2)
                )
                if q_desc is not None:
                    release(q_barriers[1])
            else:
                query = room
            weights, row_max, row_sum = start_tile(query, keys, values, barriers, place, done, scale, G, PART)
            end_key, all_see = key_limits(place, G, PART, N)
            masked = gl.minimum(gl.maximum(top + 1 - all_see // N, 1), top + 1)
            acc = gl.zeros([M, D], gl.float32, VALUE)
            acc, weights, row_max, row_sum = attend_steps(
                acc, weights, row_max, row_sum, query, keys, values, barriers, done, 1, masked, top, end_key,
                scale, True,
            )  # fmt: skip
            acc, weights, row_max, row_sum = attend_steps(
                acc, weights, row_max, row_sum, query, keys, values, barriers, done, masked, top + 1, top,
                end_key, scale, False,
            )  # fmt: skip
            if not HOLDS:  # noqa: SIM102 (Triton wants them apart)
                if q_desc is not None:
                    release(q_barriers[1])
            acc = add_values(acc, weights, values, barriers, done + top)
            done += top + 1
            tiles += 1
            store_tile(acc, row_max, row_sum, out_rooms, out_desc, results, place, kv_head, G, PART)
        else:
            store_nothing(results, place, kv_head, G, D, PART)
        turn += 1
        rows, kv_head, place = hear(board, turn)
    if out_desc is not None:
        tma.store_wait(0)


@gluon.jit
def copy_queries(
    query: gl.shared_memory_descriptor,
    queries: gl.tuple,
    place: gl.tuple,
    kv_head: gl.tensor,
    G: gl.constexpr,
    PART: gl.constexpr,
) -> None:
    """A group's queries to shared memory; rows behind the request repeat its last token."""
    q_ptr, q_token, q_head = queries
    begin, tokens, first, _, _ = place
    D: gl.constexpr = query.shape[1]
    row = first + PART * M + gl.arange(0, M, gl.SliceLayout(1, TILE_COPY))
    token = gl.minimum(row // G, gl.maximum(tokens - 1, 0))
    offsets = (begin + token).to(gl.int64) * q_token + (kv_head * G + row % G).to(gl.int64) * q_head
    column = gl.arange(0, 64, gl.SliceLayout(0, TILE_COPY))
    for start in gl.static_range(0, D, 64):
        pointers = q_ptr + offsets[:, None] + (start + column)[None, :]
        copy_lines(query.slice(start, 64, dim=1), pointers)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    sync_group()


@gluon.jit
def key_limits(place: gl.tuple, G: gl.constexpr, PART: gl.constexpr, N: gl.constexpr) -> gl.tuple:
    """(end_key, all_see): keys before end_key are a row's own, those before all_see every row's."""
    _, tokens, first, seq_len, _ = place
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))
    context = seq_len - tokens
    token = (first + PART * M + gl.arange(0, M, ROW)) // G
    end_key = gl.where(token < tokens, context + token + 1, 0)
    return end_key, gl.maximum(context + (first + PART * M) // G + 1, 0)


@gluon.jit
def first_weights(
    scores: gl.tensor, place: gl.tuple, scale: gl.tensor, G: gl.constexpr, PART: gl.constexpr,
    D: gl.constexpr, dtype: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """(weights, row_max, row_sum) of a tile's first step."""
    N: gl.constexpr = scores.shape[1]
    VALUE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    end_key, _ = key_limits(place, G, PART, N)
    row_max = gl.full([M], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([M], gl.float32, ROW)
    new, row_max, row_sum, _ = softmax_step(scores, row_max, row_sum, place[4] * N, end_key, scale, True)
    return gl.convert_layout(new.to(dtype), gl.DotOperandLayout(0, VALUE, 2)), row_max, row_sum


@gluon.jit
def clear_last_values(
    values: gl.shared_memory_descriptor, barriers: gl.tuple, place: gl.tuple, done: gl.tensor
) -> None:
    """What is behind a request's last key, in a tile's first step. Both groups do: they write the same."""
    N: gl.constexpr = values.shape[1]
    STAGES: gl.constexpr = values.shape[0]
    _, _, _, seq_len, top = place
    if seq_len < (top + 1) * N:
        mbarrier.wait(barriers[2].index(done % STAGES), done // STAGES & 1)
        clear_behind(values.index(done % STAGES), seq_len - top * N)
        fence_async_shared()
        sync_group()


@gluon.jit
def start_tile(
    query: gl.shared_memory_descriptor,
    keys: gl.shared_memory_descriptor,
    values: gl.shared_memory_descriptor,
    barriers: gl.tuple,
    place: gl.tuple,
    done: gl.tensor,
    scale: gl.tensor,
    G: gl.constexpr,
    PART: gl.constexpr,
) -> gl.tuple:
    """(weights, row_max, row_sum) of a tile's first step; `done` steps were before."""
    k_full, k_free, _, _ = barriers
    STAGES: gl.constexpr = keys.shape[0]
    mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1)
    scores = warpgroup_mma_wait(0, deps=[start_scores(query, keys.index(done % STAGES))])
    release(k_free.index(done % STAGES))
    clear_last_values(values, barriers, place, done)
    return first_weights(scores, place, scale, G, PART, keys.shape[2], keys.dtype)


@gluon.jit
def add_values(
    acc: gl.tensor, weights: gl.tensor, values: gl.shared_memory_descriptor, barriers: gl.tuple,
    done: gl.tensor,
) -> gl.tensor:  # fmt: skip
    """The weighted sum of a tile's last step added."""
    _, _, v_full, v_free = barriers
    STAGES: gl.constexpr = values.shape[0]
    mbarrier.wait(v_full.index(done % STAGES), done // STAGES & 1)
    acc = warpgroup_mma(weights, values.index(done % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(v_free.index(done % STAGES))
    return acc


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
    do_not_specialize_on_alignment=["counter_ptr", "lse_ptr", "starts_ptr", "seq_lens_ptr", "table_ptr"],
)
def paged_hopper_kernel(
    k_desc: gl.tensor,
    v_desc: gl.tensor,
    new_k_desc: gl.tensor,
    new_v_desc: gl.tensor,
    q_desc: gl.tensor,
    out_desc: gl.tensor,
    counter_ptr: gl.tensor,
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
    GROUPS: gl.constexpr,
    HOLDS: gl.constexpr,
    ATTEND_REGS: gl.constexpr,
    COPY_REGS: gl.constexpr,
) -> None:
    """k_desc, v_desc: a side of the cache as a matrix, in pieces of pages [P, 64]; new_k_desc, new_v_desc:
    the tokens' own, in blocks [N, D], or None. A kv head begins `row` rows and `column` columns after the one
    before it, a block `block` rows."""
    dtype: gl.constexpr = k_desc.dtype
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
    rooms = gl.allocate_shared_memory(dtype, [GROUPS, M, D], Q_LAYOUT)
    keys = gl.allocate_shared_memory(dtype, [STAGES, N, D], LAYOUT)
    values = gl.allocate_shared_memory(dtype, [STAGES, N, D], LAYOUT)
    out_rooms = rooms
    if q_desc is not None:
        out_rooms = gl.allocate_shared_memory(dtype, [GROUPS, M, D], Q_LAYOUT)
    barriers = (
        new_barriers(STAGES, 1), new_barriers(STAGES, GROUPS),
        new_barriers(STAGES, 1), new_barriers(STAGES, GROUPS),
    )  # fmt: skip
    q_barriers = (new_barriers(1, 1).index(0), new_barriers(1, GROUPS).index(0))
    notes = gl.allocate_shared_memory(gl.int32, [ROOM, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    board = (notes, new_barriers(SLOTS, 1), new_barriers(SLOTS, GROUPS))
    sync_group()
    batch = (starts_ptr, seq_lens_ptr, num_tokens, num_requests, num_tiles, kv_heads)
    buffers = (rooms, keys, values, out_rooms)
    queries = (q_desc, q_ptr, q_token, q_head)
    results = (out_ptr, lse_ptr, out_token, out_head, lse_token, lse_head)
    of_group = (queries, out_desc, buffers, barriers, q_barriers, board, results, scale)
    of_copy = (
        q_desc, (new_k_desc, new_v_desc), (k_desc, v_desc), table_ptr, table_row, counter_ptr, buffers,
        barriers, q_barriers, board, batch, (new_k_column, new_v_column),
        (k_block, k_row, k_column, v_block, v_row, v_column),
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize(
            [(attend, (of_group, G, 0, HOLDS)), (copy_tiles, (of_copy, G, S))], [1], [COPY_REGS]
        )
    else:
        gl.warp_specialize(
            [
                (attend, (of_group, G, 0, HOLDS)), (attend, (of_group, G, 1, HOLDS)),
                (copy_tiles, (of_copy, G, S)),
            ],
            [4, 1],
            [ATTEND_REGS, COPY_REGS],
        )  # fmt: skip


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr) -> gl.shared_memory_descriptor:
    """Barriers that as many groups arrive at."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers
