"""Paged attention in C++.

Shapes: T tokens, R requests, H query heads, Hk kv heads, D head size, Dv value head size,
B cache blocks, S slots a block, W blocks a request at most.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnbackend.kernels.cpu import _checks
from attnbackend.kernels.cpu._cache_views import CacheViews, cache_views
from attnbackend.kernels.cpu._library import library, raise_refusal
from attnbackend.kernels.cpu._structs import ATTENTION_STRUCT

_NAMES = "query key_cache value_cache output"


def _sizes(query: Tensor, seq_lens: Tensor, block_table: Tensor | None, cache: CacheViews) -> tuple[int, ...]:
    """tokens .. table_width, as in args.h."""
    _checks.require_rank("query", query, 3, "[T, H, D]")
    tokens, heads, head_size = query.shape
    requests, width = seq_lens.shape[0], 0
    if block_table is not None:
        _checks.require_rank("block_table", block_table, 2, "[R, W]")
        requests, width = block_table.shape
    if cache.head_size != head_size:
        raise ValueError(f"query has head size {head_size}, key_cache {cache.head_size}; they must agree")
    _checks.require_heads(heads, cache.kv_heads, head_size, cache.value_size)
    return (
        tokens,
        requests,
        heads,
        cache.kv_heads,
        head_size,
        cache.value_size,
        cache.blocks,
        cache.block_size,
        width,
    )


def _strides(query: Tensor, output: Tensor, block_table: Tensor | None, cache: CacheViews) -> tuple[int, ...]:
    """query_token .. table_row, as in args.h."""
    q_stride, o_stride, table_row = query.stride(), output.stride(), 0
    _checks.require_last_stride("query", query, q_stride)
    _checks.require_last_stride("output", output, o_stride)
    if block_table is not None:
        _checks.require_last_stride("block_table", block_table, block_table.stride())
        table_row = block_table.stride(0)
    return (*q_stride[:2], *cache.strides, *o_stride[:2], table_row)


def _require_tables(
    query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor | None, requests: int
) -> None:
    _checks.require_vector("query_start_loc", query_start_loc, torch.int32, requests + 1)
    _checks.require_vector("seq_lens", seq_lens, torch.int32, requests)
    if block_table is None:
        return
    _checks.require_cpu("block_table", block_table)
    if block_table.dtype != torch.int32:
        raise ValueError(f"block_table.dtype is {block_table.dtype}; allowed: int32")


def _addresses(*tensors: Tensor | None) -> Iterator[int]:
    """0 for none."""
    return (0 if x is None else x.data_ptr() for x in tensors)


def _dtype_codes(query: Tensor, output: Tensor) -> tuple[int, int]:
    codes = _checks.FLOAT_CODES
    return _checks.dtype_code("query", query, codes), _checks.dtype_code("output", output, codes)


def _lse(lse: Tensor | None, tokens: int, heads: int) -> tuple[int, int, int]:
    """Address and strides of the LSE, zeros for none."""
    if lse is None:
        return 0, 0, 0
    _checks.require_cpu("lse", lse)
    _checks.require_shape("lse", lse, (tokens, heads), "[T, H]")
    _checks.dtype_code("lse", lse, {torch.float32: 0})
    token, head = lse.stride()
    return lse.data_ptr(), token, head


def _alibi_address(slopes: Tensor | None, heads: int) -> int:
    if slopes is None:
        return 0
    _checks.require_vector("alibi_slopes", slopes, torch.float32, heads)
    return slopes.data_ptr()


def _as_one_block(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens' own key and value [T, Hk, D] as caches of one block, whose slots are the tokens."""
    for name, tensor in (("key_cache", key), ("value_cache", value)):
        _checks.require_rank(name, tensor, 3, "[T, Hk, D], since block_table is None")
        _checks.require_shape(name, tensor, (query.shape[0], *tensor.shape[1:]), "[T, Hk, D]")
    return key.unsqueeze(0), value.unsqueeze(0)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bidirectional_ranges: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Attention of new tokens over a paged KV cache, written into `output`.

    Args:
        query: [T, H, D] float32, float16 or bfloat16. Outer strides are free here and below.
        key_cache: [B, S, Hk, D] float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
        value_cache: [B, S, Hk, Dv], same dtype as key_cache.
        output: [T, H, Dv] float32, float16 or bfloat16. Every row is written.
        query_start_loc: int32 [R + 1], starts at 0, non-decreasing. Tokens past its end get
            output 0 and lse -inf.
        seq_lens: int32 [R], context plus query tokens. 0: output 0, lse -inf.
        block_table: int32 [R, W]. Only the blocks that hold visible keys are looked at. None: there
            is no cache, key_cache is key [T, Hk, D] and value_cache value [T, Hk, Dv], and a
            request's keys are the first seq_lens[i] of its own tokens.
        scale: factor of q.k, usually 1 / sqrt(D).
        causal: token i of n sees keys up to seq_len - n + i (bottom-right aligned).
        sliding_window: how many of the latest keys a token sees, itself included; as many after
            it too where there is no cache and attention is not causal.
        attention_chunk_size: a token at position p sees keys j with the same j // size only.
        logits_soft_cap: c > 0 turns a scaled score s into c * tanh(s / c).
        alibi_slopes: float32 [H]; adds -slope * |key position - query position|.
        sinks: [H], any float dtype; one more logit in the softmax's denominator.
        bidirectional_ranges: int32 [R, G, 2], positions [start, end) that see all of each other,
            whatever else they see; for causal attention over a cache.
        k_scale, v_scale: float32, 1 or Hk elements; real value = stored * scale.
        lse: float32 [T, H], receives the natural log of the denominator.

    Raises:
        ValueError: a shape, dtype, stride, number or block id that is not allowed; `output` is
            untouched then.
        RuntimeError: the kernels cannot be built here (see `unavailable_reason`).
    """
    loaded = library()
    _checks.require_cpu(_NAMES, query, key_cache, value_cache, output)
    paged = block_table is not None
    if not paged:
        key_cache, value_cache = _as_one_block(query, key_cache, value_cache)
    cache = cache_views(key_cache, value_cache)
    sizes = _sizes(query, seq_lens, block_table, cache)
    tokens, requests, heads = sizes[:3]
    _checks.require_shape("output", output, (tokens, heads, cache.value_size), "[T, H, Dv]")
    _require_tables(query_start_loc, seq_lens, block_table, requests)
    _checks.require_rules(scale, sliding_window, attention_chunk_size, logits_soft_cap)
    two_sided = sliding_window is not None and not (paged or causal)
    # The converted sinks must live until the call is over.
    sinks_H = None if sinks is None else _checks.float_vector("sinks", sinks, heads)
    arguments = ATTENTION_STRUCT.pack(
        *_addresses(query, key_cache, value_cache, output, query_start_loc, seq_lens, block_table),
        *sizes, *_strides(query, output, block_table, cache), *_dtype_codes(query, output), cache.dtype_code,
        *_lse(lse, tokens, heads), _alibi_address(alibi_slopes, heads), *_addresses(sinks_H),
        *_checks.scale_address("k_scale", k_scale, cache.kv_heads),
        *_checks.scale_address("v_scale", v_scale, cache.kv_heads),
        *_checks.ranges_address(bidirectional_ranges, requests, causal and paged),
        paged, bool(causal), sliding_window or 0, two_sided, attention_chunk_size or 0,
        torch.get_num_threads(), scale, logits_soft_cap,
    )  # fmt: skip
    if loaded.attnbackend_attention(arguments):
        capacity = sizes[8] * cache.block_size
        raise_refusal(loaded, tokens=tokens, capacity=capacity, blocks=cache.blocks)
