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

from .checks import check_same_device, fail
from .codec import encode
from .config import TileConfig, heads_per_tile, pieces_per_kv_head, tile_config
from .launch import Launch, on_device_of, prepare
from .splits import MIN_SPLIT_KEYS, decode_num_splits, decode_workspace_size, processor_count
from .tile import (
    attend,
    divide,
    head_scale,
    load_query,
    natural_lse,
    no_values,
    normalise,
    power,
    start_state,
    store_rows,
)

WHERE = "paged_decode_attention"
MERGE_STEP = 16
"""Partial results that the merge reads at once."""


@triton.jit
def split_size(
    num_keys: tl.tensor, num_splits: tl.tensor, MIN_KEYS: tl.constexpr, N: tl.constexpr
) -> tl.tensor:
    """Keys of one split: whole steps, and not so few that merging costs more than it saves."""
    size = tl.maximum((num_keys + num_splits - 1) // num_splits, MIN_KEYS)
    return (size + N - 1) // N * N


@triton.jit
def first_step(seq_len: tl.tensor, window: tl.tensor, HAS_WINDOW: tl.constexpr, N: tl.constexpr) -> tl.tensor:
    """Where the keys that the last token sees begin, in whole steps."""
    begin = seq_len * 0
    if HAS_WINDOW:
        begin = tl.maximum(begin, seq_len - window) // N * N
    return begin


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_splits", "window", "table_row"],
    do_not_specialize_on_alignment=[
        "lse_ptr",
        "starts_ptr",
        "seq_lens_ptr",
        "table_ptr",
        "alibi_ptr",
        "sink_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
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
    num_splits: tl.tensor,
    partial_ptr: tl.tensor,
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
    MIN_KEYS: tl.constexpr,
) -> None:
    HAS_ALIBI: tl.constexpr = alibi_ptr is not None
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
            store_rows(out_ptr, offsets, zeros, keep, DV, DV_PAD, OUT_FMT)
            if lse_ptr is not None:
                empty = tl.full([M], float("-inf"), tl.float32)
                tl.store(lse_ptr + token64 * lse_token + head64 * lse_head, empty, mask=keep)
    if q_len <= 0:
        return
    begin = first_step(seq_len, window, HAS_WINDOW, N)
    size = split_size(seq_len - begin, num_splits, MIN_KEYS, N)
    start = begin + split * size
    stop = tl.minimum(start + size, seq_len)
    if (split > 0) & (start >= stop):
        return

    token64 = q_begin.to(tl.int64)
    q = load_query(q_ptr, token64 * q_token + head64 * q_head, keep, D, D_PAD, Q_FMT, DOT)
    row_max, row_sum = start_state(sink_ptr, head, keep_sink, SINK_FMT, PRECISE)
    acc = no_values(M, DV_PAD, PRECISE)
    slope = row_max
    if HAS_ALIBI:
        slope = tl.load(alibi_ptr + head, mask=keep, other=0.0)
    kv_head64 = kv_head.to(tl.int64)
    k_ptr += kv_head64 * k_head
    v_ptr += kv_head64 * v_head
    table_ptr += row.to(tl.int64) * table_row
    scale = scale * head_scale(k_scale_ptr, kv_head, k_scale_head)
    first_key = seq_len * 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_key, seq_len - window)

    # The token is the last of its sequence: [first_key, seq_len) is all that there is to mask.
    position = lane * 0 + seq_len - 1
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, position, slope, k_ptr, v_ptr, table_ptr,
        start, stop, first_key, seq_len,
        scale, soft_cap, window, k_block, k_slot, v_block, v_slot,
        True, False, False, HAS_CAP, HAS_ALIBI, S, N, D, DV, D_PAD, DV_PAD,
        K_FMT, V_FMT, DOT, PRECISE,
    )  # fmt: skip
    # Not silently one token of several: the promise of one a row was broken.
    row_sum = tl.where(q_len > 1, float("nan"), row_sum)
    value_scale = head_scale(v_scale_ptr, kv_head, v_scale_head)
    if partial_ptr is None:
        rows = normalise(acc, row_sum) * value_scale
        offsets = token64 * out_token + head64 * out_head
        store_rows(out_ptr, offsets, rows, keep, DV, DV_PAD, OUT_FMT)
        if lse_ptr is not None:
            lse = natural_lse(row_max, row_sum, PRECISE)
            tl.store(lse_ptr + token64 * lse_token + head64 * lse_head, lse, mask=keep)
    else:
        num_heads = tl.num_programs(0) // PIECES * GROUP
        part = (row.to(tl.int64) * num_heads + head64) * num_splits + split
        store_rows(partial_ptr, part * DV, (acc * value_scale).to(tl.float32), keep, DV, DV_PAD, "native")
        parts = num_rows.to(tl.int64) * num_heads * num_splits
        tl.store(partial_ptr + parts * DV + part, row_max, mask=keep)
        tl.store(partial_ptr + parts * (DV + 1) + part, row_sum.to(tl.float32), mask=keep)


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_splits", "window"],
    do_not_specialize_on_alignment=["lse_ptr", "starts_ptr", "seq_lens_ptr", "partial_ptr"],
)
def merge_splits_kernel(
    partial_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    lse_token: tl.tensor,
    lse_head: tl.tensor,
    window: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    num_splits: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    OUT_FMT: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    N: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISE: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    row = tl.program_id(1)
    num_heads = tl.num_programs(0)
    columns = tl.arange(0, DV_PAD)
    inside = columns < DV
    out_ptr += head.to(tl.int64) * out_head
    q_begin = tl.load(starts_ptr + row)
    if (row >= tl.load(starts_ptr + num_rows)) & (row < num_tokens):
        zeros = tl.zeros([DV_PAD], tl.float32)
        tail = encode(zeros, out_ptr.dtype.element_ty, OUT_FMT)
        tl.store(out_ptr + row.to(tl.int64) * out_token + columns, tail, mask=inside)
        if lse_ptr is not None:
            tl.store(lse_ptr + row.to(tl.int64) * lse_token + head * lse_head, float("-inf"))
    if tl.load(starts_ptr + row + 1) == q_begin:
        return

    seq_len = tl.load(seq_lens_ptr + row)
    num_keys = seq_len - first_step(seq_len, window, HAS_WINDOW, N)
    size = split_size(num_keys, num_splits, MIN_KEYS, N)
    used = tl.maximum((num_keys + size - 1) // size, 1)
    first_part = (row.to(tl.int64) * num_heads + head) * num_splits
    parts = num_rows.to(tl.int64) * num_heads * num_splits
    max_parts = partial_ptr + parts * DV + first_part
    top = float("-inf")
    for first in range(0, used, STEP):
        split = first + tl.arange(0, STEP)
        part_max = tl.load(max_parts + split, mask=split < used, other=float("-inf"))
        top = tl.maximum(top, tl.max(part_max, 0))
    pivot = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    acc = tl.zeros([DV_PAD], tl.float32)
    for first in range(0, used, STEP):
        split = first + tl.arange(0, STEP)
        part_max = tl.load(max_parts + split, mask=split < used, other=float("-inf"))
        part_sum = tl.load(max_parts + parts + split, mask=split < used, other=0.0)
        shrink = power(part_max - pivot, PRECISE)
        ptrs = partial_ptr + (first_part + split)[:, None] * DV + columns[None, :]
        part = tl.load(ptrs, mask=(split < used)[:, None] & inside[None, :], other=0.0)
        acc += tl.sum(part * shrink[:, None], 0)
        total += tl.sum(part_sum * shrink, 0)
    divisor = tl.broadcast_to(tl.where(total == 0.0, 1.0, total), acc.shape)
    merged = encode(divide(acc, divisor, PRECISE), out_ptr.dtype.element_ty, OUT_FMT)
    token64 = q_begin.to(tl.int64)
    tl.store(out_ptr + token64 * out_token + columns, merged, mask=inside)
    if lse_ptr is not None:
        lse = natural_lse(top, total, PRECISE)
        tl.store(lse_ptr + token64 * lse_token + head * lse_head, lse)


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
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
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
        scale, causal, sliding_window, logits_soft_cap, alibi_slopes, sinks, k_scale, v_scale,
        lse,
    )  # fmt: skip
    plan, rows = launch.plan, launch.rows
    if launch.tokens > rows:
        fail(WHERE, "number of tokens", launch.tokens, f"at most one a row, {rows} here")
    if launch.tokens == 0:
        return
    if tile is None:
        tile = tile_config(plan.product, plan.width, plan.group, "decode")
    if num_splits is None:
        programs = rows * launch.kv_heads * pieces_per_kv_head(plan.group, tile.block_m)
        num_splits = decode_num_splits(programs, launch.max_keys, processor_count(query.device))
    partial = _partial_buffer(query, launch, num_splits, workspace)
    with on_device_of(query):
        _launch_decode(launch, tile, num_splits, partial)
        if partial is not None:
            _launch_merge(launch, tile, num_splits, partial)


def _partial_buffer(
    query: torch.Tensor, launch: Launch, num_splits: int, workspace: torch.Tensor | None
) -> torch.Tensor | None:
    if num_splits < 1:
        fail(WHERE, "num_splits", num_splits, "None, or at least 1")
    if num_splits == 1:
        return None
    needed = decode_workspace_size(launch.rows, launch.heads, launch.value_size, num_splits)
    if workspace is None:
        return torch.empty(needed, dtype=torch.float32, device=query.device)
    check_same_device(WHERE, query, ("workspace",), (workspace,))
    fits = workspace.numel() >= needed and workspace.is_contiguous()
    if workspace.dtype != torch.float32 or not fits:
        value = f"{tuple(workspace.shape)} of {workspace.dtype}, strides {workspace.stride()}"
        fail(WHERE, "workspace", value, f"contiguous torch.float32, {needed} elements or more")
    return workspace


def _launch_decode(launch: Launch, tile: TileConfig, num_splits: int, partial: torch.Tensor | None) -> None:
    group = launch.plan.group
    pieces = pieces_per_kv_head(group, tile.block_m)
    decode_kernel[(launch.kv_heads * pieces, num_splits, launch.rows)](
        *launch.tensors, *launch.numbers, launch.tokens, launch.rows, num_splits, partial,
        **launch.plan.constants, M=tile.block_m, N=tile.block_n,
        HEADS=heads_per_tile(group, tile.block_m), PIECES=pieces, MIN_KEYS=MIN_SPLIT_KEYS,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _launch_merge(launch: Launch, tile: TileConfig, num_splits: int, partial: torch.Tensor) -> None:
    constants = launch.plan.constants
    out, lse, starts, seq_lens = launch.tensors[3:7]
    window, out_strides = launch.numbers[2], launch.numbers[11:15]
    merge_splits_kernel[(launch.heads, launch.rows)](
        partial, out, lse, starts, seq_lens, *out_strides, window,
        launch.tokens, launch.rows, num_splits, constants["HAS_WINDOW"], constants["OUT_FMT"],
        launch.value_size, constants["DV_PAD"], tile.block_n, MIN_SPLIT_KEYS, MERGE_STEP,
        constants["PRECISE"], num_warps=2,
    )  # fmt: skip
