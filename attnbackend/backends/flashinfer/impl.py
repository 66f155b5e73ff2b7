"""`FLASHINFER`, layer by layer: the planned kernel, and one pass over what it leaves to do.

Shape legend: T tokens, H query heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbackend.backends.flashinfer.planning import FlashInferMetadata
from attnbackend.backends.query_scale import scaled_query
from attnbackend.backends.triton_writer import TritonWriterImpl
from attnbackend.impl import OptionalTensors

__all__ = ["FlashInferImpl"]


class FlashInferImpl(TritonWriterImpl):
    """The kernels take scales as numbers of the host, which nobody can know there: the query and the last
    pass take the tensors instead. Sinks they ignore, so these too are the last pass's."""

    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: FlashInferMetadata, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        tokens = self._planned_tokens(attn_metadata)
        needs_lse = tensors.lse is not None or tensors.sinks is not None
        lse = self._contiguous_lse(query, tensors.lse) if needs_lse else None
        if attn_metadata.planner is not None:
            planned = scaled_query(query[:tokens], tensors.k_scale)
            written = output[:tokens]
            target = written if written.is_contiguous() else torch.empty_like(planned).contiguous()
            attn_metadata.planner.run(planned, kv_cache, target, None if lse is None else lse[:tokens])
            if target is not written:
                written.copy_(target)
        self._finish(output, lse, attn_metadata, tensors)

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
    ) -> None:
        facts = plan.facts
        # Without keys the kernel writes zeros, and an LSE that is not -inf; where there are keys but a query
        # is before them all, it writes their mean.
        empty = facts.may_see_no_key and not (plan.is_decode and lse is None)
        moved = tensors.lse is not None and lse is not tensors.lse
        unwritten = output.shape[0] > facts.covered_tokens
        if not (empty or moved or unwritten or tensors.sinks is not None or tensors.v_scale is not None):
            return
        from attnbackend.kernels import triton

        triton.finish_attention(
            output, lse, tensors.lse, plan.common.query_start_loc, plan.common.seq_lens, base_2=True,
            causal=self.params.causal, sinks=tensors.sinks, v_scale=tensors.v_scale,
        )  # fmt: skip
