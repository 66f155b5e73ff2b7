"""Broken backends of latent attention whose fault is in plans, in what they keep, or in what they write.

Shape legend: T tokens, J keys of a request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbackend.backends.mla.torch_mla import TorchMLAImpl, TorchMLAMetadataBuilder
from attnbackend.backends.torch_sdpa import TorchSDPAMetadata
from attnbackend.metadata import AttentionMetadata, CommonAttentionMetadata
from attnbackend.mla_metadata import MLAMetadata
from attnbackend.testing.conformance.latent.mutant import LatentMutant
from attnbackend.types import AttentionCGSupport

__all__ = ["LATENT_STATE_MUTANTS", "DeviceLengths", "DeviceLengthsBuilder"]


class _EveryThirdCallOff(TorchMLAImpl):
    calls = 0

    def forward_mqa(self, *args: Any) -> None:
        """As sums of partial results in any order are: by a last bit."""
        super().forward_mqa(*args)
        type(self).calls += 1
        if type(self).calls % 3 == 1:
            args[4].mul_(1 + 2e-7)


class _ClaimsGraphs(TorchMLAMetadataBuilder):
    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class _FirstPlanKept(TorchMLAMetadataBuilder):
    def build_decode(self, common: CommonAttentionMetadata) -> AttentionMetadata:
        plan = super().build_decode(common)
        if self.limits is None:
            return plan
        self._kept = getattr(self, "_kept", plan)
        return self._kept


class _LastPlan(TorchMLAMetadataBuilder):
    def build_decode(self, common: CommonAttentionMetadata) -> AttentionMetadata:
        plan = super().build_decode(common)
        if self.limits is None:
            return plan
        last, self._last = getattr(self, "_last", plan), plan
        return replace(last, common=common)


class _ReadsWriteACache(TorchMLAImpl):
    def forward_mqa(self, *args: Any) -> None:
        super().forward_mqa(*args)
        args[2][0, 0, 0] = 1


class _ScalesQuery(TorchMLAImpl):
    def forward_mqa(self, *args: Any) -> None:
        args[0].mul_(2.0)
        super().forward_mqa(*args)


class _FirstTable(TorchMLAImpl):
    kept: Tensor | None = None

    def _slots(self, table: Tensor, seq_len: int) -> Tensor:
        if self.kept is None or len(self.kept) != len(table):
            self.kept = table.clone()
        return super()._slots(self.kept, seq_len)


class _TableByAddress(TorchMLAImpl):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.known: dict[int, Tensor] = {}

    def _slots(self, table: Tensor, seq_len: int) -> Tensor:
        """What lies at an address is taken to stay."""
        kept = self.known.setdefault(table.data_ptr(), table.clone())
        return super()._slots(kept if len(kept) == len(table) else table, seq_len)


class _FirstCacheRead(TorchMLAImpl):
    kept: Tensor | None = None

    def gather_latents(self, kv_cache: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        self.kept = kv_cache if self.kept is None or self.kept.shape != kv_cache.shape else self.kept
        return super().gather_latents(self.kept, *args)


class _FirstCacheWritten(TorchMLAImpl):
    kept: Tensor | None = None

    def mla_kv_cache_update(self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, *args: Any) -> None:
        self.kept = kv_cache if self.kept is None or self.kept.shape != kv_cache.shape else self.kept
        super().mla_kv_cache_update(kv_c, k_pe, self.kept, *args)


class _FirstOutput(TorchMLAImpl):
    kept: Tensor | None = None

    def forward_mqa(self, *args: Any) -> None:
        query, rope, kv_cache, plan, output, tensors = args
        self.kept = output if self.kept is None or self.kept.shape != output.shape else self.kept
        super().forward_mqa(query, rope, kv_cache, plan, self.kept, tensors)


class _Offsets32(TorchMLAImpl):
    def gather_latents(self, kv_cache: Tensor, slots: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        """Blocks whose offset wraps are taken to lie at the cache's start."""
        size = self.params.block_size
        beyond_J = slots // size * kv_cache.stride(0) >= 2**31
        return super().gather_latents(kv_cache, torch.where(beyond_J, slots % size, slots), *args)


