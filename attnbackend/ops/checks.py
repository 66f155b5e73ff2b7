"""What every op checks of its arguments, before any backend sees them. Shared by the real ops and the fakes.

Shape legend: T tokens, H query heads, K key-value heads, D head size, R requests, W block-table width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnbackend.backend import KVCacheDims
from attnbackend.kv_cache import resolve_kv_cache_dtype
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
]


_QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
"""Types of a quantised output; bytes are those of float8_e4m3fn."""

ExpectedTensor = tuple[str, tuple[int | str, ...], tuple[torch.dtype, ...]]


def _fail(what: str, got: Any, allowed: str) -> None:
    raise ValueError(f"{what} is {got}; expected {allowed}")


def _check_tensor(
    what: str, x: Tensor | None, shape: Sequence[int | str], dtypes: Sequence[torch.dtype], like: Tensor
) -> None:  # fmt: skip
    """Checks an optional tensor; a string in ``shape`` names a dimension of any size."""
    if x is None:
        return
    if x.dim() != len(shape) or any(
        s != n for s, n in zip(x.shape, shape, strict=True) if not isinstance(n, str)
    ):
        _fail(f"shape of {what}", tuple(x.shape), f"({', '.join(map(str, shape))})")
    if x.dtype not in dtypes:
        _fail(f"dtype of {what}", x.dtype, " or ".join(map(str, dtypes)))
    if x.device != like.device:
        _fail(f"device of {what}", x.device, f"{like.device}, where query and cache are")


def _check_scale(what: str, scale: Tensor | None, num_kv_heads: int, like: Tensor) -> None:
    if scale is None:
        return
    if scale.numel() not in (1, num_kv_heads):
        _fail(f"number of elements of {what}", scale.numel(), f"1 or num_kv_heads={num_kv_heads}")
    if scale.dtype != torch.float32 or scale.device != like.device:
        _fail(what, f"{scale.dtype} on {scale.device}", f"torch.float32 on {like.device}")


def _check_contiguous_rows(what: str, x: Tensor | None) -> None:
    if x is not None and x.stride(-1) != 1:
        _fail(f"last stride of {what}", x.stride(-1), f"1; call {what}.contiguous()")


def _check_cache(kv_cache: Tensor, kv_cache_dtype: str, model_dtype: torch.dtype) -> None:
    """A float8 cache may come as the bytes that it consists of, which more of torch's own ops can take."""
    wanted = resolve_kv_cache_dtype(kv_cache_dtype, model_dtype)
    allowed = (wanted, torch.uint8) if wanted.itemsize == 1 else (wanted,)
    if kv_cache.dtype not in allowed:
        names = " or ".join(map(str, allowed))
        _fail("dtype of kv_cache", kv_cache.dtype, f"{names} for kv_cache_dtype={kv_cache_dtype!r}")


