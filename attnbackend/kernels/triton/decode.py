"""Paged attention for batches where each row has at most one token: keys split over programs.

Each program takes one row, one kv head and one split of the row's keys. With more than one
split it writes its softmax state in float32, and a second kernel merges those. How many splits
there are depends on shapes alone; where they lie follows the real lengths, in the kernel.

Legend: T tokens, R rows (requests), H query heads, Hk kv heads, D and Dv head sizes, B cache
blocks, S block size, W table width, M rows of a tile (heads), N keys of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .bounds import decode_first_key
from .checks import fail
from .config import TileConfig, decode_tiles, heads_per_tile, pieces_per_kv_head
from .launch import Launch, on_device_of, prepare, starts_early
from .partials import merge_step, merged, partial_buffer, split_size, store_head, store_partial
from .quantize import group_places, store_output
from .splits import MIN_SPLIT_KEYS, decode_shape, processor_count, split_unit
from .tile import (
    all_columns,
    attend,
    head_scale,
    load_query,
    natural_lse,
    no_values,
    normalise,
    start_state,
)

WHERE = "paged_decode_attention"


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
def decode_kernel(
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
    UNIT: tl.constexpr,
    ALIKE: tl.constexpr,
    PAIRS: tl.constexpr,
    SIGNED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    HAS_ALIBI: tl.constexpr = alibi_ptr is not None
    if EARLY:
        # The merge may take its place on the device as soon as all programs have theirs.
        gdc_launch_dependents()
    kv_head = tl.program_id(0) // PIECES
    split = tl.program_id(1)
    row = tl.program_id(2)
    q_begin = tl.load(starts_ptr + row)
    q_len = tl.load(starts_ptr + row + 1) - q_begin
    seq_len = tl.load(seq_lens_ptr + row)

    lane = tl.arange(0, M)
    head = lane + tl.program_id(0) % PIECES * HEADS
    keep = (lane < HEADS) & (head < GROUP)
    # The sink counts once, in the first split.
    keep_sink = keep & (head < tl.where((seq_len > 0) & (split == 0), GROUP, 0))
    head += kv_head * GROUP
    head64 = head.to(tl.int64)
    if partial_ptr is None:  # noqa: SIM102
        # T <= R, so among the rows there is one for each token past the last row's.
        if (row >= tl.load(starts_ptr + num_rows)) & (row < num_tokens):
            token64 = row.to(tl.int64)
            zeros = tl.zeros([M, DV_PAD], tl.float32)
            offsets = token64 * out_token + head64 * out_head
            store_output(
                out_ptr, offsets, zeros, keep, out_scale_ptr, block_scale_ptr,
                group_places(token64, head64, block_scale_token, DV, OUT_GROUP),
                DV, DV_PAD, OUT_FMT, OUT_LIMIT, OUT_GROUP,
            )  # fmt: skip
            if lse_ptr is not None:
                empty = tl.full([M], float("-inf"), tl.float32)
                tl.store(lse_ptr + token64 * lse_token + head64 * lse_head, empty, mask=keep)
    if q_len <= 0:
        return
    first_key = decode_first_key(seq_len, reach, ranges_ptr, row, num_ranges, REACH)
    begin = first_key // N * N
    size = split_size(seq_len - begin, num_splits, MIN_KEYS, UNIT)
    start = begin + split * size
    stop = tl.minimum(start + size, seq_len)
    if (split > 0) & (start >= stop):
        return

    token64 = q_begin.to(tl.int64)
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
    table_ptr += row.to(tl.int64) * table_row
    # The token is the last of its sequence: what lies outside of [first_key, stop) is all there is to mask.
    position = lane * 0 + seq_len - 1
    acc, odd, row_max, row_sum = attend(
        acc, odd, row_max, row_sum, q, position, position, position, slope, k_ptr, v_ptr, table_ptr,
        start, stop, first_key, stop,
        scale, soft_cap, k_block, k_slot, v_block, v_slot,
        True, False, False, HAS_CAP, HAS_ALIBI, S, N, D, DV, D_PAD, DV_PAD,
        K_FMT, V_FMT, DOT, PRECISE, ALIKE, PAIRS,
    )  # fmt: skip
    acc = all_columns(acc, odd, M, DV_PAD, PAIRS)
    # Not silently one token of several: the promise of one a row was broken.
    row_sum = tl.where(q_len > 1, float("nan"), row_sum)
    value_scale = head_scale(v_scale_ptr, kv_head, v_scale_head)
    if partial_ptr is None:
        rows = normalise(acc, row_sum) * value_scale
        offsets = token64 * out_token + head64 * out_head
        store_output(
            out_ptr, offsets, rows, keep, out_scale_ptr, block_scale_ptr,
            group_places(token64, head64, block_scale_token, DV, OUT_GROUP),
            DV, DV_PAD, OUT_FMT, OUT_LIMIT, OUT_GROUP,
        )  # fmt: skip
        if lse_ptr is not None:
            lse = natural_lse(row_max, row_sum, PRECISE)
            tl.store(lse_ptr + token64 * lse_token + head64 * lse_head, lse, mask=keep)
    else:
        num_heads = tl.num_programs(0) // PIECES * GROUP
        part = (row.to(tl.int64) * num_heads + head64) * num_splits + split
        parts = num_rows.to(tl.int64) * num_heads * num_splits
        store_partial(partial_ptr, part, parts, acc * value_scale, row_max, row_sum, keep, DV, DV_PAD)


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_ranges", "num_splits", "reach"],
    do_not_specialize_on_alignment=[
        "lse_ptr",
        "starts_ptr",
        "seq_lens_ptr",
        "ranges_ptr",
        "out_scale_ptr",
        "block_scale_ptr",
        "partial_ptr",
    ],
)
def merge_splits_kernel(
    partial_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    ranges_ptr: tl.tensor,
    out_scale_ptr: tl.tensor,
    block_scale_ptr: tl.tensor,
    block_scale_token: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    lse_token: tl.tensor,
    lse_head: tl.tensor,
    reach: tl.tensor,
    num_ranges: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    num_splits: tl.tensor,
    REACH: tl.constexpr,
    OUT_FMT: tl.constexpr,
    OUT_LIMIT: tl.constexpr,
    OUT_GROUP: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    N: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    STEP: tl.constexpr,
    PRECISE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    row = tl.program_id(1)
    num_heads = tl.num_programs(0)
    q_begin = tl.load(starts_ptr + row)
    q_end = tl.load(starts_ptr + row + 1)
    last_end = tl.load(starts_ptr + num_rows)
    seq_len = tl.load(seq_lens_ptr + row)
    if EARLY:
        gdc_wait()
    if (row >= last_end) & (row < num_tokens):
        store_head(
            out_ptr, row, head, tl.zeros([DV_PAD], tl.float32), out_scale_ptr, block_scale_ptr,
            block_scale_token, out_token, out_head, DV, DV_PAD, OUT_FMT, OUT_LIMIT, OUT_GROUP,
        )  # fmt: skip
        if lse_ptr is not None:
            tl.store(lse_ptr + row.to(tl.int64) * lse_token + head * lse_head, float("-inf"))
    if q_end == q_begin:
        return

    first_key = decode_first_key(seq_len, reach, ranges_ptr, row, num_ranges, REACH)
    num_keys = seq_len - first_key // N * N
    size = split_size(num_keys, num_splits, MIN_KEYS, UNIT)
    used = tl.maximum((num_keys + size - 1) // size, 1)
    first_part = (row.to(tl.int64) * num_heads + head) * num_splits
    parts = num_rows.to(tl.int64) * num_heads * num_splits
    mean, top, total = merged(partial_ptr, first_part, parts, used, DV, DV_PAD, STEP, PRECISE)
    store_head(
        out_ptr, q_begin, head, mean, out_scale_ptr, block_scale_ptr,
        block_scale_token, out_token, out_head, DV, DV_PAD, OUT_FMT, OUT_LIMIT, OUT_GROUP,
    )  # fmt: skip
    if lse_ptr is not None:
        lse = natural_lse(top, total, PRECISE)
        tl.store(lse_ptr + q_begin.to(tl.int64) * lse_token + head * lse_head, lse)


def paged_decode_attention(
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
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
    tile: TileConfig | None = None,
) -> None:
    """`paged_attention` for batches in which every row has at most one token.

    The tensors are those of `paged_attention`. That no row has two tokens is the caller's
    promise: lengths stay on the device. A row of more tokens gets NaN for its first, and its others
    are left unwritten.

    num_splits: parts that each row's keys are cut into; None takes `decode_num_splits` of the
    shapes and the device, so a captured graph keeps it. workspace: contiguous float32 of at
    least `decode_workspace_size(R, H, Dv, num_splits)` elements, overwritten; None allocates.

    Raises ValueError as `paged_attention` does, for T > R, num_splits < 1 and for a workspace
    that does not fit.
    """
    launch = prepare(
        WHERE, query, key_cache, value_cache, output, query_start_loc, seq_lens, block_table,
        scale, causal, sliding_window, attention_chunk_size, logits_soft_cap, alibi_slopes, sinks,
        bidirectional_ranges, k_scale, v_scale, lse, output_scale, output_block_scale,
    )  # fmt: skip
    plan, rows = launch.plan, launch.rows
    if launch.tokens > rows:
        fail(WHERE, "number of tokens", launch.tokens, f"at most one a row, {rows} here")
    if launch.tokens == 0:
        return
    choice = decode_tiles(plan.product, plan.width, plan.group, launch.has_float8_keys)
    tiles = choice if tile is None else (tile,)
    programs = rows * launch.kv_heads * pieces_per_kv_head(plan.group, tiles[0].block_m)
    tile, fitting = decode_shape(tiles, programs, launch.max_keys, processor_count(query.device))
    num_splits = fitting if num_splits is None else num_splits
    partial = partial_buffer(WHERE, query, launch, rows, num_splits, workspace)
    with on_device_of(query):
        _launch_decode(launch, tile, num_splits, partial)
        if partial is not None:
            _launch_merge(launch, tile, num_splits, partial)


def _launch_decode(launch: Launch, tile: TileConfig, num_splits: int, partial: torch.Tensor | None) -> None:
    group = launch.plan.group
    pieces = pieces_per_kv_head(group, tile.block_m)
    decode_kernel[(launch.kv_heads * pieces, num_splits, launch.rows)](
        *launch.tensors, *launch.numbers, launch.tokens, launch.rows, num_splits, partial,
        **launch.plan.constants, M=tile.block_m, N=tile.block_n,
        HEADS=heads_per_tile(group, tile.block_m), PIECES=pieces, MIN_KEYS=MIN_SPLIT_KEYS,
        UNIT=split_unit(launch.plan.constants["S"], tile.block_n),
        ALIKE=launch.is_alike, PAIRS=launch.reads_pairs(tile.block_m), SIGNED=launch.is_signed,
        EARLY=partial is not None and starts_early(launch.tensors[0].device),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _launch_merge(launch: Launch, tile: TileConfig, num_splits: int, partial: torch.Tensor) -> None:
    constants = launch.plan.constants
    out, lse, starts, seq_lens = launch.tensors[3:7]
    early = starts_early(out.device)
    merge_splits_kernel[(launch.heads, launch.rows)](
        partial, out, lse, starts, seq_lens, launch.ranges, *launch.out_scales, *launch.out_strides,
        *launch.reach, launch.tokens, launch.rows, num_splits, constants["REACH"], constants["OUT_FMT"],
        constants["OUT_LIMIT"], constants["OUT_GROUP"], launch.value_size,
        constants["DV_PAD"], tile.block_n, MIN_SPLIT_KEYS, split_unit(constants["S"], tile.block_n),
        merge_step(num_splits, constants["DV_PAD"]), constants["PRECISE"], early, num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