class _RegrownWorkspace(TorchMLAImpl):
    """Partial results lie in memory of the call's size, kept for the next call of that size."""

    space: Tensor | None = None

    def forward_mqa(self, *args: Any) -> None:
        query, rope, kv_cache, plan, output, tensors = args
        if self.space is None or self.space.shape != output.shape:
            self.space = torch.empty_like(output)
        super().forward_mqa(query, rope, kv_cache, plan, self.space, tensors)
        output.copy_(self.space)


class _LSEOfNothing(TorchMLAImpl):
    def forward_mqa(self, *args: Any) -> None:
        super().forward_mqa(*args)
        if (lse := args[5].lse) is not None:
            lse.clamp_(min=torch.finfo(torch.float32).min)


class DeviceLengths(TorchMLAImpl):
    """Plans at each call from what the device holds, as kernels of graphs do: a replay that runs the call
    anew, which is what stands for a graph on a CPU, gives what eager gives."""

    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor, attn_metadata: TorchSDPAMetadata,
        *args: Any,
    ) -> None:  # fmt: skip
        batch = attn_metadata.common.replace(query_start_loc_cpu=None, seq_lens_cpu=None)
        now = TorchMLAMetadataBuilder(self.params, None, None, query_latent.device).build_decode(batch)
        super().forward_mqa(query_latent, query_rope, kv_cache, self.seen(now, attn_metadata), *args)

    def seen(self, now: Any, planned: TorchSDPAMetadata) -> Any:
        return now


class DeviceLengthsBuilder(TorchMLAMetadataBuilder):
    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = 16


class _BoundOfCapture(DeviceLengths):
    def seen(self, now: Any, planned: TorchSDPAMetadata) -> Any:
        """As of a grid that was made for the longest request of a plan."""
        bound = max((request.seq_len for request in planned.requests), default=0)
        return replace(now, requests=[r._replace(seq_len=min(r.seq_len, bound)) for r in now.requests])


class _MovingBuilder(DeviceLengthsBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAMetadata:  # fmt: skip
        """A new tensor at each build, where a graph reads the old one."""
        positions = torch.arange(common_attn_metadata.num_actual_tokens, device=self.device)
        common = common_attn_metadata.replace(positions=positions)
        return super().build(common_prefix_len, common, fast_build)


LATENT_STATE_MUTANTS = (
    LatentMutant("lse_of_nothing_finite", "the LSE of no key is the lowest number", "lse", _LSEOfNothing),
    LatentMutant(
        "keeps_first_table", "the block table of the first call is used ever after", "stateless", _FirstTable
    ),
    LatentMutant(
        "remembers_table", "a block table is known by its address, whatever lies there", "stateless",
        _TableByAddress,
    ),
    LatentMutant(
        "not_deterministic", "every third call is off by a bit", "determinism", _EveryThirdCallOff
    ),
    LatentMutant("first_plan_kept", "the first plan serves every step", "plan", builder=_FirstPlanKept),
    LatentMutant("last_plan", "a step runs with the plan of the step before", "plan", builder=_LastPlan),
    LatentMutant(
        "moving_plan", "plans for graphs hold new tensors at each step", "plan", DeviceLengths,
        builder=_MovingBuilder,
    ),
    LatentMutant(
        "claims_graphs", "graph support is claimed, and lengths wanted on the host", "host_sync",
        builder=_ClaimsGraphs,
    ),
    LatentMutant(
        "workspace_regrown", "a workspace is allocated anew where a call's size is another", "host_sync",
        _RegrownWorkspace, builder=_ClaimsGraphs,
    ),
    LatentMutant("offsets_in_32_bits", "cache offsets wrap at 2**31, unclaimed", "overflow", _Offsets32),
    LatentMutant("reads_write_a_cache", "reading changes the cache", "state_audit", _ReadsWriteACache),
    LatentMutant("scales_query_in_place", "decodes write their query", "opcheck", _ScalesQuery),
    LatentMutant(
        "keeps_first_cache", "later calls read the first call's cache", "stateless", _FirstCacheRead
    ),
    LatentMutant(
        "writes_first_cache", "later calls write to the first call's cache", "compiled", _FirstCacheWritten
    ),
    LatentMutant(
        "writes_first_output", "later calls write to the first call's output", "export", _FirstOutput
    ),
    LatentMutant(
        "bound_of_capture", "keys beyond the captured batch's longest request are not read", "graphs",
        _BoundOfCapture, builder=DeviceLengthsBuilder,
    ),
)  # fmt: skip
