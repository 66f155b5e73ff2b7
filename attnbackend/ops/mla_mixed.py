"""A whole step of latent attention: decodes on the latent cache, prompts on keys and values of their own.

Shape legend: T tokens, H heads, L kv_lora_rank, R qk_rope_head_dim, P qk_nope_head_dim, V v_head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbackend.impl import MLAAttentionImpl, MLATensors
from attnbackend.mla_metadata import ContextChunk, MLAMetadata, MLAPrefillPlan
from attnbackend.ops.merge import merge_attn_states
from attnbackend.ops.mla_calls import MLAMixedCall
from attnbackend.ops.mla_projections import absorb, expand, up_project

__all__ = ["attend_mixed"]


def attend_mixed(impl: MLAAttentionImpl, plan: MLAMetadata, call: MLAMixedCall) -> None:
    """Writes every row of the call's output; the cache has its own type."""
    decodes = slice(0, plan.num_decode_tokens) if plan.prefill else slice(None)
    if plan.decode is not None:
        _decode(impl, plan, call, decodes)
    if plan.prefill is not None:
        first = plan.num_decode_tokens
        prompts = slice(first, first + plan.prefill.num_tokens)
        _prefill(impl, plan.prefill, call, prompts)
        call.output[prompts.stop :] = 0


def _decode(impl: MLAAttentionImpl, plan: MLAMetadata, call: MLAMixedCall, rows: slice) -> None:
    query, output = call.query[rows], call.output[rows]
    nope = query.shape[-1] - call.k_pe.shape[-1]
    query_latent = absorb(query[..., :nope], call.kv_b_weight)
    latent = torch.empty_like(query_latent, memory_format=torch.contiguous_format)
    tensors = MLATensors(k_scale=call.k_scale)
    impl.forward_mqa(query_latent, query[..., nope:], call.kv_cache, plan.decode, latent, tensors)
    output.copy_(up_project(latent, call.kv_b_weight, output.shape[-1]))


def _prefill(impl: MLAAttentionImpl, plan: MLAPrefillPlan, call: MLAMixedCall, rows: slice) -> None:
    query, output = call.query[rows], call.output[rows]
    key, value = expand(call.kv_c[rows], call.k_pe[rows], call.kv_b_weight, output.shape[-1])
    if not plan.chunks:
        impl.forward_mha(query, key, value, plan.new_tokens, output, None)
        return
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    impl.forward_mha(query, key, value, plan.new_tokens, output, lse)
    merged = output.float()
    for chunk in plan.chunks:
        part = slice(chunk.start, chunk.stop)
        state = _attend_chunk(impl, chunk, call, query[part], output[part])
        merged[part], lse[part] = merge_attn_states(merged[part], lse[part], *state)
    output.copy_(merged)


def _attend_chunk(
    impl: MLAAttentionImpl, chunk: ContextChunk, call: MLAMixedCall, query: Tensor, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [T, H, V] in float32 and LSE [T, H] of attention to a piece of the context."""
    kv_c, k_pe = impl.gather_latents(call.kv_cache, chunk.slots, call.k_scale)
    key, value = expand(kv_c, k_pe, call.kv_b_weight, like.shape[-1])
    output = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    impl.forward_mha(query, key, value, chunk.attention, output, lse)
    return output.float(), lse
