"""The backend of latent attention under test, with its ops, on one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnbackend.backend import AttentionBackend
from attnbackend.impl import AttentionParams, MLADims
from attnbackend.ops.agnostic import mla_kv_cache_update
from attnbackend.ops.generate import backend_op
from attnbackend.ops.library import MLA_ATTENTION, MLA_CACHE_UPDATE, MLA_MIXED, MLA_PREFILL
from attnbackend.testing.conformance.base_subject import BaseSubject, OpCall
from attnbackend.testing.mla_batches import (
    MLABatch,
    make_mla_batch,
    mixed_arguments,
    mqa_arguments,
    update_arguments,
)
from attnbackend.testing.mla_cases import MLACase
from attnbackend.testing.mla_judgement import assert_mixed_within_rule, assert_mqa_within_rule

__all__ = ["LatentSubject"]

Op = torch._ops.OpOverload
MQA, MIXED = "forward_mqa", "forward_mixed"


@dataclass(frozen=True, kw_only=True)
class LatentSubject(BaseSubject[MLACase, MLABatch]):
    """What checks call. Inside `open_subject` the agnostic ops run on the backend too."""

    mqa: Op
    mixed: Op | None
    """None: a sparse backend, which has none."""
    mha: Op | None

    @classmethod
    def of(cls, backend: type[AttentionBackend], device: torch.device, slow: bool = False) -> LatentSubject:
        name = backend.get_name()
        mqa = backend_op(name, MLA_ATTENTION)
        assert mqa is not None, "resolving a backend of latent attention generates its op"
        return cls(
            backend=backend, device=device, mqa=mqa, mixed=backend_op(name, MLA_MIXED),
            mha=backend_op(name, MLA_PREFILL), slow=slow,
            write=backend_op(name, MLA_CACHE_UPDATE) or mla_kv_cache_update,
        )  # fmt: skip

    @property
    def roles(self) -> tuple[str, ...]:
        return (MQA,) if self.mixed is None else (MQA, MIXED)

    def batch(self, case: MLACase) -> MLABatch:
        return make_mla_batch(case, self.device)

    def params(self, case: MLACase) -> AttentionParams:
        dims = MLADims(
            kv_lora_rank=case.kv_lora_rank, qk_rope_head_dim=case.qk_rope_head_dim,
            qk_nope_head_dim=case.qk_nope_head_dim, v_head_dim=case.v_head_dim,
        )  # fmt: skip
        return AttentionParams(
            num_heads=case.num_heads, num_kv_heads=1, head_size=case.head_size, dtype=case.dtype,
            kv_cache_dtype=case.kv_cache_dtype, block_size=case.block_size, device_type=self.device.type,
            scale=case.softmax_scale, mla=dims,
        )  # fmt: skip

    def read_call(self, role: str, batch: MLABatch) -> OpCall:
        if role == MQA:
            return OpCall.of(self.mqa, *mqa_arguments(batch))
        assert self.mixed is not None
        return OpCall.of(self.mixed, *mixed_arguments(batch))

    def calls(self, batch: MLABatch) -> dict[str, OpCall]:
        """By the name of their role."""
        return {role: self.read_call(role, batch) for role in self.roles}

    def write_call(self, batch: MLABatch) -> OpCall:
        return OpCall.of(self.write, *update_arguments(batch))

    def results(self, role: str, batch: MLABatch) -> dict[str, Tensor]:
        if role == MIXED:
            return {"output": batch.output}
        return {"output": batch.latent_output} | ({} if batch.lse is None else {"LSE": batch.lse})

    def judge(self, role: str, batch: MLABatch, *, factor: float = 2.0) -> None:
        judge = assert_mixed_within_rule if role == MIXED else assert_mqa_within_rule
        judge(batch, factor=factor)
