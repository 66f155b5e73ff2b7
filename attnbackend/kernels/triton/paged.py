"""Paged attention for any mix of prefill and decode: one kernel, no lengths on the host.

Each program handles one tile: consecutive query tokens of one request, times the query heads
of one kv head. The grid covers the worst case that the shapes allow, and a program finds its
request by itself.

Legend: T tokens, R rows (requests), H query heads, Hk kv heads, D and Dv head sizes, B cache
blocks, S block size, W table width, M rows of a tile, N keys of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import paged_hopper_launch as hopper
from .bounds import key_bounds, key_ranges, widened
from .config import TileConfig, batch_kind, heads_per_tile, is_prefill, pieces_per_kv_head, tile_config
from .launch import NO_OWN_TOKENS, Launch, OwnTokens, on_device_of, own_tokens, prepare
from .partials import launch_merge_tokens, partial_buffer, split_size, store_partial
from .quantize import group_places, store_output
from .splits import MIN_SPLIT_KEYS, decode_num_splits, processor_count
from .tile import (
    all_columns,
    attend_interval,
    head_scale,
    load_query,
    natural_lse,
    no_values,
    normalise,
    start_state,
)

WHERE = "paged_attention"


@triton.jit
def find_row(starts_ptr: tl.tensor, tile: tl.tensor, num_rows: tl.tensor, Q: tl.constexpr) -> tl.tensor:
    """The row that a tile belongs to; `num_rows` for tokens past the last row.

    Row i owns the tiles from starts[i] // Q + i: at least as many as its tokens need. Those
    starts ascend, so the row is the number of starts up to the tile, less one; counting takes
    one round trip to memory for 128 rows, where a binary search takes seven.
    """
    count = 0
    for first in range(0, num_rows + 1, 128):
        row = first + tl.arange(0, 128)
        inside = row <= num_rows
        start = tl.load(starts_ptr + row, mask=inside, other=0) // Q + row
        count += tl.sum((inside & (start <= tile)).to(tl.int32))
    return count - 1


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_ranges", "num_splits", "reach", "table_row"],
    do_not_specialize_on_alignment=[
        "lse_ptr",
        "starts_ptr",
        "seq_lens_ptr",
        "table_ptr",
        "alibi_ptr",
        "sink_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
        "ranges_ptr",
        "out_scale_ptr",
        "block_scale_ptr",
        "partial_ptr",
    ],
)
def paged_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    table_ptr: tl.tensor,
    alibi_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    ranges_ptr: tl.tensor,
    out_scale_ptr: tl.tensor,
    block_scale_ptr: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    reach: tl.tensor,
    num_ranges: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    k_head: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    v_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    lse_token: tl.tensor,
    lse_head: tl.tensor,
    table_row: tl.tensor,
    k_scale_head: tl.tensor,
    v_scale_head: tl.tensor,
    block_scale_token: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    num_splits: tl.tensor,
    partial_ptr: tl.tensor,
    new_k_ptr: tl.tensor,
    new_v_ptr: tl.tensor,
    new_k_token: tl.tensor,
    new_k_head: tl.tensor,
    new_v_token: tl.tensor,
    new_v_head: tl.tensor,
    CAUSAL: tl.constexpr,
    REACH: tl.constexpr,
    HAS_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    DOT: tl.constexpr,
    PRECISE: tl.constexpr,
    OUT_LIMIT: tl.constexpr,
    OUT_GROUP: tl.constexpr,
    Q_FMT: tl.constexpr,
    K_FMT: tl.constexpr,
    V_FMT: tl.constexpr,
    OUT_FMT: tl.constexpr,
    SINK_FMT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    ALIKE: tl.constexpr,
    NEW_ALIKE: tl.constexpr,
    PAIRS: tl.constexpr,
    SIGNED: tl.constexpr,
) -> None:
    HAS_ALIBI: tl.constexpr = alibi_ptr is not None
    # Where not, all rows of a tile see the same keys.
    BY_ROW: tl.constexpr = CAUSAL or REACH != "all"
    HAS_LOW: tl.constexpr = REACH != "all"
    Q: tl.constexpr = M // HEADS
    # The last tile of a causal prefill sees the most keys: it starts first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // PIECES
    row = find_row(starts_ptr, tile, num_rows, Q)
    is_tail = row == num_rows
    row_or_0 = tl.where(is_tail, 0, row)
    q_begin = tl.load(starts_ptr + row)
    q_end = tl.load(starts_ptr + row + 1, mask=row < num_rows, other=0)
    q_len = tl.where(is_tail, num_tokens, q_end) - q_begin
    first = (tile - (q_begin // Q + row)) * Q
    if first >= q_len:
        return
    seq_len = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    context = seq_len - q_len

    lane = tl.arange(0, M)
    token = first + lane // HEADS
    head = lane % HEADS + tl.program_id(1) % PIECES * HEADS
    keep = (lane < Q * HEADS) & (token < q_len) & (head < GROUP)
    # The sink counts once, in the first split.
    keep_sink = keep & (head < tl.where((seq_len > 0) & (tl.program_id(2) == 0), GROUP, 0))
    head += kv_head * GROUP
    token64 = (q_begin + token).to(tl.int64)
    head64 = head.to(tl.int64)
    position = context + token

    scale = scale * head_scale(k_scale_ptr, kv_head, k_scale_head)
    q_rows = q_ptr + token64 * q_token + head64 * q_head
    q, scale = load_query(q_rows, keep, scale, D, D_PAD, Q_FMT, DOT, SIGNED)
    row_max, row_sum = start_state(sink_ptr, head, keep_sink, SINK_FMT, PRECISE)
    acc, odd = no_values(M, DV_PAD, PRECISE, PAIRS)
    slope = row_max
    if HAS_ALIBI:
        slope = tl.load(alibi_ptr + head, mask=keep, other=0.0)
    kv_head64 = kv_head.to(tl.int64)
    k_ptr += kv_head64 * k_head
    v_ptr += kv_head64 * v_head
    if S == 0:
        key_begin = q_begin
        if table_ptr is not None:
            key_begin = tl.load(table_ptr + row_or_0)
        k_ptr += key_begin.to(tl.int64) * k_slot
        v_ptr += key_begin.to(tl.int64) * v_slot
    else:
        table_ptr += row_or_0.to(tl.int64) * table_row

    last = tl.minimum(first + Q, q_len) - 1
    low, high = key_bounds(position, seq_len, reach, CAUSAL, REACH)
    low, high = widened(low, high, position, position, seq_len, ranges_ptr, row_or_0, num_ranges)
    begin, end, full_begin, full_end = key_ranges(
        context + first, context + last, seq_len, reach, ranges_ptr, row_or_0, num_ranges,
        CAUSAL, REACH, N,
    )  # fmt: skip
    start = begin // N * N
    stop = end
    if partial_ptr is not None:
        size = split_size(end - start, num_splits, MIN_KEYS, N)
        start += tl.program_id(2) * size
        stop = tl.minimum(start + size, end)
        full_end = tl.minimum(full_end, start + size)
    in_cache = True if new_k_ptr is None else context != 0
    if in_cache:
        acc, odd, row_max, row_sum = attend_interval(
            acc, odd, row_max, row_sum, q, position, low, high, slope, k_ptr, v_ptr, table_ptr,
            start, full_begin, full_end, stop, begin, end,
            scale, soft_cap, k_block, k_slot, v_block, v_slot,
            BY_ROW, HAS_LOW, HAS_CAP, HAS_ALIBI, S, N, D, DV, D_PAD, DV_PAD,
            K_FMT, V_FMT, DOT, PRECISE, ALIKE, PAIRS,
        )  # fmt: skip
    if new_k_ptr is not None:  # noqa: SIM102
        # One after the other the keys of a new sequence are found without a table.
        if context == 0:
            new_k_ptr += q_begin.to(tl.int64) * new_k_token + kv_head64 * new_k_head
            new_v_ptr += q_begin.to(tl.int64) * new_v_token + kv_head64 * new_v_head
            acc, odd, row_max, row_sum = attend_interval(
                acc, odd, row_max, row_sum, q, position, low, high, slope, new_k_ptr, new_v_ptr, table_ptr,
                start, full_begin, full_end, stop, begin, end,
                scale, soft_cap, 0, new_k_token, 0, new_v_token,
                BY_ROW, HAS_LOW, HAS_CAP, HAS_ALIBI, 0, N, D, DV, D_PAD, DV_PAD,
                K_FMT, V_FMT, DOT, PRECISE, NEW_ALIKE, PAIRS,
            )  # fmt: skip

    acc = all_columns(acc, odd, M, DV_PAD, PAIRS)
    value_scale = head_scale(v_scale_ptr, kv_head, v_scale_head)
    if partial_ptr is None:
        rows = normalise(acc, row_sum) * value_scale
        store_output(
            out_ptr, token64 * out_token + head64 * out_head, rows, keep, out_scale_ptr, block_scale_ptr,
            group_places(token64, head64, block_scale_token, DV, OUT_GROUP),
            DV, DV_PAD, OUT_FMT, OUT_LIMIT, OUT_GROUP,
        )  # fmt: skip
        if lse_ptr is not None:
            lse_offsets = token64 * lse_token + head64 * lse_head
            tl.store(lse_ptr + lse_offsets, natural_lse(row_max, row_sum, PRECISE), mask=keep)
    else:
        num_heads = tl.num_programs(1) // PIECES * GROUP
        part = (token64 * num_heads + head64) * num_splits + tl.program_id(2)
        parts = num_tokens.to(tl.int64) * num_heads * num_splits
        store_partial(partial_ptr, part, parts, acc * value_scale, row_max, row_sum, keep, DV, DV_PAD)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor | None,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bidirectional_ranges: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    output_block_scale: torch.Tensor | None = None,
    key_start_loc: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    num_splits: int | None = 1,
    tile: TileConfig | None = None,
) -> None:
    """Attention of new tokens over a paged cache that already holds their keys and values.

    query [T, H, D] and output [T, H, Dv]: float32, float16 or bfloat16; key_cache [B, S, Hk, D]
    and value_cache [B, S, Hk, Dv]: those or float8_e4m3fn, float8_e5m2, any strides but the
    last; query_start_loc [R + 1], seq_lens [R] (context plus query) and block_table [R, W]:
    int32; alibi_slopes float32 [H], adds -slope * |key - query position|; sinks [H];
    bidirectional_ranges int32 [R, G, 2], positions [start, end) that see all of each other, for
    causal attention over a cache; k_scale, v_scale float32 [1] or [Hk], real value = stored *
    scale; lse float32 [T, H], written as natural logarithms.

    output float8_e4m3fn or float8_e5m2: real value = stored * scale, with output_scale float32 [1] given, or
    output_block_scale float32 [T, G] written, one for each of a token's G groups of H * Dv / G elements; a
    group lies in one head, and both sizes are powers of two.

    block_table None: there is no cache. key_cache is key [T, Hk, D] and value_cache value
    [T, Hk, Dv], and a row's keys are its own tokens: query_start_loc[i] and the seq_lens[i] - 1
    after it, at most its query tokens. A window is two-sided there unless attention is causal.
    key_start_loc int32 [R + 1]: a row's keys are those from key_start_loc[i] on instead, of tensors
    [S, Hk, D] and [S, Hk, Dv] with as many keys as they like.

    key [T, Hk, D], value [T, Hk, Dv]: the new tokens' own, which the cache holds too. In batches of
    long queries they are read in its place for rows without context, where they are of its dtype: they
    lie one after the other.

    Masks are aligned bottom-right. Order: scale, soft-cap, alibi, mask, softmax with the sink
    in its denominator. Every row of output is written: zeros (and -inf in lse) for requests of
    seq_len 0 and for tokens past query_start_loc[R]. `tile` replaces the chosen tile sizes.

    max_seq_len: bound of seq_lens, for the choice of tiles; None: what the block table has room for.

    num_splits: parts that the keys of each tile are cut into, for few tokens over many keys;
    None takes as many as fill the device, from the shapes alone.

    Raises ValueError for shapes, dtypes or options outside of these.
    """
    launch = prepare(
        WHERE, query, key_cache, value_cache, output, query_start_loc, seq_lens,
        block_table, scale, causal, sliding_window, attention_chunk_size, logits_soft_cap,
        alibi_slopes, sinks, bidirectional_ranges, k_scale, v_scale, lse, output_scale, output_block_scale,
        key_start_loc,
    )  # fmt: skip
    if launch.tokens == 0:
        return
    plan, kind = launch.plan, batch_kind(launch.tokens, launch.rows)
    own = NO_OWN_TOKENS
    if key is not None and value is not None and block_table is not None and is_prefill(kind):
        own = own_tokens(WHERE, launch, key, value)
    if tile is None and hopper.problem(launch, num_splits) is None:
        with on_device_of(query):
            hopper.launch_hopper(launch, own, min(launch.max_keys, max_seq_len or launch.max_keys))
        return
    if tile is None:
        tile = tile_config(plan.product, plan.width, plan.group, kind, launch.has_float8_keys)
    with on_device_of(query):
        _launch(launch, own, tile, num_splits)


def _launch(launch: Launch, own: OwnTokens, tile: TileConfig, num_splits: int | None) -> None:
    group, query = launch.plan.group, launch.tensors[0]
    heads, pieces = heads_per_tile(group, tile.block_m), pieces_per_kv_head(group, tile.block_m)
    full_tiles = launch.tokens // (tile.block_m // heads)
    # One tile more for each row than its tokens fill, and one for tokens past the last row.
    tiles = full_tiles + launch.rows + 1
    if num_splits is None:
        programs = max(full_tiles, launch.rows) * launch.kv_heads * pieces
        slots = tile.per_processor * processor_count(query.device)
        num_splits = decode_num_splits(programs, launch.max_keys, slots)
    partial = partial_buffer(WHERE, query, launch, launch.tokens, num_splits, None)
    paged_attention_kernel[(tiles, launch.kv_heads * pieces, num_splits)](
        *launch.tensors, *launch.numbers, launch.tokens, launch.rows, num_splits, partial,
        own.key, own.value, *own.strides, **launch.plan.constants, M=tile.block_m, N=tile.block_n,
        HEADS=heads, PIECES=pieces, MIN_KEYS=MIN_SPLIT_KEYS, ALIKE=launch.is_alike, NEW_ALIKE=own.is_alike,
        PAIRS=launch.reads_pairs(tile.block_m), SIGNED=launch.is_signed, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **_register_limit(launch, tile),
    )  # fmt: skip
    if partial is not None:
        launch_merge_tokens(launch, num_splits, partial)


def _register_limit(launch: Launch, tile: TileConfig) -> dict[str, int]:
    """Finding scales of groups takes more registers than let four of the small programs share a processor.

    Measured on an H200 without a limit: 64 requests did not all run at once, 89 microseconds instead of 70.
    """
    finds_scales = launch.plan.constants["OUT_GROUP"] > 0
    is_nvidia = launch.tensors[0].is_cuda and torch.version.cuda is not None
    return {"maxnreg": 128} if finds_scales and is_nvidia and tile.block_m == 16 else {}
