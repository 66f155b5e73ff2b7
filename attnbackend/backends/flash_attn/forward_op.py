"""``fwd`` of FlashAttention 3 as an op of torch, whose arguments are known by the names in its schema."""

from __future__ import annotations

from typing import Any

import torch

from attnbackend.backends.flash_attn.call import FlashCall
from attnbackend.native_calls import LibraryCall

__all__ = ["ForwardOp"]

_FIXED = {"is_rotary_interleaved": True, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}
"""Arguments that must be given, and of which we want nothing."""


class ForwardOp:
    def __init__(self, op: torch._ops.OpOverload) -> None:
        self._op = op
        arguments = ((a.name, a.default_value) for a in op._schema.arguments)
        self._defaults = {name: _FIXED.get(name, default) for name, default in arguments}

    @classmethod
    def of(cls, op: torch._ops.OpOverload) -> ForwardOp | None:
        """None where the schema is not the one that is known: its function in Python has to be called."""
        names = {a.name for a in op._schema.arguments}
        optional = {a.name for a in op._schema.arguments if isinstance(a.type, torch.OptionalType)}
        return cls(op) if _NEEDED <= names <= _NEEDED | _FIXED.keys() | optional else None

    def call(self, call: FlashCall) -> LibraryCall:
        return LibraryCall(self._op, tuple((self._defaults | _values(call)).values()))


def _values(call: FlashCall) -> dict[str, Any]:
    paged = call.block_table is not None
    q_descale, k_descale, v_descale = call.descales or (None, None, None)
    return {
        "q": call.query, "k": call.key, "v": call.value, "out": call.output,
        "cu_seqlens_q": call.query_start_loc, "cu_seqlens_k": None if paged else call.query_start_loc,
        "seqused_k": call.seq_lens if paged else None, "max_seqlen_q": call.max_query_len,
        "max_seqlen_k": call.max_seq_len, "page_table": call.block_table, "q_descale": q_descale,
        "k_descale": k_descale, "v_descale": v_descale, "softmax_scale": call.scale, "is_causal": call.causal,
        "window_size_left": call.window[0], "window_size_right": call.window[1], "softcap": call.soft_cap,
        "scheduler_metadata": call.schedule, "num_splits": call.num_splits, "s_aux": call.sinks,
    }  # fmt: skip


_NEEDED = frozenset(_values(FlashCall._make([None] * 10 + [*FlashCall._field_defaults.values()])))
