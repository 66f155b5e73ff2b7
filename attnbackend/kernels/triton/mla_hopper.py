"""Attention of absorbed queries to a latent cache on Hopper GPUs (compute capability 9), in Gluon.

A program takes 64 rows (`mla_rows`) and one split of their keys, 64 at a time, in three groups of warps:

- one copies blocks of the cache to shared memory (TMA), up to two steps ahead of their use;
- one computes the scores, the softmax and the left half of the output;
- one computes the right half, from the weights that the second left in shared memory.

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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .mla_hopper_launch import KEYS, ROWS

RIGHT_REGISTERS, COPY_REGISTERS = 192, 32
"""Of a thread of the third and the first group; what they leave is the second's."""
M, N, STAGES = gl.constexpr(ROWS), gl.constexpr(KEYS), gl.constexpr(2)
LN_2 = gl.constexpr(0.6931471805599453)
SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
SCORE_ROW = gl.constexpr(gl.SliceLayout(1, SCORE.value))
VALUE_ROW = gl.constexpr(gl.SliceLayout(1, VALUE.value))
TILE_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# The names of Triton 3.6, and of later versions.
load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
sync_group = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


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
def copy_blocks(
    half_desc: gl.tensor,
    rope_desc: gl.tensor,
    table_ptr: gl.tensor,
    buffers: gl.tuple,
    barriers: gl.tuple,
    top: gl.tensor,
    steps: gl.tensor,
    block_rows: gl.tensor,
    S: gl.constexpr,
) -> None:
    """The group that fills the buffers of latents and rotated keys."""
    _, _, left, right, rope, _, _ = buffers
    left_full, left_free, right_full, right_free, _, _ = barriers
    HALF: gl.constexpr = half_desc.block_shape[1]
    next_row = block_row(table_ptr, top, block_rows, S)
    for i in range(steps):
        # Block ids are read one step ahead.
        row = next_row
        next_row = block_row(table_ptr, gl.maximum(top - i - 1, top - steps + 1), block_rows, S)
        stage, phase = i % STAGES, i // STAGES & 1 ^ 1
        mbarrier.wait(left_free.index(stage), phase)
        full = left_full.index(stage)
        mbarrier.expect(full, half_desc.block_type.nbytes + rope_desc.block_type.nbytes)
        load_block(rope_desc, [row, 2 * HALF], full, rope.index(stage))
        load_block(half_desc, [row, 0], full, left.index(stage))
        mbarrier.wait(right_free.index(stage), phase)
        full = right_full.index(stage)
        mbarrier.expect(full, half_desc.block_type.nbytes)
        load_block(half_desc, [row, HALF], full, right.index(stage))


