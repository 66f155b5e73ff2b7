"""The loop that all attention kernels share: one tile of queries over a range of keys.

Softmax is online: `acc` [M, DV] is the weighted sum of values, `row_max` [M] the greatest score
so far, `row_sum` [M] the sum of base^(score - row_max). The base is 2, the hardware's own, where
the query is of 16 bits. There scores are exact to one rounding of their exponent, whose common part
cancels; beyond 2^30 it would overflow.

PRECISE kernels, those of float32 queries, owe no less than plain PyTorch in float32, whose sums
are cut in parts. Sums over a head or a sequence term by term in float32 were measured to err 3
times as much as the rule for results allows, so theirs are in float64 (and so is what runs across
steps: `acc`, `row_sum`). Their base is e, since scaling scores by log2(e) is one more rounding,
and they divide with correct rounding, where the hardware's own division is up to 2 ulp off.

Legend: M rows of a tile (query tokens x heads), N keys of a step, D and DV head sizes of K and
V, padded to powers of two in D_PAD and DV_PAD.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codec import decode, decode_pairs, encode

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def power(x: tl.tensor, PRECISE: tl.constexpr) -> tl.tensor:
    """The softmax's base to the power of x."""
    return tl.exp(x) if PRECISE else tl.exp2(x)


@triton.jit
def divide(x: tl.tensor, y: tl.tensor, PRECISE: tl.constexpr) -> tl.tensor:
    """x / y."""
    return tl.div_rn(x, y) if PRECISE else x / y


@triton.jit
def soft_capped(score: tl.tensor, x: tl.tensor, soft_cap: tl.tensor, PRECISE: tl.constexpr) -> tl.tensor:
    """soft_cap * tanh(x) where score = soft_cap * x: both in the unit of the scores.

    Below 0.625 tanh(x) = x + x^3 p(x^2), p a Chebyshev least-squares fit of (tanh(x)/x - 1)/x^2;
    1 - 2/(e^2x + 1) would cancel there. A small score's cap is the score and a correction to it:
    divided by the cap and multiplied by it again, it would be rounded twice more.
    """
    z = x * x
    poly = -0.006104961037635803 * z + 0.02100365236401558
    poly = poly * z - 0.05385250225663185
    poly = poly * z + 0.13332782685756683
    poly = poly * z - 0.333333283662796
    small = score + score * (z * poly)
    twice = tl.zeros(x.shape, tl.float32) + 2.0 * soft_cap
    large = soft_cap - divide(twice, tl.exp2(tl.abs(x) * (2.0 * LOG2_E)) + 1.0, PRECISE)
    return tl.where(z < 0.390625, small, tl.where(x < 0, -large, large))


@triton.jit
def start_state(
    sink_ptr: tl.tensor,
    heads: tl.tensor,
    keep: tl.tensor,
    SINK_FMT: tl.constexpr,
    PRECISE: tl.constexpr,
) -> tl.tensor:
    """Softmax state before any key: (row_max, row_sum), counting the sink where there is one."""
    if sink_ptr is None:
        row_max = tl.full(keep.shape, float("-inf"), tl.float32)
        row_sum = tl.full(keep.shape, 0.0, tl.float32)
    else:
        UNIT: tl.constexpr = 1.0 if PRECISE else LOG2_E
        sink = decode(tl.load(sink_ptr + heads, mask=keep, other=0.0), SINK_FMT).to(tl.float32)
        row_max = tl.where(keep, sink * UNIT, float("-inf"))
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    return row_max, row_sum.to(tl.float64 if PRECISE else tl.float32)