def _check_no_grad(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise RuntimeError(
            "attnbackend's ops serve inference and have no backward, but an input requires grad; run the "
            "model under torch.inference_mode() or torch.no_grad()"
        )


def _check_scalars(call: AttentionCall) -> None:
    if not math.isfinite(call.scale):
        _fail("scale", call.scale, "a finite number")
    if call.sliding_window is not None and call.sliding_window < 1:
        _fail(
            "sliding_window",
            call.sliding_window,
            "at least 1 (the token itself), or None for no window",
        )
    if call.attention_chunk_size is not None and call.attention_chunk_size < 1:
        _fail("attention_chunk_size", call.attention_chunk_size, "at least 1, or None for no chunks")
    if not 0.0 <= call.logits_soft_cap < math.inf:
        _fail("logits_soft_cap", call.logits_soft_cap, "a positive number, or 0 for none")
    if call.attn_type not in {t.value for t in AttentionType}:
        _fail("attn_type", repr(call.attn_type), f"one of {', '.join(t.value for t in AttentionType)}")


def check_attention(call: AttentionCall, dims: KVCacheDims) -> None:
    """Raises ValueError on anything about an attention call that no backend could serve."""
    _check_no_grad(call.query, call.key, call.value)
    _check_heads(call.query, dims)
    _check_scalars(call)
    check_kind(call, dims)
    _check_cache(call.kv_cache, call.kv_cache_dtype, call.query.dtype)
    if call.kv_cache.device != call.query.device:
        _fail("device of kv_cache", call.kv_cache.device, f"{call.query.device}, as query")
    if (call.key is None) != (call.value is None):
        _fail("key and value", "only one of the two", "both or neither")
    for what, shape, dtypes in _expected_tensors(call, dims):
        _check_tensor(what, getattr(call, what), shape, dtypes, call.query)
    _check_output_scales(call)
    rows = call.seq_lens.shape[0]
    if call.query_start_loc.shape[0] != rows + 1:
        _fail("length of query_start_loc", call.query_start_loc.shape[0], f"{rows} + 1, as seq_lens")
    _check_scale("k_scale", call.k_scale, dims.num_kv_heads, call.query)
    _check_scale("v_scale", call.v_scale, dims.num_kv_heads, call.query)
    for what in ("query", "key", "value", "kv_cache", "output"):
        _check_contiguous_rows(what, getattr(call, what))


def _check_heads(query: Tensor, dims: KVCacheDims) -> None:
    if query.dim() != 3:
        _fail("shape of query", tuple(query.shape), "(num_tokens, num_heads, head_size)")
    _, heads, head_size = query.shape
    if head_size != dims.head_size:
        _fail("head size of kv_cache", dims.head_size, f"{head_size}, as query's {tuple(query.shape)}")
    if heads % dims.num_kv_heads:
        _fail("num_heads", heads, f"a multiple of num_kv_heads={dims.num_kv_heads}, as kv_cache has")


def _expected_tensors(call: AttentionCall, dims: KVCacheDims) -> Iterator[ExpectedTensor]:
    """Name, shape and allowed types of each tensor argument but the query, the cache and its scales."""
    _, heads, head_size = call.query.shape
    model = (call.query.dtype,)
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


def _is_quantized(call: AttentionCall) -> bool:
    return call.output_scale is not None or call.output_block_scale is not None


def _check_output_scales(call: AttentionCall) -> None:
    if call.output_block_scale is None:
        return
    if call.output_scale is not None:
        _fail("output_scale and output_block_scale", "both given", "one of the two")
    _, heads, head_size = call.query.shape
    groups = call.output_block_scale.shape[1]
    if groups == 0 or heads * head_size % groups:
        _fail(
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
            _fail(f"rows of {what}", x.shape[0], f"{tokens}, as query")


def check_update(call: KVCacheUpdateCall, dims: KVCacheDims) -> None:
    """Raises ValueError on anything about a cache write that no backend could serve."""
    key, cache = call.key, call.kv_cache
    row = ("T", dims.num_kv_heads, dims.head_size)
    _check_no_grad(key, call.value)
    _check_cache(cache, call.kv_cache_dtype, key.dtype)
    _check_tensor("key", key, row, (key.dtype,), cache)
    _check_tensor("value", call.value, row, (key.dtype,), cache)
    _check_tensor("slot_mapping", call.slot_mapping, ("T",), (torch.int64,), cache)
    _check_scale("k_scale", call.k_scale, dims.num_kv_heads, cache)
    _check_scale("v_scale", call.v_scale, dims.num_kv_heads, cache)
    if cache.dtype.itemsize > 1 and (call.k_scale is not None or call.v_scale is not None):
        _fail("k_scale or v_scale", "given", f"None, since a cache of {cache.dtype} is not scaled")
    for what in ("key", "value", "kv_cache"):
        _check_contiguous_rows(what, getattr(call, what))


def check_update_tokens(call: KVCacheUpdateCall) -> None:
    """The part of the check that depends on the number of tokens."""
    tokens = call.key.shape[0]
    for what, x in (("value", call.value), ("slot_mapping", call.slot_mapping)):
        if x.shape[0] != tokens:
            _fail(f"rows of {what}", x.shape[0], f"{tokens}, as key")


def check_rows(call: AttentionCall, dims: KVCacheDims) -> None:
    """Debug: requests lie within the tokens, their blocks within the cache. Waits for the device."""
    _check_query_start_loc(call.query_start_loc.cpu(), call.query.shape[0])
    lens_R, table = call.seq_lens.cpu().long(), call.block_table.cpu()
    if AttentionType(call.attn_type).keeps_no_cache:
        _check_own_lengths(lens_R, call.query_start_loc.cpu().diff())
        return
    limit = table.shape[1] * dims.block_size
    if row := _first((lens_R < 0) | (lens_R > limit)):
        allowed = f"0 or more and at most {limit}, what block_table's width {table.shape[1]} holds"
        _fail(f"seq_lens[{row[0]}]", int(lens_R[row]), allowed)
    needed_R = (lens_R + dims.block_size - 1) // dims.block_size
    used = torch.arange(table.shape[1]) < needed_R.unsqueeze(1)
    if place := _first(used & ((table < 0) | (table >= dims.num_blocks))):
        name = f"block_table[{place[0]}, {place[1]}]"
        _fail(name, int(table[place]), f"0 to {dims.num_blocks - 1}, the cache's blocks")


def _check_own_lengths(lens_R: Tensor, query_lens_R: Tensor) -> None:
    """Where the keys are the call's own, a row has as many of them as queries, or none."""
    if row := _first((lens_R != query_lens_R) & (lens_R != 0)):
        allowed = f"{int(query_lens_R[row])}, the row's tokens, or 0, since no cache is kept"
        _fail(f"seq_lens[{row[0]}]", int(lens_R[row]), allowed)


def _check_query_start_loc(starts: Tensor, tokens: int) -> None:
    if int(starts[0]) != 0:
        _fail("query_start_loc[0]", int(starts[0]), "0")
    if row := _first(starts.diff() < 0):
        _fail(f"query_start_loc[{row[0] + 1}]", int(starts[row[0] + 1]), "no less than the one before it")
    if int(starts[-1]) > tokens:
        _fail("query_start_loc[-1]", int(starts[-1]), f"at most {tokens}, the rows of query")


def _first(wrong: Tensor) -> tuple[int, ...] | None:
    """Index of the first True, or None."""
    found = wrong.nonzero()
    return tuple(found[0].tolist()) if len(found) else None


def check_slots(call: KVCacheUpdateCall, dims: KVCacheDims) -> None:
    """Debug: every slot lies inside the cache. Waits for the device."""
    slots = call.slot_mapping.cpu()
    limit = dims.num_blocks * dims.block_size
    if place := _first((slots < -1) | (slots >= limit)):
        name = f"slot_mapping[{place[0]}]"
        _fail(name, int(slots[place]), f"-1 (do not write) or 0 to {limit - 1}")
