"""The loop that all attention kernels share: one tile of queries over a range of keys.

Softmax runs in base 2 (the hardware's exponential), online: `acc` [M, DV] is the weighted sum
of values, `row_max` [M] the greatest score so far, `row_sum` [M] the sum of 2^(score - row_max).

Legend: M rows of a tile (query tokens x heads), N keys of a step, D and DV head sizes of K and
V, padded to powers of two in D_PAD and DV_PAD.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .codec import decode, encode

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x: Any) -> Any:
    """Hyperbolic tangent to 3 ulp of float32: the interpreter has no libdevice.

    Below 0.625 an odd polynomial, a Chebyshev least-squares fit of (tanh(x)/x - 1)/x^2 in x^2;
    1 - 2/(e^2x + 1) would cancel there.
    """
    size = tl.abs(x)
    z = x * x
    poly = -0.006104961037635803 * z + 0.02100365236401558
    poly = poly * z - 0.05385250225663185
    poly = poly * z + 0.13332782685756683
    poly = poly * z - 0.333333283662796
    large = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2_E)) + 1.0)
    return tl.where(size < 0.625, x + x * z * poly, tl.where(x < 0, -large, large))


@triton.jit
def start_state(sink_ptr: Any, heads: Any, keep: Any, SINK_FMT: tl.constexpr) -> Any:
    """Softmax state before any key: (row_max, row_sum), counting the sink where there is one."""
    if sink_ptr is None:
        row_max = tl.full(keep.shape, float("-inf"), tl.float32)
        row_sum = tl.full(keep.shape, 0.0, tl.float32)
    else:
        sink = decode(tl.load(sink_ptr + heads, mask=keep, other=0), SINK_FMT).to(tl.float32)
        row_max = tl.where(keep, sink * LOG2_E, float("-inf"))
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    return row_max, row_sum


@triton.jit
def natural_lse(row_max: Any, row_sum: Any) -> Any:
    """Natural log-sum-exp of a state, -inf for an empty one."""
    log2_sum = tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))
    return tl.where(row_sum == 0.0, float("-inf"), (row_max + log2_sum) * LN_2)


@triton.jit
def head_scale(scale_ptr: Any, kv_head: Any, stride: Any) -> Any:
    """Dequantisation scale of a kv head, 1 where there is none."""
    if scale_ptr is None:
        scale = 1.0
    else:
        scale = tl.load(scale_ptr + kv_head * stride)
    return scale


@triton.jit
def load_rows(
    ptr: Any, offsets: Any, keep: Any, WIDTH: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr
) -> Any:
    """[N, PAD] rows at 64-bit `offsets`; zeros in the padding and, if MASKED, where not `keep`.

    Zeros, not whatever lies there: beyond the sequence memory may hold NaN, and 0 * NaN is NaN.
    """
    columns = tl.arange(0, PAD)
    ptrs = ptr + offsets[:, None] + columns[None, :]
    if MASKED and WIDTH != PAD:
        rows = tl.load(ptrs, mask=keep[:, None] & (columns < WIDTH)[None, :], other=0)
    elif MASKED:
        rows = tl.load(ptrs, mask=keep[:, None], other=0)
    elif WIDTH != PAD:
        rows = tl.load(ptrs, mask=(columns < WIDTH)[None, :], other=0)
    else:
        rows = tl.load(ptrs)
    return rows


@triton.jit
def find_pages(
    table_ptr: Any, start: Any, keep: Any, S: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr
) -> Any:
    """(block id, slot in the block) of N keys from `start`, in 64 bits.

    The block id is one scalar where a whole step lies inside a block.
    """
    steps = tl.arange(0, N)
    if S % N == 0:
        page = tl.load(table_ptr + start // S)
        slot = start % S + steps
    else:
        position = start + steps
        if MASKED:
            page = tl.load(table_ptr + position // S, mask=keep, other=0)
        else:
            page = tl.load(table_ptr + position // S)
        slot = position % S
    return page.to(tl.int64), slot.to(tl.int64)


@triton.jit
def scores(
    product: Any,
    position: Any,
    key: Any,
    scale: Any,
    soft_cap: Any,
    slope: Any,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
) -> Any:
    """Base-2 scores of q.k products [M, N]: scale, then soft-cap, then alibi."""
    if HAS_CAP:
        result = tanh(product * (scale / soft_cap)) * (soft_cap * LOG2_E)
    else:
        result = product * (scale * LOG2_E)
    if HAS_ALIBI:
        distance = (key[None, :] - position[:, None]).to(tl.float32)
        result += (slope * LOG2_E)[:, None] * distance
    return result


@triton.jit
def visible(
    position: Any,
    key: Any,
    keep: Any,
    window: Any,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> Any:
    """[M, N] mask of the keys that each row sees, among those in `keep`."""
    mask = keep[None, :]
    if CAUSAL:
        mask = mask & (key[None, :] <= position[:, None])
    if HAS_WINDOW:
        mask = mask & (key[None, :] > position[:, None] - window)
    return mask


@triton.jit
def attend(
    acc: Any,
    row_max: Any,
    row_sum: Any,
    q: Any,
    position: Any,
    slope: Any,
    k_ptr: Any,
    v_ptr: Any,
    table_ptr: Any,
    start: Any,
    stop: Any,
    first_key: Any,
    end_key: Any,
    scale: Any,
    soft_cap: Any,
    window: Any,
    k_block: Any,
    k_slot: Any,
    v_block: Any,
    v_slot: Any,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    K_FMT: tl.constexpr,
    V_FMT: tl.constexpr,
    DOT: tl.constexpr,
) -> Any:
    """Softmax state after the steps of N keys from `start` (a multiple of N) to `stop`.

    MASKED steps load only keys in [first_key, end_key) and mask each row's own range; the
    others must lie where every row of the tile sees every key. `k_ptr` and `v_ptr` point at
    the tile's kv head.
    """
    steps = tl.arange(0, N)
    for begin in range(start, stop, N):
        key = begin + steps
        keep = (key >= first_key) & (key < end_key)
        page, slot = find_pages(table_ptr, begin, keep, S, N, MASKED)
        k = load_rows(k_ptr, page * k_block + slot * k_slot, keep, D, D_PAD, MASKED)
        product = tl.dot(q, tl.trans(decode(k, K_FMT).to(DOT)), input_precision="ieee")
        score = scores(product, position, key, scale, soft_cap, slope, HAS_CAP, HAS_ALIBI)
        if MASKED:
            mask = visible(position, key, keep, window, CAUSAL, HAS_WINDOW)
            score = tl.where(mask, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        if MASKED:
            # -inf minus -inf is NaN: a row that has seen no key yet subtracts 0.
            pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            pivot = new_max
        weight = tl.exp2(score - pivot[:, None])
        shrink = tl.exp2(row_max - pivot)
        v = load_rows(v_ptr, page * v_block + slot * v_slot, keep, DV, DV_PAD, MASKED)
        acc = tl.dot(
            weight.to(DOT),
            decode(v, V_FMT).to(DOT),
            acc * shrink[:, None],
            input_precision="ieee",
        )
        row_sum = row_sum * shrink + tl.sum(weight, 1)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def load_query(
    q_ptr: Any,
    offsets: Any,
    keep: Any,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    Q_FMT: tl.constexpr,
    DOT: tl.constexpr,
) -> Any:
    """[M, D_PAD] queries in the product's dtype, zeros in rows that are not `keep`."""
    return decode(load_rows(q_ptr, offsets, keep, D, D_PAD, True), Q_FMT).to(DOT)


@triton.jit
def store_rows(
    ptr: Any,
    offsets: Any,
    rows: Any,
    keep: Any,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    FMT: tl.constexpr,
) -> Any:
    """Write float32 rows [M, PAD] at 64-bit `offsets` in the destination's format."""
    columns = tl.arange(0, PAD)
    ptrs = ptr + offsets[:, None] + columns[None, :]
    mask = keep[:, None] & (columns < WIDTH)[None, :]
    tl.store(ptrs, encode(rows, ptr.dtype.element_ty, FMT), mask=mask)


@triton.jit
def normalise(acc: Any, row_sum: Any) -> Any:
    """Weighted mean of the values; zeros for a row that saw no key."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
