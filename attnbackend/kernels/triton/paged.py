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

from .config import TileConfig, batch_kind, heads_per_tile, pieces_per_kv_head, tile_config
from .launch import on_device_of, prepare
from .tile import (
    attend,
    head_scale,
    load_query,
    natural_lse,
    no_values,
    normalise,
    start_state,
    store_rows,
)


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


@triton.jit
def key_ranges(
    context: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    seq_len: tl.tensor,
    window: tl.tensor,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    N: tl.constexpr,
) -> tl.tensor:
    """Keys [begin, end) that a tile sees, and [full_begin, full_end) that all its rows see.

    The tile's tokens are `first` to `last` of their request, at positions `context` + token.
    The full range is in whole steps of N keys.
    """
    end = seq_len
    full_end = seq_len
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(end, context + last + 1))
        full_end = tl.maximum(0, tl.minimum(full_end, context + first + 1))
    begin = seq_len * 0
    full_begin = begin
    if HAS_WINDOW:
        begin = tl.maximum(begin, context + first - window + 1)
        full_begin = tl.maximum(full_begin, context + last - window + 1)
    full_begin = (full_begin + N - 1) // N * N
    full_end = full_end // N * N
    return begin, end, full_begin, full_end


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "window", "table_row"],
    do_not_specialize_on_alignment=[
        "lse_ptr",
        "starts_ptr",
        "seq_lens_ptr",
        "table_ptr",
        "alibi_ptr",
        "sink_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
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
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
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
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    DOT: tl.constexpr,
    PRECISE: tl.constexpr,
    Q_FMT: tl.constexpr,
    K_FMT: tl.constexpr,
    V_FMT: tl.constexpr,
    OUT_FMT: tl.constexpr,
    SINK_FMT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    HAS_ALIBI: tl.constexpr = alibi_ptr is not None
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
    keep_sink = keep & (head < tl.where(seq_len > 0, GROUP, 0))
    head += kv_head * GROUP
    token64 = (q_begin + token).to(tl.int64)
    head64 = head.to(tl.int64)
    position = context + token

    q = load_query(q_ptr, token64 * q_token + head64 * q_head, keep, D, D_PAD, Q_FMT, DOT)
    row_max, row_sum = start_state(sink_ptr, head, keep_sink, SINK_FMT, PRECISE)
    acc = no_values(M, DV_PAD, PRECISE)
    slope = row_max
    if HAS_ALIBI:
        slope = tl.load(alibi_ptr + head, mask=keep, other=0.0)
    kv_head64 = kv_head.to(tl.int64)
    k_ptr += kv_head64 * k_head
    v_ptr += kv_head64 * v_head
    table_ptr += row_or_0.to(tl.int64) * table_row
    scale = scale * head_scale(k_scale_ptr, kv_head, k_scale_head)

    last = tl.minimum(first + Q, q_len) - 1
    begin, end, full_begin, full_end = key_ranges(
        context, first, last, seq_len, window, CAUSAL, HAS_WINDOW, N
    )
    if HAS_WINDOW:
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q, position, slope, k_ptr, v_ptr, table_ptr,
            begin // N * N, tl.minimum(full_begin, end), begin, end,
            scale, soft_cap, window, k_block, k_slot, v_block, v_slot,
            True, CAUSAL, HAS_WINDOW, HAS_CAP, HAS_ALIBI, S, N, D, DV, D_PAD, DV_PAD,
            K_FMT, V_FMT, DOT, PRECISE,
        )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, position, slope, k_ptr, v_ptr, table_ptr,
        full_begin, full_end, begin, end,
        scale, soft_cap, window, k_block, k_slot, v_block, v_slot,
        False, CAUSAL, HAS_WINDOW, HAS_CAP, HAS_ALIBI, S, N, D, DV, D_PAD, DV_PAD,
        K_FMT, V_FMT, DOT, PRECISE,
    )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, position, slope, k_ptr, v_ptr, table_ptr,
        tl.maximum(full_begin, full_end), end, begin, end,
        scale, soft_cap, window, k_block, k_slot, v_block, v_slot,
        True, CAUSAL, HAS_WINDOW, HAS_CAP, HAS_ALIBI, S, N, D, DV, D_PAD, DV_PAD,
        K_FMT, V_FMT, DOT, PRECISE,
    )  # fmt: skip

    rows = normalise(acc, row_sum) * head_scale(v_scale_ptr, kv_head, v_scale_head)
    store_rows(out_ptr, token64 * out_token + head64 * out_head, rows, keep, DV, DV_PAD, OUT_FMT)
    if lse_ptr is not None:
        lse_offsets = token64 * lse_token + head64 * lse_head
        tl.store(lse_ptr + lse_offsets, natural_lse(row_max, row_sum, PRECISE), mask=keep)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    tile: TileConfig | None = None,
) -> None:
    """Attention of new tokens over a paged cache that already holds their keys and values.

    query [T, H, D] and output [T, H, Dv]: float32, float16 or bfloat16; key_cache [B, S, Hk, D]
    and value_cache [B, S, Hk, Dv]: those or float8_e4m3fn, float8_e5m2, any strides but the
    last; query_start_loc [R + 1], seq_lens [R] (context plus query) and block_table [R, W]:
    int32; alibi_slopes float32 [H]; sinks [H]; k_scale, v_scale float32 [1] or [Hk], real
    value = stored * scale; lse float32 [T, H], written as natural logarithms.

    Masks are aligned bottom-right. Order: scale, soft-cap, alibi, mask, softmax with the sink
    in its denominator. Every row of output is written: zeros (and -inf in lse) for requests of
    seq_len 0 and for tokens past query_start_loc[R]. `tile` replaces the chosen tile sizes.

    Raises ValueError for shapes, dtypes or options outside of these.
    """
    launch = prepare(
        "paged_attention", query, key_cache, value_cache, output, query_start_loc, seq_lens,
        block_table, scale, causal, sliding_window, logits_soft_cap, alibi_slopes, sinks,
        k_scale, v_scale, lse,
    )  # fmt: skip
    plan, tokens, rows = launch.plan, launch.tokens, launch.rows
    if tokens == 0:
        return
    group = plan.group
    if tile is None:
        tile = tile_config(plan.product, plan.width, group, batch_kind(tokens, rows))
    heads, pieces = heads_per_tile(group, tile.block_m), pieces_per_kv_head(group, tile.block_m)
    # One tile more for each row than its tokens fill, and one for tokens past the last row.
    tiles = tokens // (tile.block_m // heads) + rows + 1
    with on_device_of(query):
        paged_attention_kernel[(tiles, launch.kv_heads * pieces)](
            *launch.tensors, *launch.numbers, tokens, rows, **plan.constants,
            M=tile.block_m, N=tile.block_n, HEADS=heads, PIECES=pieces,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
