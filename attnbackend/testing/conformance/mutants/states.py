"""Faults of claims, of plans and of state that no argument shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbackend.impl import OptionalTensors
from attnbackend.metadata import AttentionMetadata, CommonAttentionMetadata
from attnbackend.testing.conformance.honest import HonestBuilder, HonestImpl, Places
from attnbackend.testing.conformance.mutants.mutant import Mutant
from attnbackend.types import Reason
from attnbackend.validation import configuration_reasons

__all__ = ["STATE_MUTANTS"]

WORKSPACE = torch.zeros(4)
"""Memory of the module that no schema knows."""


class WritesCache(HonestImpl):
    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        """``forward`` declares that it reads the cache alone."""
        super().attend(query, key, value, kv_cache, attn_metadata, output, tensors)
        bits = kv_cache.view(torch.uint8) if kv_cache.dtype.itemsize == 1 else kv_cache
        bits[0].zero_()


class ScalesQueryInPlace(HonestImpl):
    def logits(self, q_THD: Tensor, k_TLKD: Tensor) -> Tensor:
        q_THD.mul_(2.0)
        return super().logits(q_THD, k_TLKD) / 2.0


class WritesWorkspace(HonestImpl):
    def logits(self, q_THD: Tensor, k_TLKD: Tensor) -> Tensor:
        WORKSPACE.add_(1.0)
        return super().logits(q_THD, k_TLKD)


class KeepsFirstCache(HonestImpl):
    """Dequantises the first cache that it meets and reads it ever after."""

    kept: Tensor | None = None

    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        if self.kept is None:
            self.kept = kv_cache.clone()
            self.kept.zero_()
            super().attend(query, key, value, kv_cache, attn_metadata, output, tensors)
            return
        super().attend(query, key, value, self.kept, attn_metadata, output, tensors)


class WritesFirstOutput(HonestImpl):
    kept: Tensor | None = None

    def finish(
        self, out_THD: Tensor, lse_TH: Tensor, at: Places, output: Tensor, tensors: OptionalTensors
    ) -> None:
        self.kept = output if self.kept is None or self.kept.shape != output.shape else self.kept
        super().finish(out_THD, lse_TH, at, self.kept, tensors)


class BakedBuilder(HonestBuilder):
    """With buffers of its own, plans once and for all."""

    baked: AttentionMetadata | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttentionMetadata:  # fmt: skip
        plan = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.limits is None:
            return plan
        if self.baked is None:
            lens = common_attn_metadata.seq_lens.clone()
            self.baked = replace(plan, common=common_attn_metadata.replace(seq_lens=lens))
        return _Disguised(common=common_attn_metadata, real=self.baked.common)


class _Disguised(AttentionMetadata):
    """Says that it is for the step's tensors and holds others."""

    def __init__(self, *, common: CommonAttentionMetadata, real: CommonAttentionMetadata) -> None:
        object.__setattr__(self, "common", real)
        self.__dict__["shown"] = common

    def is_for(self, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor) -> bool:
        return self.__dict__["shown"].seq_lens is seq_lens


class LastStepsBuilder(HonestBuilder):
    last: CommonAttentionMetadata | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttentionMetadata:  # fmt: skip
        """As where a copy to the device is read before it has come."""
        plan = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.limits is None:
            return plan
        now = common_attn_metadata.replace(seq_lens=common_attn_metadata.seq_lens.clone())
        last, self.last = self.last or now, now
        return _Disguised(common=common_attn_metadata, real=last)