@gluon.jit
def copy_queries(
    shared: gl.shared_memory_descriptor, ptr: gl.tensor, offsets: gl.tensor, keep: gl.tensor
) -> None:
    """Rows of queries [M, width] to shared memory, zeros where not `keep`."""
    WIDTH: gl.constexpr = shared.shape[1]
    offsets = gl.convert_layout(offsets, gl.SliceLayout(1, TILE_COPY))
    mask = gl.convert_layout(keep, gl.SliceLayout(1, TILE_COPY))
    column = gl.arange(0, 64, gl.SliceLayout(0, TILE_COPY))
    for first in gl.static_range(0, WIDTH, 64):
        part = gl.load(ptr + offsets[:, None] + (first + column)[None, :], mask=mask[:, None], other=0.0)
        shared.slice(first, 64, dim=1).store(part)


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
def start_scores(buffers: gl.tuple, barriers: gl.tuple, i: gl.tensor) -> gl.tensor:
    """The product of queries and keys of step i, begun: three groups of instructions in flight."""
    q_latent, q_rope, left, right, rope, _, _ = buffers
    left_full, _, right_full, _, _, _ = barriers
    HALF: gl.constexpr = left.shape[2]
    stage, phase = i % STAGES, i // STAGES & 1
    scores = gl.zeros([M, N], gl.float32, SCORE)
    mbarrier.wait(left_full.index(stage), phase)
    keys = rope.index(stage).permute((1, 0))
    scores = warpgroup_mma(q_rope, keys, scores, use_acc=False, is_async=True)
    keys = left.index(stage).permute((1, 0))
    scores = warpgroup_mma(q_latent.slice(0, HALF, dim=1), keys, scores, is_async=True)
    mbarrier.wait(right_full.index(stage), phase)
    keys = right.index(stage).permute((1, 0))
    return warpgroup_mma(q_latent.slice(HALF, HALF, dim=1), keys, scores, is_async=True)


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
def hand_over(
    weights: gl.tensor, factor: gl.tensor, buffers: gl.tuple, barriers: gl.tuple, i: gl.tensor
) -> None:
    """Weights and factors of step i to the group of the right half, once it is done with the last."""
    _, _, _, _, _, weights_shared, factors_shared = buffers
    _, _, _, _, weights_full, weights_free = barriers
    mbarrier.wait(weights_free, i & 1 ^ 1)
    weights_shared.store(weights.to(weights_shared.dtype))
    factors_shared.store(factor)
    fence_async_shared()
    sync_group()
    mbarrier.arrive(weights_full)


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
def attend_left(
    queries: gl.tuple,
    buffers: gl.tuple,
    barriers: gl.tuple,
    results: gl.tuple,
    place: gl.tuple,
    scale: gl.tensor,
    value_scale: gl.tensor,
    split: gl.tensor,
    num_splits: gl.tensor,
    H: gl.constexpr,
) -> None:
    """The group that computes scores, softmax and the left half of the output."""
    ql_ptr, qr_ptr, ql_token, ql_head, qr_token, qr_head = queries
    q_latent, q_rope, left, right, _, weights_shared, _ = buffers
    _, left_free, _, _, _, _ = barriers
    begin, tokens, first, seq_len, top, steps = place
    L: gl.constexpr = q_latent.shape[1]
    row = first + gl.arange(0, M, SCORE_ROW)
    token, head64 = row // H, (row % H).to(gl.int64)
    token64, keep = (begin + token).to(gl.int64), token < tokens
    # Keys before end_key are a row's own, those before all_see every row's.
    end_key = gl.where(keep, seq_len - tokens + token + 1, 0)
    all_see = seq_len - tokens + first // H + 1
    copy_queries(q_latent, ql_ptr, token64 * ql_token + head64 * ql_head, keep)
    copy_queries(q_rope, qr_ptr, token64 * qr_token + head64 * qr_head, keep)
    fence_async_shared()
    sync_group()
    row_max = gl.full([M], float("-inf"), gl.float32, SCORE_ROW)
    row_sum = gl.zeros([M], gl.float32, SCORE_ROW)
    acc = gl.zeros([M, L // 2], gl.float32, VALUE)
    scores = warpgroup_mma_wait(0, deps=[start_scores(buffers, barriers, 0)])
    if seq_len < (top + 1) * N:
        clear_behind(left.index(0), seq_len - top * N)
        clear_behind(right.index(0), seq_len - top * N)
        fence_async_shared()
        sync_group()
    for i in range(steps - 1):
        weights, row_max, row_sum, shrink = softmax_step(
            scores, row_max, row_sum, top - i, end_key, all_see, scale
        )
        hand_over(weights, shrink, buffers, barriers, i)
        acc = acc * gl.convert_layout(shrink, VALUE_ROW)[:, None]
        acc = warpgroup_mma(weights_shared, left.index(i % STAGES), acc, is_async=True)
        # The next scores stand in line behind this product.
        scores = start_scores(buffers, barriers, i + 1)
        acc = warpgroup_mma_wait(3, deps=[acc])
        sync_group()
        mbarrier.arrive(left_free.index(i % STAGES))
        scores = warpgroup_mma_wait(0, deps=[scores])
    weights, row_max, row_sum, shrink = softmax_step(
        scores, row_max, row_sum, top - steps + 1, end_key, all_see, scale
    )
    hand_over(weights, shrink, buffers, barriers, steps - 1)
    acc = acc * gl.convert_layout(shrink, VALUE_ROW)[:, None]
    acc = warpgroup_mma(weights_shared, left.index((steps - 1) % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if results[2] is None:
        factor = value_scale / gl.where(row_sum == 0.0, 1.0, row_sum)
    else:
        factor = value_scale + gl.zeros_like(row_sum)
    hand_over(weights, factor, buffers, barriers, steps)
    acc = acc * gl.convert_layout(factor, VALUE_ROW)[:, None]
    store_state(row_max, row_sum, results, token64, head64, keep, split, num_splits, H, L)
    token64, head64 = gl.convert_layout(token64, VALUE_ROW), gl.convert_layout(head64, VALUE_ROW)
    keep = gl.convert_layout(keep, VALUE_ROW)
    store_half(acc, results, token64, head64, keep, split, num_splits, H, 0)


@gluon.jit
def attend_right(
    buffers: gl.tuple,
    barriers: gl.tuple,
    results: gl.tuple,
    place: gl.tuple,
    split: gl.tensor,
    num_splits: gl.tensor,
    H: gl.constexpr,
) -> None:
    """The group that computes the right half of the output."""
    q_latent, _, _, right, _, weights, factors = buffers
    _, _, right_full, right_free, weights_full, weights_free = barriers
    begin, tokens, first, _, _, steps = place
    HALF: gl.constexpr = q_latent.shape[1] // 2
    acc = gl.zeros([M, HALF], gl.float32, VALUE)
    for i in range(steps):
        stage = i % STAGES
        mbarrier.wait(weights_full, i & 1)
        acc = acc * factors.load(VALUE_ROW)[:, None]
        mbarrier.wait(right_full.index(stage), i // STAGES & 1)
        acc = warpgroup_mma(weights, right.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(weights_free)
        mbarrier.arrive(right_free.index(stage))
    mbarrier.wait(weights_full, steps & 1)
    acc = acc * factors.load(VALUE_ROW)[:, None]
    row = first + gl.arange(0, M, VALUE_ROW)
    token64, head64 = (begin + row // H).to(gl.int64), (row % H).to(gl.int64)
    store_half(acc, results, token64, head64, row < tokens * H, split, num_splits, H, HALF)


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
    RIGHT_REGS: gl.constexpr,
    COPY_REGS: gl.constexpr,
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
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, L], dtype)
    W_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, N], dtype)
    buffers = (
        gl.allocate_shared_memory(dtype, [M, L], Q_LAYOUT),
        gl.allocate_shared_memory(dtype, [M, R], rope_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, N, L // 2], half_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, N, L // 2], half_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, N, R], rope_desc.layout),
        gl.allocate_shared_memory(dtype, [M, N], W_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [M], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    left_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weights_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weights_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(left_full.index(stage), count=1)
        mbarrier.init(left_free.index(stage), count=1)
        mbarrier.init(right_full.index(stage), count=1)
        mbarrier.init(right_free.index(stage), count=1)
    mbarrier.init(weights_full, count=1)
    mbarrier.init(weights_free, count=1)
    sync_group()
    barriers = (left_full, left_free, right_full, right_free, weights_full, weights_free)
    value_scale = 1.0
    if k_scale_ptr is not None:
        value_scale = gl.load(k_scale_ptr)
    queries = (ql_ptr, qr_ptr, ql_token, ql_head, qr_token, qr_head)
    table_ptr += request.to(gl.int64) * table_row
    gl.warp_specialize(
        [
            (
                attend_left,
                (
                    queries, buffers, barriers, results, place, scale * value_scale, value_scale, split,
                    num_splits, H,
                ),
            ),
            (attend_right, (buffers, barriers, results, place, split, num_splits, H)),
            (copy_blocks, (half_desc, rope_desc, table_ptr, buffers, barriers, top, steps, block_rows, S)),
        ],
        [4, 1],
        [RIGHT_REGS, COPY_REGS],
    )  # fmt: skip
