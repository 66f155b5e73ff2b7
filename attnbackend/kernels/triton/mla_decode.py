"""Attention of absorbed queries to a paged latent cache, on any GPU and in the interpreter.

Each program takes one tile of rows (`mla_rows`) and one split of its keys. Latents are read once and serve
as keys and as values. With more than one split a program leaves its softmax state in float32 behind
(`partials`), and a second kernel merges those. Which keys a split holds follows the lengths, in the kernel.

Legend: T tokens, Q requests, H heads, B blocks, S block size, W table width, K selected keys of a token,
L kv_lora_rank and R qk_rope_head_dim, padded to powers of two in L_PAD and R_PAD, M rows of a tile, N keys
of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codec import decode
from .mla_rows import find_request, request_extent
from .partials import split_size, store_partial
from .tile import (
    LOG2_E,
    add_values,
    full_width,
    load_rows,
    natural_lse,
    no_values,
    normalise,
    power,
    query_key_product,
    start_state,
    store_rows,
)


@triton.jit
def load_latents(
    ptr: tl.tensor,
    scales_ptr: tl.tensor,
    offsets: tl.tensor,
    scale_offsets: tl.tensor,
    keep: tl.tensor,
    L: tl.constexpr,
    L_PAD: tl.constexpr,
    FMT: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """[N, L_PAD] latents in the product's dtype, zeros where not `keep`."""
    rows = decode(load_rows(ptr + offsets, keep, L, L_PAD, True), FMT)
    if DOT == tl.float32:  # noqa: SIM300 (a constexpr compares from the left)
        rows = full_width(rows)
    if scales_ptr is not None:
        GROUPS: tl.constexpr = L // 128
        ptrs = scales_ptr + scale_offsets[:, None] + tl.arange(0, GROUPS)[None, :]
        scales = tl.load(ptrs, mask=keep[:, None], other=0.0)
        grouped = tl.reshape(rows.to(tl.float32), (rows.shape[0], GROUPS, 128))
        rows = tl.reshape(grouped * scales[:, :, None], (rows.shape[0], L))
    return rows.to(DOT)


