"""Which keys a token sees: one interval [low, high), whatever the kind of attention.

Masks come in REACH, a compile-time name, and `reach`, its size at run time:

- "all": every key, up to the token itself where attention is causal;
- "window": keys after position - reach;
- "both sides": those, and only keys before position + reach;
- "chunk": keys of the token's own chunk of `reach` positions.

Ranges of positions that see all of each other (bidirectional ranges) widen the interval: each
range that matters holds the token itself, and so does the causal interval that it is joined with.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_REACH = 1 << 30
"""A larger reach is as good as this one: no position lies so far off, and sums stay in int32."""


@triton.jit
def key_bounds(
    position: tl.tensor,
    seq_len: tl.tensor,
    reach: tl.tensor,
    CAUSAL: tl.constexpr,
    REACH: tl.constexpr,
) -> tl.tensor:
    """(low, high) of a token at `position`, a scalar or a vector. Both rise with the position."""
    low = position * 0
    high = low + seq_len
    if CAUSAL:
        high = tl.minimum(high, position + 1)
    if REACH == "chunk":
        # Division rounds towards 0, which would put positions below 0 in the first chunk.
        start = ((position + reach) // reach - 1) * reach
        low = tl.maximum(low, start)
        high = tl.minimum(high, start + reach)
    elif REACH != "all":
        low = tl.maximum(low, position - reach + 1)
    if REACH == "both sides":
        high = tl.minimum(high, position + reach)
    return low, tl.maximum(high, 0)


@triton.jit
def widened(
    low: tl.tensor,
    high: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    seq_len: tl.tensor,
    ranges_ptr: tl.tensor,
    row: tl.tensor,
    num_ranges: tl.tensor,
) -> tl.tensor:
    """(low, high) with all of the row's ranges that hold any of the positions `first` to `last`."""
    if ranges_ptr is not None:
        ranges_ptr += row.to(tl.int64) * num_ranges * 2
        for i in range(num_ranges):
            start = tl.load(ranges_ptr + 2 * i)
            end = tl.load(ranges_ptr + 2 * i + 1)
            inside = (start < end) & (start <= last) & (first < end)
            low = tl.where(inside, tl.minimum(low, tl.maximum(start, 0)), low)
            high = tl.where(inside, tl.maximum(high, tl.minimum(end, seq_len)), high)
    return low, high


@triton.jit
def key_ranges(
    first: tl.tensor,
    last: tl.tensor,
    seq_len: tl.tensor,
    reach: tl.tensor,
    ranges_ptr: tl.tensor,
    row: tl.tensor,
    num_ranges: tl.tensor,
    CAUSAL: tl.constexpr,
    REACH: tl.constexpr,
    N: tl.constexpr,
) -> tl.tensor:
    """Keys [begin, end) that a tile sees, and [full_begin, full_end) that all its rows see.

    The tile's rows have the positions `first` to `last`. The full range is in whole steps of N
    keys, and leaves out what only ranges add.
    """
    begin, full_end = key_bounds(first, seq_len, reach, CAUSAL, REACH)
    full_begin, end = key_bounds(last, seq_len, reach, CAUSAL, REACH)
    begin, end = widened(begin, end, first, last, seq_len, ranges_ptr, row, num_ranges)
    full_begin = (full_begin + N - 1) // N * N
    full_end = full_end // N * N
    return begin, end, full_begin, full_end


@triton.jit
def decode_first_key(
    seq_len: tl.tensor,
    reach: tl.tensor,
    ranges_ptr: tl.tensor,
    row: tl.tensor,
    num_ranges: tl.tensor,
    REACH: tl.constexpr,
) -> tl.tensor:
    """The first key that the last token of a sequence sees; the last is its own."""
    first = seq_len * 0
    if REACH != "all":
        last = seq_len - 1
        first, end = key_bounds(last, seq_len, reach, True, REACH)
        first, end = widened(first, end, last, last, seq_len, ranges_ptr, row, num_ranges)
    return first
