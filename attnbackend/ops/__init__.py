"""The ops: agnostic ones that models emit, and the generator of each backend's own.

`attention`, `kv_cache_update` and those of latent attention here are ``torch.ops.attnbackend.*`` overloads;
importing this package defines them.
"""

from __future__ import annotations

from attnbackend.ops.agnostic import (
    attention,
    kv_cache_update,
    mla_attention,
    mla_kv_cache_update,
    mla_mixed_attention,
)
from attnbackend.ops.calls import AttentionCall, KVCacheUpdateCall
from attnbackend.ops.generate import backend_op, backend_op_names
from attnbackend.ops.merge import merge_attn_states
from attnbackend.ops.mla_calls import MLAAttentionCall, MLACacheUpdateCall, MLAMixedCall, MLAPrefillCall

__all__ = [
    "AttentionCall",
    "KVCacheUpdateCall",
    "MLAAttentionCall",
    "MLACacheUpdateCall",
    "MLAMixedCall",
    "MLAPrefillCall",
    "attention",
    "backend_op",
    "backend_op_names",
    "kv_cache_update",
    "merge_attn_states",
    "mla_attention",
    "mla_kv_cache_update",
    "mla_mixed_attention",
]
