"""What every op checks of its arguments, before any backend sees them. Shared by the real ops and the fakes.

Shape legend: T tokens, H query heads, K key-value heads, D head size, R requests, W block-table width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attnbackend.backend import KVCacheDims
from attnbackend.ops.argument_checks import (
    check_cache,
    check_contiguous_rows,
    check_factor,
    check_no_grad,
    check_query_start_loc,
    check_scale,
    check_tensor,
    check_without_gaps,
    fail,
    first_place,
)
from attnbackend.ops.attention_kinds import check_kind
from attnbackend.ops.calls import AttentionCall, KVCacheUpdateCall
from attnbackend.types import AttentionType

__all__ = [
    "check_attention",
    "check_attention_tokens",
    "check_rows",
    "check_slots",
    "check_update",
    "check_update_tokens",
    "model_dtype",
]


_QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
"""Types of a quantised output; bytes are those of float8_e4m3fn."""

_READ_AS_THEY_LIE = (
    "query_start_loc", "seq_lens", "block_table", "alibi_slopes", "sinks", "bidirectional_ranges", "k_scale",
    "v_scale",
)  # fmt: skip

ExpectedTensor = tuple[str, tuple[int | str, ...], tuple[torch.dtype, ...]]


def _check_scalars(call: AttentionCall) -> None:
    check_factor(call.scale)
    if call.sliding_window is not None and call.sliding_window < 1:
        fail(
            "sliding_window",
            call.sliding_window,
            "at least 1 (the token itself), or None for no window",
        )
    if call.attention_chunk_size is not None and call.attention_chunk_size < 1:
        fail("attention_chunk_size", call.attention_chunk_size, "at least 1, or None for no chunks")
    if not 0.0 <= call.logits_soft_cap < math.inf:
        fail("logits_soft_cap", call.logits_soft_cap, "a positive number, or 0 for none")
    if call.attn_type not in {t.value for t in AttentionType}:
        fail("attn_type", repr(call.attn_type), f"one of {', '.join(t.value for t in AttentionType)}")


def check_attention(call: AttentionCall, dims: KVCacheDims) -> None:
    """Raises ValueError on anything about an attention call that no backend could serve."""
    check_no_grad(call)
    _check_heads(call.query, dims)
    _check_scalars(call)
    check_kind(call, dims)
    check_cache(call.kv_cache, call.kv_cache_dtype, model_dtype(call))
    if call.kv_cache.device != call.query.device:
        fail("device of kv_cache", call.kv_cache.device, f"{call.query.device}, as query")
    if (call.key is None) != (call.value is None):
        fail("key and value", "only one of the two", "both or neither")
    for what, shape, dtypes in _expected_tensors(call, dims):
        check_tensor(what, getattr(call, what), shape, dtypes, call.query)
    _check_output_scales(call)
    rows = call.seq_lens.shape[0]
    if call.query_start_loc.shape[0] != rows + 1:
        fail("length of query_start_loc", call.query_start_loc.shape[0], f"{rows} + 1, as seq_lens")
    check_scale("k_scale", call.k_scale, dims.num_kv_heads, call.query)
    check_scale("v_scale", call.v_scale, dims.num_kv_heads, call.query)
    for what in ("query", "key", "value", "kv_cache", "output"):
        check_contiguous_rows(what, getattr(call, what))
    check_without_gaps(call, _READ_AS_THEY_LIE)


def _check_heads(query: Tensor, dims: KVCacheDims) -> None:
    if query.dim() != 3:
        fail("shape of query", tuple(query.shape), "(num_tokens, num_heads, head_size)")
    _, heads, head_size = query.shape
    if head_size != dims.head_size:
        fail("head size of kv_cache", dims.head_size, f"{head_size}, as query's {tuple(query.shape)}")
    if heads % dims.num_kv_heads:
        fail("num_heads", heads, f"a multiple of num_kv_heads={dims.num_kv_heads}, as kv_cache has")


def _expected_tensors(call: AttentionCall, dims: KVCacheDims) -> Iterator[ExpectedTensor]:
    """Name, shape and allowed types of each tensor argument but the query, the cache and its scales."""
    _, heads, head_size = call.query.shape
    model = (model_dtype(call),)
    yield "key", ("T", dims.num_kv_heads, head_size), model
    yield "value", ("T", dims.num_kv_heads, head_size), model
    yield "output", ("T", heads, head_size), _QUANTIZED if _is_quantized(call) else model
    yield "query_start_loc", ("R+1",), (torch.int32,)
    yield "seq_lens", ("R",), (torch.int32,)
    yield "block_table", (call.seq_lens.shape[0], "W"), (torch.int32,)
    yield "lse", ("T", heads), (torch.float32,)
    yield "alibi_slopes", (heads,), (torch.float32,)
    yield "sinks", (heads,), (torch.float32, *model)
    yield "bidirectional_ranges", (call.seq_lens.shape[0], "ranges", 2), (torch.int32,)
    yield "q_scale", (1,), (torch.float32,)
    yield "output_scale", (1,), (torch.float32,)
    yield "output_block_scale", ("T", "groups"), (torch.float32,)


def model_dtype(call: AttentionCall) -> torch.dtype:
    """The type in which the model computes: the query's, or that of the others beside a query in float8."""
    if call.query.dtype is not torch.float8_e4m3fn:
        return call.query.dtype
    if call.key is None and _is_quantized(call):
        fail("dtype of query", call.query.dtype, "another: nothing else here has the model's type, give key")
    return call.output.dtype if call.key is None else call.key.dtype