@triton.jit
def selected_keys(
    indices_ptr: tl.tensor, place: tl.tensor, stop: tl.tensor, position: tl.tensor
) -> tl.tensor:
    """(keys, whether to look at them) at places of a token's selection."""
    key = tl.load(indices_ptr + place, mask=place < stop, other=-1)
    return key, (key >= 0) & (key <= position)


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "num_splits", "num_selected", "table_row"],
    do_not_specialize_on_alignment=[
        "lse_ptr",
        "starts_ptr",
        "seq_lens_ptr",
        "table_ptr",
        "indices_ptr",
        "k_scale_ptr",
        "partial_ptr",
    ],
)
def mla_decode_kernel(
    ql_ptr: tl.tensor,
    qr_ptr: tl.tensor,
    latent_ptr: tl.tensor,
    rope_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    table_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    scale: tl.tensor,
    ql_token: tl.tensor,
    ql_head: tl.tensor,
    qr_token: tl.tensor,
    qr_head: tl.tensor,
    latent_block: tl.tensor,
    latent_slot: tl.tensor,
    rope_block: tl.tensor,
    rope_slot: tl.tensor,
    scales_block: tl.tensor,
    scales_slot: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    lse_token: tl.tensor,
    lse_head: tl.tensor,
    table_row: tl.tensor,
    indices_token: tl.tensor,
    num_tokens: tl.tensor,
    num_requests: tl.tensor,
    num_selected: tl.tensor,
    num_splits: tl.tensor,
    H: tl.constexpr,
    S: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    L_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    DOT: tl.constexpr,
    PRECISE: tl.constexpr,
    Q_FMT: tl.constexpr,
    L_FMT: tl.constexpr,
    R_FMT: tl.constexpr,
    OUT_FMT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    MIN_KEYS: tl.constexpr,
) -> None:
    SPARSE: tl.constexpr = indices_ptr is not None
    # A selection is one token's, so its tiles hold rows of one token.
    TILE_H: tl.constexpr = (H + M - 1) // M * M if SPARSE else H
    request, tile = find_request(starts_ptr, tl.program_id(0), num_requests, TILE_H, M)
    begin, tokens, seq_len = request_extent(starts_ptr, seq_lens_ptr, request, num_tokens, num_requests)
    first = tile * M
    if first >= tokens * TILE_H:
        return
    row = first + tl.arange(0, M)
    token, head = row // TILE_H, row % TILE_H
    keep = (token < tokens) & (head < H)
    token64, head64 = (begin + token).to(tl.int64), head.to(tl.int64)
    position = seq_len - tokens + token
    last_token = tl.minimum(first + M, tokens * TILE_H) - 1
    last_token = last_token // TILE_H
    end = tl.maximum(seq_len - tokens + last_token + 1, 0)
    last_position = end - 1
    if SPARSE:
        indices_ptr += (begin + last_token).to(tl.int64) * indices_token
        end = tl.where(end > 0, num_selected, 0)

    split = tl.program_id(1)
    size = split_size(end, num_splits, MIN_KEYS, N)
    start = tl.minimum(split * size, end)
    stop = tl.minimum(start + size, end)
    ql = load_rows(ql_ptr + token64 * ql_token + head64 * ql_head, keep, L, L_PAD, True)
    qr = load_rows(qr_ptr + token64 * qr_token + head64 * qr_head, keep, R, R_PAD, True)
    ql, qr = decode(ql, Q_FMT).to(DOT), decode(qr, Q_FMT).to(DOT)
    row_max, row_sum = start_state(None, head, keep, "native", PRECISE)
    acc, _ = no_values(M, L_PAD, PRECISE, False)
    SUM: tl.constexpr = acc.dtype
    k_scale = 1.0 if k_scale_ptr is None else tl.load(k_scale_ptr)
    UNIT: tl.constexpr = 1.0 if PRECISE else LOG2_E
    exponent = scale * k_scale * UNIT
    table_ptr += tl.where(request < num_requests, request, 0).to(tl.int64) * table_row
    for step in range(start, stop, N):
        key = step + tl.arange(0, N)
        seen = key < stop
        if SPARSE:
            key, seen = selected_keys(indices_ptr, key, stop, last_position)
        page = tl.load(table_ptr + key // S, mask=seen, other=0).to(tl.int64)
        slot = (key % S).to(tl.int64)
        latents = load_latents(
            latent_ptr, scales_ptr, page * latent_block + slot * latent_slot,
            page * scales_block + slot * scales_slot, seen, L, L_PAD, L_FMT, DOT,
        )  # fmt: skip
        rope = load_rows(rope_ptr + page * rope_block + slot * rope_slot, seen, R, R_PAD, True)
        product = query_key_product(ql, latents, DOT, PRECISE)
        product += query_key_product(qr, decode(rope, R_FMT), DOT, PRECISE)
        mask = seen[None, :] & (key[None, :] <= position[:, None])
        score = tl.where(mask, product * exponent, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        # -inf minus -inf is NaN: a row that has seen no key yet subtracts 0.
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = power(score - pivot[:, None], PRECISE)
        shrink = power(row_max - pivot, PRECISE)
        acc = add_values(acc, shrink, weight, latents, DOT, PRECISE)
        row_sum = row_sum * shrink.to(SUM) + tl.sum(weight.to(SUM), 1)
        row_max = new_max

    if partial_ptr is None:
        rows = normalise(acc, row_sum) * k_scale
        store_rows(out_ptr, token64 * out_token + head64 * out_head, rows, keep, L, L_PAD, OUT_FMT)
        if lse_ptr is not None:
            lse = natural_lse(row_max, row_sum, PRECISE)
            tl.store(lse_ptr + token64 * lse_token + head64 * lse_head, lse, mask=keep)
    else:
        part = (token64 * H + head64) * num_splits + split
        parts = num_tokens.to(tl.int64) * H * num_splits
        store_partial(partial_ptr, part, parts, acc * k_scale, row_max, row_sum, keep, L, L_PAD)