@triton.jit
def no_values(M: tl.constexpr, PAD: tl.constexpr, PRECISE: tl.constexpr, PAIRS: tl.constexpr) -> tl.tensor:
    """Weighted sum of no values, twice: of even and of odd columns where PAIRS."""
    zeros = tl.zeros([M, PAD // 2 if PAIRS else PAD], tl.float64 if PRECISE else tl.float32)
    return zeros, zeros


@triton.jit
def all_columns(
    acc: tl.tensor, odd: tl.tensor, M: tl.constexpr, PAD: tl.constexpr, PAIRS: tl.constexpr
) -> tl.tensor:
    """[M, PAD] of even and odd columns."""
    if PAIRS:
        acc = tl.reshape(tl.join(acc, odd), [M, PAD])
    return acc


@triton.jit
def natural_lse(row_max: tl.tensor, row_sum: tl.tensor, PRECISE: tl.constexpr) -> tl.tensor:
    """Natural log-sum-exp of a state, -inf for an empty one."""
    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    lse = row_max + tl.log(total) if PRECISE else (row_max + tl.log2(total)) * LN_2
    return tl.where(row_sum == 0.0, float("-inf"), lse.to(tl.float32))


@triton.jit
def head_scale(scale_ptr: tl.tensor, kv_head: tl.tensor, stride: tl.tensor) -> tl.tensor:
    """Dequantisation scale of a kv head, 1 where there is none."""
    return 1.0 if scale_ptr is None else tl.load(scale_ptr + kv_head * stride)


@triton.jit
def load_rows(
    rows: tl.tensor, keep: tl.tensor, WIDTH: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """[N, PAD] elements from the pointers `rows` on; zeros in the padding and, if MASKED, where not `keep`.

    Zeros, not whatever lies there: beyond the sequence memory may hold NaN, and 0 * NaN is NaN.
    """
    columns = tl.arange(0, PAD)
    ptrs = rows[:, None] + columns[None, :]
    if MASKED and WIDTH != PAD:
        tile = tl.load(ptrs, mask=keep[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(ptrs, mask=keep[:, None], other=0.0)
    elif WIDTH != PAD:
        tile = tl.load(ptrs, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def find_pages(
    table_ptr: tl.tensor, start: tl.tensor, end_key: tl.tensor, S: tl.constexpr, N: tl.constexpr
) -> tl.tensor:
    """Block ids of N keys from `start`: one scalar where a whole step lies inside a block.

    S is 0 where there are no blocks: the keys lie one after the other.
    """
    if S == 0:
        page = start * 0
    elif S % N == 0:
        page = tl.load(table_ptr + start // S, mask=start < end_key, other=0)
    else:
        key = start + tl.arange(0, N)
        page = tl.load(table_ptr + key // S, mask=key < end_key, other=0)
    return page


@triton.jit
def key_offsets(
    page: tl.tensor,
    begin: tl.tensor,
    steps: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    S: tl.constexpr,
    N: tl.constexpr,
) -> tl.tensor:
    """64-bit offsets of the N keys from `begin` in the blocks that `find_pages` gives for them.

    Written so that what is the same at each step can leave the loop.
    """
    if S == 0:
        first = steps * 0 + begin
        offsets = steps.to(tl.int64) * slot_stride + first.to(tl.int64) * slot_stride
    else:
        slots = steps % S if N % S == 0 else (begin + steps) % S
        offsets = slots.to(tl.int64) * slot_stride + page.to(tl.int64) * block_stride
    return offsets


@triton.jit
def scores(
    product: tl.tensor,
    position: tl.tensor,
    key: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    slope: tl.tensor,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    PRECISE: tl.constexpr,
) -> tl.tensor:
    """Scores of q.k products [M, N], as exponents: scale, then soft-cap, then alibi."""
    UNIT: tl.constexpr = 1.0 if PRECISE else LOG2_E
    result = product * (scale * UNIT)[:, None]
    if HAS_CAP:
        result = soft_capped(result, product * (scale / soft_cap)[:, None], soft_cap * UNIT, PRECISE)
    if HAS_ALIBI:
        distance = tl.abs((key[None, :] - position[:, None]).to(tl.float32))
        result -= (slope * UNIT)[:, None] * distance
    return result


@triton.jit
def full_width(x: tl.tensor) -> tl.tensor:
    """[N, D] values in float32, for a product in float64.

    The sum over an axis of 1 separates narrower values from the product: where Triton 3.6 sees
    where they come from, it lays the product out for their width and fails to compile it.
    """
    if x.dtype.primitive_bitwidth < 32:
        x = tl.sum(x.to(tl.float32)[:, None, :], 1)
    return x


@triton.jit
def query_key_product(q: tl.tensor, k: tl.tensor, DOT: tl.constexpr, PRECISE: tl.constexpr) -> tl.tensor:
    """[M, N] float32 products of the rows of `load_query` [M, D] and keys [N, D]."""
    if PRECISE:
        k64 = full_width(k).to(tl.float64)
        product = tl.dot(q.to(tl.float64), tl.trans(k64), out_dtype=tl.float64)
    else:
        product = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee")
    return product.to(tl.float32)


@triton.jit
def add_values(
    acc: tl.tensor,
    shrink: tl.tensor,
    weight: tl.tensor,
    v: tl.tensor,
    DOT: tl.constexpr,
    PRECISE: tl.constexpr,
) -> tl.tensor:
    """acc * shrink + weight v, in the type of acc."""
    if PRECISE:
        v64 = full_width(v).to(tl.float64)
        shrunk = acc * shrink.to(tl.float64)[:, None]
        acc = tl.dot(weight.to(tl.float64), v64, shrunk, out_dtype=tl.float64)
    else:
        acc = tl.dot(weight.to(DOT), v.to(DOT), acc * shrink[:, None], input_precision="ieee")
    return acc


@triton.jit
def visible(
    low: tl.tensor,
    high: tl.tensor,
    key: tl.tensor,
    keep: tl.tensor,
    BY_ROW: tl.constexpr,
    HAS_LOW: tl.constexpr,
) -> tl.tensor:
    """[M, N] mask of the keys that each row sees: its own [low, high) if BY_ROW, else all in `keep`."""
    mask = keep[None, :]
    if BY_ROW:
        mask = key[None, :] < high[:, None]
        if HAS_LOW:
            mask = mask & (key[None, :] >= low[:, None])
    return mask


@triton.jit
def scaled(x: tl.tensor, unit: tl.tensor, PLAIN: tl.constexpr) -> tl.tensor:
    """x * unit where scores are PLAIN products; others have their unit already."""
    return x * unit if PLAIN else x


@triton.jit
def attend(
    acc: tl.tensor,
    odd: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    q: tl.tensor,
    position: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    slope: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    first_key: tl.tensor,
    end_key: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    MASKED: tl.constexpr,
    BY_ROW: tl.constexpr,
    HAS_LOW: tl.constexpr,
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
    PRECISE: tl.constexpr,
    ALIKE: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tensor:
    """Softmax state after the steps of N keys from `start` (a multiple of N) to `stop`; `scale` [M] > 0.

    MASKED steps load only keys in [first_key, end_key) and mask what a row does not see (see
    `visible`); the others must lie where every row of the tile sees every key. `k_ptr` and
    `v_ptr` point at the tile's kv head. ALIKE: their strides are the same. PAIRS: values are float8, of
    which `acc` sums the even columns and `odd` the others.
    """
    SUM: tl.constexpr = acc.dtype
    # Plain products are scaled together with the subtraction of their maximum, in one instruction.
    PLAIN: tl.constexpr = not (HAS_CAP or HAS_ALIBI or PRECISE)
    unit = scale * LOG2_E
    steps = tl.arange(0, N)
    # Block ids are read one step ahead. Read in the same step they would be a second level of
    # indirection, which halves the tiles of K and V that the compiler keeps in flight.
    page = find_pages(table_ptr, start, end_key, S, N)
    for begin in range(start, stop, N):
        key = begin + steps
        keep = (key >= first_key) & (key < end_key)
        here = page
        page = find_pages(table_ptr, begin + N, end_key, S, N)
        offsets = key_offsets(here, begin, steps, k_block, k_slot, S, N)
        k = load_rows(k_ptr + offsets, keep, D, D_PAD, MASKED)
        score = query_key_product(q, decode(k, K_FMT), DOT, PRECISE)
        if not PLAIN:
            score = scores(score, position, key, scale, soft_cap, slope, HAS_CAP, HAS_ALIBI, PRECISE)
        if MASKED:
            mask = visible(low, high, key, keep, BY_ROW, HAS_LOW)
            score = tl.where(mask, score, float("-inf"))
        new_max = tl.maximum(row_max, scaled(tl.max(score, 1), unit, PLAIN))
        # -inf minus -inf is NaN: a row that has seen no key yet subtracts 0.
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weight = power(scaled(score, unit[:, None], PLAIN) - pivot[:, None], PRECISE)
        shrink = power(row_max - pivot, PRECISE)
        if not ALIKE:
            offsets = key_offsets(here, begin, steps, v_block, v_slot, S, N)
        if PAIRS:
            rows = (v_ptr + offsets).to(tl.pointer_type(tl.int16))
            pairs = load_rows(rows, keep, DV // 2, DV_PAD // 2, MASKED)
            v, v_odd = decode_pairs(pairs, v_ptr.dtype.element_ty)
            odd = add_values(odd, shrink, weight, v_odd, DOT, PRECISE)
        else:
            v = decode(load_rows(v_ptr + offsets, keep, DV, DV_PAD, MASKED), V_FMT)
        acc = add_values(acc, shrink, weight, v, DOT, PRECISE)
        row_sum = row_sum * shrink.to(SUM) + tl.sum(weight.to(SUM), 1)
        row_max = new_max
    return acc, odd, row_max, row_sum


@triton.jit
def attend_interval(
    acc: tl.tensor,
    odd: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    q: tl.tensor,
    position: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    slope: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start: tl.tensor,
    full_start: tl.tensor,
    full_stop: tl.tensor,
    stop: tl.tensor,
    first_key: tl.tensor,
    end_key: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    BY_ROW: tl.constexpr,
    HAS_LOW: tl.constexpr,
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
    PRECISE: tl.constexpr,
    ALIKE: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tensor:
    """`attend` from `start` to `stop`, in whole steps without masks from `full_start` to `full_stop`."""
    if HAS_LOW:
        acc, odd, row_max, row_sum = attend(
            acc, odd, row_max, row_sum, q, position, low, high, slope, k_ptr, v_ptr, table_ptr,
            start, tl.minimum(full_start, stop), first_key, end_key,
            scale, soft_cap, k_block, k_slot, v_block, v_slot,
            True, BY_ROW, HAS_LOW, HAS_CAP, HAS_ALIBI, S, N, D, DV, D_PAD, DV_PAD,
            K_FMT, V_FMT, DOT, PRECISE, ALIKE, PAIRS,
        )  # fmt: skip
    acc, odd, row_max, row_sum = attend(
        acc, odd, row_max, row_sum, q, position, low, high, slope, k_ptr, v_ptr, table_ptr,
        tl.maximum(full_start, start), full_stop, first_key, end_key,
        scale, soft_cap, k_block, k_slot, v_block, v_slot,
        False, BY_ROW, HAS_LOW, HAS_CAP, HAS_ALIBI, S, N, D, DV, D_PAD, DV_PAD,
        K_FMT, V_FMT, DOT, PRECISE, ALIKE, PAIRS,
    )  # fmt: skip
    acc, odd, row_max, row_sum = attend(
        acc, odd, row_max, row_sum, q, position, low, high, slope, k_ptr, v_ptr, table_ptr,
        tl.maximum(tl.maximum(full_start, start), full_stop), stop, first_key, end_key,
        scale, soft_cap, k_block, k_slot, v_block, v_slot,
        True, BY_ROW, HAS_LOW, HAS_CAP, HAS_ALIBI, S, N, D, DV, D_PAD, DV_PAD,
        K_FMT, V_FMT, DOT, PRECISE, ALIKE, PAIRS,
    )  # fmt: skip
    return acc, odd, row_max, row_sum


@triton.jit
def load_query(
    rows: tl.tensor,
    keep: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    Q_FMT: tl.constexpr,
    DOT: tl.constexpr,
    SIGNED: tl.constexpr,
) -> tl.tensor:
    """(queries [M, D_PAD] in the products' dtype, scales [M]): zeros in rows that are not `keep`.

    Scales are above 0, so that the greatest score has the greatest product; queries change their sign
    with a scale below 0, if SIGNED: untouched queries go to wgmma from shared memory, others are read
    from there again at each step. A scale of 0 becomes one that no product notices: 0 times the -inf of a
    masked key would be NaN. bfloat16 queries of float16 products are scaled by a power of two, to below 4.
    """
    q = decode(load_rows(rows, keep, D, D_PAD, True), Q_FMT)
    if SIGNED:
        q = tl.where(scale < 0, -q, q)
    scales = tl.zeros(keep.shape, tl.float32) + tl.abs(scale)
    if DOT == tl.float16 and q.dtype == tl.bfloat16:  # noqa: SIM300 (a constexpr compares from the left)
        wide = q.to(tl.float32)
        exponent = tl.maximum(tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23, 1)
        q = wide * (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)[:, None]
        scales *= (tl.minimum(exponent, 253) << 23).to(tl.float32, bitcast=True)
    return q.to(DOT), tl.maximum(scales, 1e-37)


@triton.jit
def store_rows(
    ptr: tl.tensor,
    offsets: tl.tensor,
    rows: tl.tensor,
    keep: tl.tensor,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    FMT: tl.constexpr,
) -> tl.tensor:
    """Write float32 rows [M, PAD] at 64-bit `offsets` in the destination's format."""
    columns = tl.arange(0, PAD)
    ptrs = ptr + offsets[:, None] + columns[None, :]
    mask = keep[:, None] & (columns < WIDTH)[None, :]
    tl.store(ptrs, encode(rows, ptr.dtype.element_ty, FMT), mask=mask)


@triton.jit
def normalise(acc: tl.tensor, row_sum: tl.tensor) -> tl.tensor:
    """Weighted mean of the values in float32; zeros for a row that saw no key."""
    return (acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]).to(tl.float32)
