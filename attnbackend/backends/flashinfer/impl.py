"""`FLASHINFER`, layer by layer: the planned kernel, and one pass over what it leaves to do.

Shape legend: T tokens, H query heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbackend.backends.flashinfer.planning import FlashInferMetadata
from attnbackend.backends.flashinfer.wrappers import Planner
from attnbackend.backends.query_scale import scaled_query
from attnbackend.backends.triton_writer import TritonWriterImpl
from attnbackend.impl import AttentionParams, OptionalTensors
from attnbackend.native_calls import amounts_to
from attnbackend.ops.library_calls import serve_library_calls

__all__ = ["FlashInferImpl"]


class FlashInferImpl(TritonWriterImpl):
    """The kernels take scales as numbers of the host, which nobody can know there: the query and the last
    pass take the tensors instead. Sinks they ignore, so these too are the last pass's."""

    def __init__(self, params: AttentionParams) -> None:
        super().__init__(params)
        if params.device_type == "cuda":
            serve_library_calls("FLASHINFER", "cuda")

    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: FlashInferMetadata, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        tokens = self._planned_tokens(attn_metadata)
        needs_lse = tensors.lse is not None or tensors.sinks is not None
        lse = self._contiguous_lse(query, tensors.lse) if needs_lse else None
        planner = attn_metadata.planner
        target = output
        if planner is not None:
            target = self._run(planner, query, kv_cache, output, lse, tokens, tensors.k_scale)
        more = self._finish(output, lse, attn_metadata, tensors)
        plain = target is output and lse is None and tensors.k_scale is None
        is_own = type(self) is FlashInferImpl  # another class may do more
        if planner is not None and is_own and plain and not more:
            amounts_to(lambda: planner.library_call(query, kv_cache, output), query, output)

    @staticmethod
    def _run(
        planner: Planner, query: Tensor, kv_cache: Tensor, output: Tensor, lse: Tensor | None, tokens: int,
        k_scale: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Runs the planned kernel on as many tokens; returns what it wrote to."""
        if tokens < query.shape[0]:
            query, output = query[:tokens], output[:tokens]
            lse = None if lse is None else lse[:tokens]
        planned = scaled_query(query, k_scale)
        target = output if output.is_contiguous() else torch.empty_like(planned).contiguous()
        planner.run(planned, kv_cache, target, lse)
        if target is not output:
            output.copy_(target)
        return target

    @staticmethod
    def _planned_tokens(plan: FlashInferMetadata) -> int:
        return plan.facts.covered_tokens

    @staticmethod
    def _contiguous_lse(query: Tensor, lse: Tensor | None) -> Tensor:
        """Where the kernel writes its LSE: where it is wanted, if that is dense."""
        if lse is not None and lse.is_contiguous():
            return lse
        return query.new_empty(query.shape[:2], dtype=torch.float32)

    def _finish(
        self, output: Tensor, lse: Tensor | None, plan: FlashInferMetadata, tensors: OptionalTensors
    ) -> bool:
        """Whether there was something to do."""
        facts = plan.facts
        # Without keys the kernel writes zeros, and an LSE that is not -inf; where there are keys but a query
        # is before them all, it writes their mean.
        empty = facts.may_see_no_key and not (plan.is_decode and lse is None)
        moved = tensors.lse is not None and lse is not tensors.lse
        unwritten = output.shape[0] > facts.covered_tokens
        if not (empty or moved or unwritten or tensors.sinks is not None or tensors.v_scale is not None):
            return False
        from attnbackend.kernels import triton

        triton.finish_attention(
            output, lse, tensors.lse, plan.common.query_start_loc, plan.common.seq_lens, base_2=True,
            causal=self.params.causal, sinks=tensors.sinks, v_scale=tensors.v_scale,
        )  # fmt: skip
        return True
