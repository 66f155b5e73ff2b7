"""Attention of absorbed queries to a latent cache on Hopper GPUs (compute capability 9), in Gluon.

A program takes 64 rows (`mla_rows`) and one split of their keys, 64 at a time, in three groups of warps:

- one computes scores and softmax; it keeps most of the queries in registers, which leaves shared memory
  for three steps of latents, and begins the next step's scores before it hands weights over;
- two compute the left and the right half of the output, and copy those halves of the latents (TMA) as soon
  as they are done with what was there. A step's product waits for the next step's scores: it fills the
  tensor cores while these become weights.

Keys are visited from the last to the first: what must be masked, or is no key at all, comes first, before
accumulators fill the registers.

Legend: T tokens, H heads, L kv_lora_rank, R qk_rope_head_dim, S block size, M = 64 rows, N = 64 keys.
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
from .mla_hopper_launch import KEYS, ROWS

VALUE_REGISTERS = 160
"""Of a thread that holds output; what they leave is the other group's."""
M, N, STAGES = gl.constexpr(ROWS), gl.constexpr(KEYS), gl.constexpr(3)
SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, SCORE.value, 2))
SCORE_ROW = gl.constexpr(gl.SliceLayout(1, SCORE.value))
VALUE_ROW = gl.constexpr(gl.SliceLayout(1, VALUE.value))
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def find_request(
    starts_ptr: gl.tensor, tile: gl.tensor, num_requests: gl.tensor, H: gl.constexpr
) -> gl.tuple:
    """As `mla_rows.find_request`."""
    SLACK: gl.constexpr = 0 if H % M == 0 else 1
    count = 0
    for first in range(0, num_requests + 1, 128):
        request = first + gl.arange(0, 128, LANES)
        inside = request <= num_requests
        start = gl.load(starts_ptr + request, mask=inside, other=0) * H // M + request * SLACK
        count += gl.sum((inside & (start <= tile)).to(gl.int32), 0)
    request = count - 1
    return request, tile - (gl.load(starts_ptr + request) * H // M + request * SLACK)


@gluon.jit
def block_row(table_ptr: gl.tensor, step: gl.tensor, block_rows: gl.tensor, S: gl.constexpr) -> gl.tensor:
    """The row of the cache, taken as a matrix, that holds the first key of a step."""
    key = step * N
    return gl.load(table_ptr + key // S) * block_rows + key % S


@gluon.jit
def copy_half(
    desc: gl.tensor, row: gl.tensor, first: gl.constexpr, full: gl.tensor, latents: gl.tensor, real: gl.tensor
) -> None:
    """Begin to copy one half of a block's latents, or its rotated keys, if `real`."""
    mbarrier.expect(full, desc.block_type.nbytes, pred=real)
    load_block(desc, [row, first], full, latents, pred=real)


@gluon.jit
def clear_behind(latents: gl.shared_memory_descriptor, keys: gl.tensor) -> None:
    """Zeros in the rows from `keys`: they may hold NaN, and a weight of 0 times NaN is NaN."""
    WIDTH: gl.constexpr = latents.shape[1]
    row = gl.arange(0, N, gl.SliceLayout(1, TILE_COPY))
    for first in gl.static_range(0, WIDTH, 64):
        part = latents.slice(first, 64, dim=1)
        values = part.load(TILE_COPY)
        part.store(gl.where((row < keys)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def load_queries(ptr: gl.tensor, offsets: gl.tensor, keep: gl.tensor, first: gl.constexpr) -> gl.tensor:
    """64 columns of the rows of queries as a product takes them from registers, zeros where not `keep`."""
    offsets = gl.convert_layout(offsets, gl.SliceLayout(1, OPERAND))
    mask = gl.convert_layout(keep, gl.SliceLayout(1, OPERAND))
    column = first + gl.arange(0, 64, gl.SliceLayout(0, OPERAND))
    return gl.load(ptr + offsets[:, None] + column[None, :], mask=mask[:, None], other=0.0)


@gluon.jit
def start_scores(
    queries: gl.tuple, q_shared: gl.tensor, buffers: gl.tuple, barriers: gl.tuple, i: gl.tensor
) -> gl.tensor:
    """The product of queries and keys of step i, begun."""
    left, right, rope, _, _, _ = buffers
    left_full, right_full, rope_full, _, _, _, _ = barriers
    stage, phase = i % STAGES, i // STAGES & 1
    scores = gl.zeros([M, N], gl.float32, SCORE)
    mbarrier.wait(left_full.index(stage), phase)
    for k in gl.static_range(4):
        keys = left.index(stage).slice(64 * k, 64, dim=1).permute((1, 0))
        scores = warpgroup_mma(queries[k], keys, scores, use_acc=k != 0, is_async=True)
    mbarrier.wait(right_full.index(stage), phase)
    for k in gl.static_range(3):
        keys = right.index(stage).slice(64 * k, 64, dim=1).permute((1, 0))
        scores = warpgroup_mma(queries[4 + k], keys, scores, is_async=True)
    keys = right.index(stage).slice(192, 64, dim=1).permute((1, 0))
    scores = warpgroup_mma(q_shared.index(0), keys, scores, is_async=True)
    mbarrier.wait(rope_full, i & 1)
    return warpgroup_mma(q_shared.index(1), rope.permute((1, 0)), scores, is_async=True)


@gluon.jit
def softmax_step(
    scores: gl.tensor,
    row_max: gl.tensor,
    row_sum: gl.tensor,
    step: gl.tensor,
    end_key: gl.tensor,
    all_see: gl.tensor,
    scale: gl.tensor,
) -> gl.tuple:
    """(weights, row_max, row_sum, factor of what was summed before); scale holds log2(e)."""
    if (step + 1) * N > all_see:
        key = step * N + gl.arange(0, N, gl.SliceLayout(0, SCORE))
        scores = gl.where(key[None, :] < end_key[:, None], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    # -inf minus -inf is NaN: a row that has seen no key yet subtracts 0.
    pivot = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(scores * scale - pivot[:, None])
    shrink = gl.exp2(row_max - pivot)
    return weights, new_max, row_sum * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def hand_factors(shrink: gl.tensor, buffers: gl.tuple, barriers: gl.tuple, i: gl.tensor) -> None:
    """Factors of step i to the groups of values, ahead of its weights."""
    _, _, _, _, factors, _ = buffers
    _, _, _, factors_full, _, _, _ = barriers
    factors.index(i & 1).store(shrink)
    sync_group()
    mbarrier.arrive(factors_full.index(i & 1))


@gluon.jit
def hand_weights(weights: gl.tensor, buffers: gl.tuple, barriers: gl.tuple, i: gl.tensor) -> None:
    """Weights of step i to where the groups of values read them, once they are done with the last.

    They are told with the scores of step i + 1.
    """
    _, _, _, weights_shared, _, _ = buffers
    _, _, _, _, _, weights_free, _ = barriers
    mbarrier.wait(weights_free, i & 1 ^ 1)
    weights_shared.store(weights)
    fence_async_shared()


@gluon.jit
def store_half(
    acc: gl.tensor,
    results: gl.tuple,
    token64: gl.tensor,
    head64: gl.tensor,
    keep: gl.tensor,
    split: gl.tensor,
    num_splits: gl.tensor,
    H: gl.constexpr,
    FIRST: gl.constexpr,
) -> None:
    """Write one half of the output, or of a part of it that will be merged."""
    out_ptr, _, partial_ptr, out_token, out_head, _, _, _ = results
    HALF: gl.constexpr = acc.shape[1]
    column = FIRST + gl.arange(0, HALF, gl.SliceLayout(0, VALUE))
    if partial_ptr is None:
        rows = out_ptr + (token64 * out_token + head64 * out_head)[:, None]
        gl.store(rows + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=keep[:, None])
    else:
        rows = partial_ptr + (((token64 * H + head64) * num_splits + split) * (2 * HALF))[:, None]
        gl.store(rows + column[None, :], acc, mask=keep[:, None])


@gluon.jit
def store_state(
    row_max: gl.tensor,
    row_sum: gl.tensor,
    results: gl.tuple,
    token64: gl.tensor,
    head64: gl.tensor,
    keep: gl.tensor,
    split: gl.tensor,
    num_splits: gl.tensor,
    H: gl.constexpr,
    L: gl.constexpr,
) -> None:
    """Write the LSE, or the softmax state of a part as `partials` has it."""
    _, lse_ptr, partial_ptr, _, _, lse_token, lse_head, num_tokens = results
    if partial_ptr is None:
        if lse_ptr is not None:
            total = gl.where(row_sum == 0.0, 1.0, row_sum)
            lse = gl.where(row_sum == 0.0, float("-inf"), (row_max + gl.log2(total)) * LN_2)
            gl.store(lse_ptr + token64 * lse_token + head64 * lse_head, lse, mask=keep)
    else:
        part = (token64 * H + head64) * num_splits + split
        states = partial_ptr + num_tokens.to(gl.int64) * (H * L) * num_splits
        gl.store(states + part, row_max, mask=keep)
        gl.store(states + num_tokens.to(gl.int64) * H * num_splits + part, row_sum, mask=keep)


@gluon.jit
def attend_scores(
    queries: gl.tuple,
    buffers: gl.tuple,
    barriers: gl.tuple,
    span: gl.tuple,
    scale: gl.tensor,
    q_shared: gl.tensor,
    H: gl.constexpr,
) -> None:
    """The group that computes scores and softmax."""
    ql_ptr, qr_ptr, ql_token, ql_head, qr_token, qr_head = queries
    _, _, _, _, _, states = buffers
    _, _, _, _, scores_done, _, last_full = barriers
    begin, tokens, first, seq_len, top, steps = span
    row = first + gl.arange(0, M, SCORE_ROW)
    token, head64 = row // H, (row % H).to(gl.int64)
    token64, keep = (begin + token).to(gl.int64), token < tokens
    # Keys before end_key are a row's own, those before all_see every row's.
    end_key = gl.where(keep, seq_len - tokens + token + 1, 0)
    all_see = seq_len - tokens + first // H + 1
    offsets = token64 * ql_token + head64 * ql_head
    copy_queries(q_shared.index(1), qr_ptr, token64 * qr_token + head64 * qr_head, keep)
    copy_queries(q_shared.index(0), ql_ptr + 448, offsets, keep)
    parts = (
        load_queries(ql_ptr, offsets, keep, 0),
        load_queries(ql_ptr, offsets, keep, 64),
        load_queries(ql_ptr, offsets, keep, 128),
        load_queries(ql_ptr, offsets, keep, 192),
        load_queries(ql_ptr, offsets, keep, 256),
        load_queries(ql_ptr, offsets, keep, 320),
        load_queries(ql_ptr, offsets, keep, 384),
    )
    fence_async_shared()
    sync_group()
    row_max = gl.full([M], float("-inf"), gl.float32, SCORE_ROW)
    row_sum = gl.zeros([M], gl.float32, SCORE_ROW)
    scores = warpgroup_mma_wait(0, deps=[start_scores(parts, q_shared, buffers, barriers, 0)])
    sync_group()
    mbarrier.arrive(scores_done)
    for i in range(steps - 1):
        weights, row_max, row_sum, shrink = softmax_step(
            scores, row_max, row_sum, top - i, end_key, all_see, scale
        )
        hand_factors(shrink, buffers, barriers, i)
        weights16 = weights.to(q_shared.dtype)
        started = start_scores(parts, q_shared, buffers, barriers, i + 1)
        hand_weights(weights16, buffers, barriers, i)
        scores = warpgroup_mma_wait(0, deps=[started])
        sync_group()
        mbarrier.arrive(scores_done)
    weights, row_max, row_sum, shrink = softmax_step(
        scores, row_max, row_sum, top - steps + 1, end_key, all_see, scale
    )
    hand_factors(shrink, buffers, barriers, steps - 1)
    hand_weights(weights.to(q_shared.dtype), buffers, barriers, steps - 1)
    sync_group()
    mbarrier.arrive(scores_done)
    states.index(0).store(row_max)
    states.index(1).store(row_sum)
    sync_group()
    mbarrier.arrive(last_full)


@gluon.jit
def attend_values(
    half_desc: gl.tensor,
    rope_desc: gl.tensor,
    table_ptr: gl.tensor,
    block_rows: gl.tensor,
    buffers: gl.tuple,
    barriers: gl.tuple,
    results: gl.tuple,
    span: gl.tuple,
    value_scale: gl.tensor,
    split: gl.tensor,
    num_splits: gl.tensor,
    H: gl.constexpr,
    S: gl.constexpr,
    FIRST: gl.constexpr,
) -> None:
    """A group that computes one half of the output, and copies that half of the latents."""
    left, right, rope, weights, factors, states = buffers
    left_full, right_full, rope_full, factors_full, scores_done, weights_free, last_full = barriers
    begin, tokens, first, seq_len, top, steps = span
    HALF: gl.constexpr = half_desc.block_shape[1]
    if FIRST == 0:
        latents, full = left, left_full
    else:
        latents, full = right, right_full
    bottom = top - steps + 1
    for i in gl.static_range(STAGES):
        cache_row = block_row(table_ptr, gl.maximum(top - i, bottom), block_rows, S)
        copy_half(half_desc, cache_row, FIRST, full.index(i), latents.index(i), i < steps)
        if (FIRST != 0) and (i == 0):
            copy_half(rope_desc, cache_row, 2 * HALF, rope_full, rope, True)
    acc = gl.zeros([M, HALF], gl.float32, VALUE)
    next_row = block_row(table_ptr, gl.maximum(top - STAGES, bottom), block_rows, S)
    if FIRST != 0:
        rope_row = block_row(table_ptr, gl.maximum(top - 1, bottom), block_rows, S)
        mbarrier.wait(scores_done, 0, pred=steps > 1)
        copy_half(rope_desc, rope_row, 2 * HALF, rope_full, rope, steps > 1)
        rope_row = block_row(table_ptr, gl.maximum(top - 2, bottom), block_rows, S)
    if seq_len < (top + 1) * N:
        # The first scores are done before the first factors are told.
        mbarrier.wait(full.index(0), 0)
        mbarrier.wait(factors_full.index(0), 0)
        clear_behind(latents.index(0), seq_len - top * N)
        fence_async_shared()
        sync_group()
    for i in range(steps):
        stage = i % STAGES
        cache_row = next_row
        next_row = block_row(table_ptr, gl.maximum(top - i - STAGES - 1, bottom), block_rows, S)
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        mbarrier.wait(factors_full.index(i & 1), i // 2 & 1)
        acc = acc * factors.index(i & 1).load(VALUE_ROW)[:, None]
        # The condition always holds: behind it the compiler does not move the factors' products.
        mbarrier.wait(scores_done, i + 1 & 1, pred=seq_len > 0)
        if FIRST != 0:
            copy_half(rope_desc, rope_row, 2 * HALF, rope_full, rope, i + 2 < steps)
            rope_row = cache_row
        acc = warpgroup_mma(weights, latents.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        sync_group()
        mbarrier.arrive(weights_free)
        copy_half(half_desc, cache_row, FIRST, full.index(stage), latents.index(stage), i + STAGES < steps)
    mbarrier.wait(last_full, 0)
    row = first + gl.arange(0, M, VALUE_ROW)
    token64, head64, keep = (begin + row // H).to(gl.int64), (row % H).to(gl.int64), row < tokens * H
    row_sum = states.index(1).load(VALUE_ROW)
    if FIRST == 0:
        row_max = states.index(0).load(VALUE_ROW)
        store_state(row_max, row_sum, results, token64, head64, keep, split, num_splits, H, 2 * HALF)
    factor = value_scale + gl.zeros_like(row_sum)
    if results[2] is None:
        factor = value_scale / gl.where(row_sum == 0.0, 1.0, row_sum)
    store_half(acc * factor[:, None], results, token64, head64, keep, split, num_splits, H, FIRST)


@gluon.jit
def store_nothing(
    results: gl.tuple,
    place: gl.tuple,
    split: gl.tensor,
    num_splits: gl.tensor,
    H: gl.constexpr,
    L: gl.constexpr,
) -> None:
    """What rows without keys give; a part without keys is its state alone, its values are never read."""
    begin, tokens, first, _, _, _ = place
    row = first + gl.arange(0, M, VALUE_ROW)
    token64, head64, keep = (begin + row // H).to(gl.int64), (row % H).to(gl.int64), row < tokens * H
    row_sum = gl.zeros([M], gl.float32, VALUE_ROW)
    store_state(row_sum + float("-inf"), row_sum, results, token64, head64, keep, split, num_splits, H, L)
    if results[2] is None:
        acc = gl.zeros([M, L // 2], gl.float32, VALUE)
        store_half(acc, results, token64, head64, keep, split, num_splits, H, 0)
        store_half(acc, results, token64, head64, keep, split, num_splits, H, L // 2)


@gluon.jit(
    do_not_specialize=["num_tokens", "num_requests", "num_splits", "block_rows", "table_row"],
    do_not_specialize_on_alignment=[
        "lse_ptr",
        "starts_ptr",
        "seq_lens_ptr",
        "table_ptr",
        "k_scale_ptr",
        "partial_ptr",
    ],
)
def mla_hopper_kernel(
    half_desc: gl.tensor,
    rope_desc: gl.tensor,
    ql_ptr: gl.tensor,
    qr_ptr: gl.tensor,
    out_ptr: gl.tensor,
    lse_ptr: gl.tensor,
    partial_ptr: gl.tensor,
    starts_ptr: gl.tensor,
    seq_lens_ptr: gl.tensor,
    table_ptr: gl.tensor,
    k_scale_ptr: gl.tensor,
    scale: gl.tensor,
    ql_token: gl.tensor,
    ql_head: gl.tensor,
    qr_token: gl.tensor,
    qr_head: gl.tensor,
    out_token: gl.tensor,
    out_head: gl.tensor,
    lse_token: gl.tensor,
    lse_head: gl.tensor,
    table_row: gl.tensor,
    block_rows: gl.tensor,
    num_tokens: gl.tensor,
    num_requests: gl.tensor,
    num_splits: gl.tensor,
    H: gl.constexpr,
    S: gl.constexpr,
    L: gl.constexpr,
    R: gl.constexpr,
    MIN_STEPS: gl.constexpr,
    VALUE_REGS: gl.constexpr,
) -> None:
    """half_desc and rope_desc: the cache as a matrix of rows, in blocks [N, L / 2] and [N, R]."""
    split = gl.program_id(1)
    request, tile = find_request(starts_ptr, gl.program_id(0), num_requests, H)
    real = request < num_requests
    begin = gl.load(starts_ptr + request)
    end = gl.load(starts_ptr + request + 1, mask=real, other=0)
    seq_len = gl.load(seq_lens_ptr + request, mask=real, other=0)
    tokens = gl.where(real, end, num_tokens) - begin
    first = tile * M
    if first >= tokens * H:
        return
    last_token = (gl.minimum(first + M, tokens * H) - 1) // H
    all_steps = (gl.maximum(seq_len - tokens + last_token + 1, 0) + N - 1) // N
    size = gl.maximum((all_steps + num_splits - 1) // num_splits, MIN_STEPS)
    top = gl.minimum((split + 1) * size, all_steps) - 1
    steps = top + 1 - split * size
    place = (begin, tokens, first, seq_len, top, steps)
    results = (out_ptr, lse_ptr, partial_ptr, out_token, out_head, lse_token, lse_head, num_tokens)
    if steps <= 0:
        store_nothing(results, place, split, num_splits, H, L)
        return

    dtype: gl.constexpr = half_desc.dtype
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = (
        gl.allocate_shared_memory(dtype, [STAGES, N, L // 2], half_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, N, L // 2], half_desc.layout),
        gl.allocate_shared_memory(dtype, [N, R], rope_desc.layout),
        gl.allocate_shared_memory(dtype, [M, N], rope_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, M], ROW),
        gl.allocate_shared_memory(gl.float32, [2, M], ROW),
    )
    q_shared = gl.allocate_shared_memory(dtype, [2, M, R], rope_desc.layout)
    left_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    right_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    rope_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    scores_done = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    factors_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    weights_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    last_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(left_full.index(stage), count=1)
        mbarrier.init(right_full.index(stage), count=1)
    mbarrier.init(rope_full, count=1)
    mbarrier.init(scores_done, count=1)
    for slot in gl.static_range(2):
        mbarrier.init(factors_full.index(slot), count=1)
    mbarrier.init(weights_free, count=2)
    mbarrier.init(last_full, count=1)
    sync_group()
    barriers = (left_full, right_full, rope_full, factors_full, scores_done, weights_free, last_full)
    value_scale = 1.0
    if k_scale_ptr is not None:
        value_scale = gl.load(k_scale_ptr)
    queries = (ql_ptr, qr_ptr, ql_token, ql_head, qr_token, qr_head)
    table_ptr += request.to(gl.int64) * table_row
    gl.warp_specialize(
        [
            (attend_scores, (queries, buffers, barriers, place, scale * value_scale, q_shared, H)),
            (
                attend_values,
                (
                    half_desc, rope_desc, table_ptr, block_rows, buffers, barriers, results, place,
                    value_scale, split, num_splits, H, S, 0,
                ),
            ),
            (
                attend_values,
                (
                    half_desc, rope_desc, table_ptr, block_rows, buffers, barriers, results, place,
                    value_scale, split, num_splits, H, S, L // 2,
                ),
            ),
        ],
        [4, 4],
        [VALUE_REGS, VALUE_REGS],
    )  # fmt: skip
