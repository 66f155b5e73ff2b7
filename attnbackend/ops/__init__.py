"""The ops: agnostic ones that models emit, and the generator of each backend's own.

`attention` and `kv_cache_update` here are ``torch.ops.attnbackend.*`` overloads; importing this package
defines them.
"""

from __future__ import annotations

from attnbackend.ops.agnostic import attention, kv_cache_update
from attnbackend.ops.calls import AttentionCall, KVCacheUpdateCall
from attnbackend.ops.generate import backend_op, backend_op_names
from attnbackend.ops.merge import merge_attn_states

__all__ = [
    "AttentionCall",
    "KVCacheUpdateCall",
    "attention",
    "backend_op",
    "backend_op_names",
    "kv_cache_update",
    "merge_attn_states",
]
