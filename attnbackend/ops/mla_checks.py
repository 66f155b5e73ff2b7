"""What every op of latent attention checks of its arguments. Shared by the real ops and the fakes.

Shape legend: as `attnbackend.ops.mla_calls`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbackend.mla_cache import mla_row_width
from attnbackend.ops.argument_checks import (
    check_cache,
    check_contiguous_rows,
    check_factor,
    check_no_grad,
    check_query_start_loc,
    check_tensor,
    check_without_gaps,
    fail,
    first_place,
)
from attnbackend.ops.mla_calls import MLAAttentionCall, MLACacheUpdateCall, MLAMixedCall, MLAPrefillCall

__all__ = [
    "check_mha",
    "check_mha_rows",
    "check_mixed",
    "check_mla_rows",
    "check_mla_slots",
    "check_mla_update",
    "check_mqa",
    "check_same_rows",
]

_INT32 = (torch.int32,)
_FLOAT32 = (torch.float32,)


def check_mqa(call: MLAAttentionCall) -> None:
    """Raises ValueError on anything about a call that no backend could serve."""
    q, own = call.query_latent, (call.query_latent.dtype,)
    check_no_grad(call)
    _check_rank("query_latent", q, "(num_tokens, num_heads, kv_lora_rank)", 3)
    heads, rank = int(q.shape[1]), int(q.shape[2])
    check_tensor("query_rope", call.query_rope, ("T", heads, "qk_rope_head_dim"), own, q)
    check_tensor("output", call.output, ("T", heads, rank), own, q)
    check_tensor("lse", call.lse, ("T", heads), _FLOAT32, q)
    check_tensor("topk_indices", call.topk_indices, ("T", "top_k"), _INT32, q)
    _check_row(call.kv_cache, rank + int(call.query_rope.shape[2]), call.kv_cache_dtype, q)
    _check_step(call, q)
    for name in ("query_latent", "query_rope", "kv_cache", "output"):
        check_contiguous_rows(name, getattr(call, name))


def check_mixed(call: MLAMixedCall) -> None:
    """As `check_mqa`."""
    q, own = call.query, (call.query.dtype,)
    check_no_grad(call)
    _check_rank("query", q, "(num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim)", 3)
    _check_rank("kv_c", call.kv_c, "(num_tokens, kv_lora_rank)", 2)
    _check_rank("k_pe", call.k_pe, "(num_tokens, qk_rope_head_dim)", 2)
    heads, rank, rope = int(q.shape[1]), int(call.kv_c.shape[1]), int(call.k_pe.shape[1])
    nope = int(q.shape[2]) - rope
    check_tensor("kv_b_weight", call.kv_b_weight, (heads, "qk_nope_head_dim + v_head_dim", rank), own, q)
    v_head_dim = int(call.kv_b_weight.shape[1]) - nope
    if nope < 1 or v_head_dim < 1:
        fail(
            "query and kv_b_weight", (tuple(q.shape), tuple(call.kv_b_weight.shape)),
            f"a head size of query above qk_rope_head_dim={rope}, and more rows a head in kv_b_weight than "
            "what is left of it",
        )  # fmt: skip
    check_tensor("kv_c", call.kv_c, ("T", rank), own, q)
    check_tensor("k_pe", call.k_pe, ("T", rope), own, q)
    check_tensor("output", call.output, ("T", heads, v_head_dim), own, q)
    _check_row(call.kv_cache, rank + rope, call.kv_cache_dtype, q)
    _check_step(call, q)
    for name in ("query", "kv_c", "k_pe", "kv_cache", "kv_b_weight", "output"):
        check_contiguous_rows(name, getattr(call, name))


def check_mha(call: MLAPrefillCall) -> None:
    """As `check_mqa`."""
    q, own = call.query, (call.query.dtype,)
    check_no_grad(call)
    _check_rank("query", q, "(num_tokens, num_heads, qk_head_dim)", 3)
    heads, qk_head_dim = int(q.shape[1]), int(q.shape[2])
    check_tensor("key", call.key, ("S", heads, qk_head_dim), own, q)
    check_tensor("value", call.value, ("S", heads, "v_head_dim"), own, q)
    check_tensor("output", call.output, ("T", heads, int(call.value.shape[2])), own, q)
    check_tensor("lse", call.lse, ("T", heads), _FLOAT32, q)
    check_tensor("cu_seqlens_q", call.cu_seqlens_q, ("Q+1",), _INT32, q)
    check_tensor("cu_seqlens_k", call.cu_seqlens_k, (call.cu_seqlens_q.shape[0],), _INT32, q)
    check_without_gaps(call, ("cu_seqlens_q", "cu_seqlens_k"))
    check_factor(call.scale)
    for name in ("query", "key", "value", "output"):
        check_contiguous_rows(name, getattr(call, name))


def check_mla_update(call: MLACacheUpdateCall) -> None:
    """As `check_mqa`, for a cache write."""
    own, cache = (call.kv_c.dtype,), call.kv_cache
    check_no_grad(call)
    _check_rank("kv_c", call.kv_c, "(num_tokens, kv_lora_rank)", 2)
    check_tensor("kv_c", call.kv_c, ("T", "kv_lora_rank"), own, cache)
    check_tensor("k_pe", call.k_pe, ("T", "qk_rope_head_dim"), own, cache)
    check_tensor("slot_mapping", call.slot_mapping, ("T",), (torch.int64,), cache)
    check_without_gaps(call, ("slot_mapping",))
    _check_row(cache, int(call.kv_c.shape[1] + call.k_pe.shape[1]), call.kv_cache_dtype, call.kv_c)
    _check_k_scale(call.k_scale, call.kv_cache_dtype, call.kv_c)
    for name in ("kv_c", "k_pe", "kv_cache"):
        check_contiguous_rows(name, getattr(call, name))


def check_same_rows(call: MLAAttentionCall | MLAMixedCall | MLAPrefillCall | MLACacheUpdateCall) -> None:
    """The part of the checks that depends on the number of tokens."""
    first, *others = _OF_TOKENS[type(call)]
    tokens = getattr(call, first).shape[0]
    for name in others:
        x = getattr(call, name)
        if x is not None and x.shape[0] != tokens:
            fail(f"rows of {name}", x.shape[0], f"{tokens}, as {first}")
    if isinstance(call, MLAPrefillCall) and call.key.shape[0] != call.value.shape[0]:
        fail("rows of value", call.value.shape[0], f"{call.key.shape[0]}, as key")


_OF_TOKENS: dict[type, tuple[str, ...]] = {
    MLAAttentionCall: ("query_latent", "query_rope", "output", "lse", "topk_indices"),
    MLAMixedCall: ("query", "kv_c", "k_pe", "output"),
    MLAPrefillCall: ("query", "output", "lse"),
    MLACacheUpdateCall: ("kv_c", "k_pe", "slot_mapping"),
}


def check_mla_rows(call: MLAAttentionCall | MLAMixedCall) -> None:
    """Debug: requests lie within the tokens, their blocks within the cache. Waits for the device."""
    tokens = call.output.shape[0]
    num_blocks, block_size = call.kv_cache.shape[:2]
    check_query_start_loc(call.query_start_loc.cpu(), tokens)
    lens, table = call.seq_lens.cpu().long(), call.block_table.cpu()
    limit = table.shape[1] * block_size
    if row := first_place((lens < 0) | (lens > limit)):
        fail(f"seq_lens[{row[0]}]", int(lens[row]), f"0 to {limit}, what block_table holds")
    needed = (lens + block_size - 1) // block_size
    used = torch.arange(table.shape[1]) < needed.unsqueeze(1)
    if place := first_place(used & ((table < 0) | (table >= num_blocks))):
        name = f"block_table[{place[0]}, {place[1]}]"
        fail(name, int(table[place]), f"0 to {num_blocks - 1}, the cache's blocks")
    if isinstance(call, MLAAttentionCall) and call.topk_indices is not None:
        _check_none_twice(call.topk_indices.cpu())


def _check_none_twice(topk_indices: Tensor) -> None:
    sorted_TN = topk_indices.sort(-1).values
    if place := first_place((sorted_TN.diff() == 0) & (sorted_TN[:, 1:] >= 0)):
        found = f"{int(sorted_TN[place])} twice"
        fail(f"topk_indices[{place[0]}]", found, "each position once, since a kernel may count it twice")


def check_mha_rows(call: MLAPrefillCall) -> None:
    """Debug: sequences lie within the tokens and the keys. Waits for the device."""
    check_query_start_loc(call.cu_seqlens_q.cpu(), call.query.shape[0], "cu_seqlens_q")
    check_query_start_loc(call.cu_seqlens_k.cpu(), call.key.shape[0], "cu_seqlens_k", "key")


def check_mla_slots(call: MLACacheUpdateCall) -> None:
    """Debug: every slot lies inside the cache. Waits for the device."""
    slots, limit = call.slot_mapping.cpu(), call.kv_cache.shape[0] * call.kv_cache.shape[1]
    if place := first_place((slots < -1) | (slots >= limit)):
        allowed = f"-1 (do not write) or 0 to {limit - 1}"
        fail(f"slot_mapping[{place[0]}]", int(slots[place]), allowed)


def _check_rank(name: str, x: Tensor, expected: str, dims: int) -> None:
    if x.dim() != dims:
        fail(f"shape of {name}", tuple(x.shape), expected)


def _check_row(kv_cache: Tensor, head_size: int, kv_cache_dtype: str, query: Tensor) -> None:
    """The cache's shape, type and device, where a row has ``head_size`` elements."""
    check_cache(kv_cache, kv_cache_dtype, query.dtype)
    width = mla_row_width(head_size, kv_cache_dtype)
    if kv_cache.dim() != 3 or kv_cache.shape[2] != width:
        fail(
            "shape of kv_cache", tuple(kv_cache.shape),
            f"(num_blocks, block_size, {width}): kv_lora_rank + qk_rope_head_dim is {head_size}, "
            f"kv_cache_dtype={kv_cache_dtype!r}",
        )  # fmt: skip
    if kv_cache.device != query.device:
        fail("device of kv_cache", kv_cache.device, f"{query.device}, as the query")


def _check_step(call: MLAAttentionCall | MLAMixedCall, query: Tensor) -> None:
    """What says where the tokens belong, and the scales."""
    rows = call.seq_lens.shape[0]
    check_tensor("query_start_loc", call.query_start_loc, ("Q+1",), _INT32, query)
    check_tensor("seq_lens", call.seq_lens, ("Q",), _INT32, query)
    check_tensor("block_table", call.block_table, (rows, "W"), _INT32, query)
    check_without_gaps(call, ("query_start_loc", "seq_lens", "block_table"))
    if call.query_start_loc.shape[0] != rows + 1:
        fail("length of query_start_loc", call.query_start_loc.shape[0], f"{rows} + 1, as seq_lens")
    check_factor(call.scale)
    _check_k_scale(call.k_scale, call.kv_cache_dtype, query)


def _check_k_scale(k_scale: Tensor | None, kv_cache_dtype: str, like: Tensor) -> None:
    if k_scale is None:
        return
    if kv_cache_dtype not in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        fail("k_scale", "given", f"None, since kv_cache_dtype={kv_cache_dtype!r} takes no scale from outside")
    check_tensor("k_scale", k_scale, (1,), _FLOAT32, like)