def _is_quantized(call: AttentionCall) -> bool:
    return call.output_scale is not None or call.output_block_scale is not None


def _check_output_scales(call: AttentionCall) -> None:
    if call.output_block_scale is None:
        return
    if call.output_scale is not None:
        fail("output_scale and output_block_scale", "both given", "one of the two")
    _, heads, head_size = call.query.shape
    groups = call.output_block_scale.shape[1]
    if groups == 0 or heads * head_size % groups:
        fail(
            "groups of output_block_scale",
            groups,
            f"a divisor of the {heads * head_size} elements of a token",
        )


def check_attention_tokens(call: AttentionCall) -> None:
    """The part of the check that depends on the number of tokens."""
    tokens = call.query.shape[0]
    for what, x in (
        ("output", call.output),
        ("key", call.key),
        ("value", call.value),
        ("lse", call.lse),
        ("output_block_scale", call.output_block_scale),
    ):
        if x is not None and x.shape[0] != tokens:
            fail(f"rows of {what}", x.shape[0], f"{tokens}, as query")


def check_update(call: KVCacheUpdateCall, dims: KVCacheDims) -> None:
    """Raises ValueError on anything about a cache write that no backend could serve."""
    key, cache = call.key, call.kv_cache
    row = ("T", dims.num_kv_heads, dims.head_size)
    check_no_grad(call)
    check_cache(cache, call.kv_cache_dtype, key.dtype)
    check_tensor("key", key, row, (key.dtype,), cache)
    check_tensor("value", call.value, row, (key.dtype,), cache)
    check_tensor("slot_mapping", call.slot_mapping, ("T",), (torch.int64,), cache)
    check_scale("k_scale", call.k_scale, dims.num_kv_heads, cache)
    check_scale("v_scale", call.v_scale, dims.num_kv_heads, cache)
    if cache.dtype.itemsize > 1 and (call.k_scale is not None or call.v_scale is not None):
        fail("k_scale or v_scale", "given", f"None, since a cache of {cache.dtype} is not scaled")
    for what in ("key", "value", "kv_cache"):
        check_contiguous_rows(what, getattr(call, what))
    check_without_gaps(call, ("slot_mapping", "k_scale", "v_scale"))


def check_update_tokens(call: KVCacheUpdateCall) -> None:
    """The part of the check that depends on the number of tokens."""
    tokens = call.key.shape[0]
    for what, x in (("value", call.value), ("slot_mapping", call.slot_mapping)):
        if x.shape[0] != tokens:
            fail(f"rows of {what}", x.shape[0], f"{tokens}, as key")


def check_rows(call: AttentionCall, dims: KVCacheDims) -> None:
    """Debug: requests lie within the tokens, their blocks within the cache. Waits for the device."""
    check_query_start_loc(call.query_start_loc.cpu(), call.query.shape[0])
    lens_R, table = call.seq_lens.cpu().long(), call.block_table.cpu()
    if AttentionType(call.attn_type).keeps_no_cache:
        _check_own_lengths(lens_R, call.query_start_loc.cpu().diff())
        return
    limit = table.shape[1] * dims.block_size
    if row := first_place((lens_R < 0) | (lens_R > limit)):
        allowed = f"0 or more and at most {limit}, what block_table's width {table.shape[1]} holds"
        fail(f"seq_lens[{row[0]}]", int(lens_R[row]), allowed)
    needed_R = (lens_R + dims.block_size - 1) // dims.block_size
    used = torch.arange(table.shape[1]) < needed_R.unsqueeze(1)
    if place := first_place(used & ((table < 0) | (table >= dims.num_blocks))):
        name = f"block_table[{place[0]}, {place[1]}]"
        fail(name, int(table[place]), f"0 to {dims.num_blocks - 1}, the cache's blocks")


def _check_own_lengths(lens_R: Tensor, query_lens_R: Tensor) -> None:
    """Where the keys are the call's own, a row has as many of them as queries, or none."""
    if row := first_place((lens_R != query_lens_R) & (lens_R != 0)):
        allowed = f"{int(query_lens_R[row])}, the row's tokens, or 0, since no cache is kept"
        fail(f"seq_lens[{row[0]}]", int(lens_R[row]), allowed)


def check_slots(call: KVCacheUpdateCall, dims: KVCacheDims) -> None:
    """Debug: every slot lies inside the cache. Waits for the device."""
    slots = call.slot_mapping.cpu()
    limit = dims.num_blocks * dims.block_size
    if place := first_place((slots < -1) | (slots >= limit)):
        name = f"slot_mapping[{place[0]}]"
        fail(name, int(slots[place]), f"-1 (do not write) or 0 to {limit - 1}")