class MovingBuilder(HonestBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttentionMetadata:  # fmt: skip
        """A new tensor at each build, where a graph reads the old one."""
        positions = torch.arange(common_attn_metadata.num_actual_tokens, device=self.device)
        common = common_attn_metadata.replace(positions=positions)
        return super().build(common_prefix_len, common, fast_build)


class AsksForLengths(HonestImpl):
    def places(self, batch: CommonAttentionMetadata, num_tokens: int) -> Places:
        assert int(batch.seq_lens.max()) >= 0
        return super().places(batch, num_tokens)


class MasksSlots(HonestImpl):
    def kv_cache_update(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, tensors: OptionalTensors
    ) -> None:
        """How many tokens a mask picks is known on the device alone."""
        mask = slot_mapping >= 0
        super().kv_cache_update(key[mask], value[mask], kv_cache, slot_mapping[mask], tensors)


class RegrownWorkspace(HonestImpl):
    """Partial results lie in memory of the call's size, kept for the next call of that size."""

    space: Tensor | None = None

    def weigh(self, p_THL: Tensor, v_TLKD: Tensor, visible_TL: Tensor) -> Tensor:
        out_THD = super().weigh(p_THL, v_TLKD, visible_TL)
        if self.space is None or self.space.shape != out_THD.shape:
            self.space = torch.empty_like(out_THD)
        return self.space.copy_(out_THD)


class Jitters(HonestImpl):
    def logits(self, q_THD: Tensor, k_TLKD: Tensor) -> Tensor:
        """As atomics do: another order of summation at each call."""
        order_D = torch.randperm(q_THD.shape[-1], device=q_THD.device)
        return super().logits(q_THD[..., order_D], k_TLKD[..., order_D])


def _without(field: str) -> classmethod[Any, Any, Any]:
    """``validate_configuration`` that overlooks what is wrong with ``field``."""

    def validate(cls: Any, config: Any) -> list[Reason]:
        return [reason for reason in configuration_reasons(cls, config) if reason.field != field]

    return classmethod(validate)


def _refusing(field: str) -> classmethod[Any, Any, Any]:
    """``validate_configuration`` that refuses ``field`` although it is claimed."""

    def validate(cls: Any, config: Any) -> list[Reason]:
        reasons = configuration_reasons(cls, config)
        value = getattr(config, field)
        return [*reasons, Reason(field, value, "nothing")] if value else reasons

    return classmethod(validate)


def _raising(cls: Any, config: Any) -> list[Reason]:
    if config.has_alibi:
        raise NotImplementedError("alibi")
    return [r for r in configuration_reasons(cls, config) if r.field != "has_alibi"]


STATE_MUTANTS = (
    Mutant("writes_cache", "forward writes the cache, which it declares to read", "state_audit", WritesCache),
    Mutant("scales_query_in_place", "forward writes its query", "opcheck", ScalesQueryInPlace),
    Mutant("writes_workspace", "forward writes a tensor of its module", "state_audit", WritesWorkspace),
    Mutant("keeps_first_cache", "later calls read the first call's cache", "compiled", KeepsFirstCache),
    Mutant(
        "writes_first_output", "later calls write to the first call's output", "export", WritesFirstOutput
    ),
    Mutant("baked_plan", "every step runs with the first step's lengths", "plan", builder=BakedBuilder),
    Mutant("last_plan", "a step runs with the lengths of the step before", "plan", builder=LastStepsBuilder),
    Mutant("moving_plan", "plans for graphs hold new tensors at each step", "plan", builder=MovingBuilder),
    Mutant("asks_for_lengths", "forward waits for the device inside a graph", "host_sync", AsksForLengths),
    Mutant("masks_slots", "the writer waits for the device inside a graph", "host_sync", MasksSlots),
    Mutant(
        "workspace_regrown", "a workspace is allocated anew where a call's size is another", "host_sync",
        RegrownWorkspace,
    ),
    Mutant("jitters", "claims determinism and has none", "determinism", Jitters),
    Mutant(
        "window_overlooked", "a window is accepted, unclaimed, and ignored", "refusal",
        claims={"supports_sliding_window": False, "validate_configuration": _without("sliding_window")},
    ),
    Mutant(
        "lse_overlooked", "an LSE is accepted, unclaimed, and not written", "refusal",
        claims={"lse_base": None, "validate_configuration": _without("needs_lse")},
    ),
    Mutant(
        "refuses_without_reasons", "what is unclaimed fails with another error", "refusal",
        claims={"supports_alibi": False, "validate_configuration": classmethod(_raising)},
    ),
    Mutant(
        "refuses_what_it_claims", "sinks are claimed and refused", "numerics",
        claims={"validate_configuration": _refusing("has_sinks")}, shown_by="sinks-mixed",
    ),
)  # fmt: skip
