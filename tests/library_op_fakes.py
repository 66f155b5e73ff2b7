"""FlashAttention 3's op, of its very schema, over the stand-in of the library on a CPU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from library_fakes import FakeProvider
from torch import Tensor

from attnbackend._torch_compat import StorageRef
from attnbackend.backends.flash_attn.call import FlashCall
from attnbackend.backends.flash_attn.forward_op import ForwardOp
from attnbackend.native_calls import LibraryCall

SCHEMA = (
    "(Tensor(a!) q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(b!)? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? "
    "seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? "
    "leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, "
    "Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int "
    "window_size_right, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int "
    "num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? "
    "cp_tot_seqused_k) -> Tensor[]"
)
LIBRARY = torch.library.Library("attnbackend_fake_fa3", "FRAGMENT")


def storage_of(x: Tensor) -> StorageRef:
    return StorageRef(x.untyped_storage())


class OpProvider(FakeProvider):
    """As the real one: `attend` is one call of the library's op."""

    key = "fake_fa3_op"
    made: ClassVar[list[FlashCall]] = []
    """What the op was called with."""
    results: ClassVar[list[StorageRef]] = []

    def op_call(self, call: FlashCall) -> LibraryCall | None:
        operation = ForwardOp.of(torch.ops.attnbackend_fake_fa3.fwd.default)
        assert operation is not None
        return operation.call(call)

    def attend(self, call: FlashCall) -> Tensor | None:
        own = self.op_call(call)
        assert own is not None
        return own.function(*own.arguments)[1].t()


def _fwd(*arguments: Any) -> list[Tensor]:
    names = [a.name for a in torch.ops.attnbackend_fake_fa3.fwd.default._schema.arguments]
    a = dict(zip(names, arguments, strict=True))
    assert (a["is_rotary_interleaved"], a["sm_margin"], a["cp_world_size"], a["cp_rank"]) == (True, 0, 1, 0)
    call = FlashCall(
        a["q"], a["k"], a["v"], a["out"], a["cu_seqlens_q"],
        a["cu_seqlens_q"].diff().int() if a["seqused_k"] is None else a["seqused_k"], a["page_table"],
        a["max_seqlen_q"], a["max_seqlen_k"], a["softmax_scale"], a["is_causal"],
        (a["window_size_left"], a["window_size_right"]), a["softcap"], None, a["s_aux"], None,
        a["scheduler_metadata"], a["num_splits"],
    )  # fmt: skip
    OpProvider.made.append(call)
    lse = FakeProvider.attend(OpProvider(), call)
    assert lse is not None
    results = [call.output, lse.t(), torch.empty(1 << 20)]
    OpProvider.results.append(storage_of(results[2]))
    return results


LIBRARY.define(f"fwd{SCHEMA}")
LIBRARY.impl("fwd", _fwd, "CPU")
