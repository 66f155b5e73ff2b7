"""Batches in buffers of fixed size, and plans made from them: as a serving engine does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbackend.cudagraph.safety import plan_tensors
from attnbackend.forward_context import ForwardContext
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    BatchLimits,
    CommonAttentionMetadata,
)
from attnbackend.testing.conformance.base_subject import AnyBatch, BaseSubject, Case
from attnbackend.types import AttentionCGSupport

__all__ = [
    "GROUP",
    "PersistentBatch",
    "context_of",
    "graph_support",
    "make_builder",
    "plan_tensors",
]

GROUP = 0


@dataclass(frozen=True)
class PersistentBatch:
    """query_start_loc, seq_lens and block_table of the largest size, filled anew for each batch."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    num_tokens: int
    block_size: int

    @classmethod
    def for_batches(cls, batches: Sequence[AnyBatch], device: torch.device) -> PersistentBatch:
        rows = max(len(b.seq_lens) for b in batches)
        width = max(b.block_table.shape[1] for b in batches)
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        return cls(
            query_start_loc=zeros(rows + 1),
            seq_lens=zeros(rows),
            block_table=zeros(rows, width),
            num_tokens=max(b.query.shape[0] for b in batches),
            block_size=batches[0].case.block_size,
        )

    @property
    def limits(self) -> BatchLimits:
        rows, width = self.block_table.shape
        return BatchLimits(rows, self.num_tokens, width * self.block_size)

    def fill(self, batch: AnyBatch) -> CommonAttentionMetadata:
        """Copies the batch in; rows behind it become padding."""
        rows, width = batch.block_table.shape
        self.query_start_loc[: rows + 1].copy_(batch.query_start_loc)
        self.query_start_loc[rows + 1 :] = batch.query_start_loc[-1]
        self.seq_lens.zero_()[:rows].copy_(batch.seq_lens)
        self.block_table.zero_()[:rows, :width].copy_(batch.block_table)
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            num_reqs=len(batch.case.query_lens),
            num_actual_tokens=sum(batch.case.query_lens),
            max_query_len=max(batch.case.query_lens),
            max_seq_len=max(batch.case.seq_lens),
            causal=batch.case.causal,
            query_start_loc_cpu=self.query_start_loc.to("cpu", copy=True),
            seq_lens_cpu=self.seq_lens.to("cpu", copy=True),
        )

    @property
    def arguments(self) -> dict[str, Tensor]:
        """What the op is given in the place of the batch's own."""
        return {
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
        }


def make_builder(
    subject: BaseSubject[Case, Any], case: Case, limits: BatchLimits
) -> AttentionMetadataBuilder[AttentionMetadata]:
    """The backend's builder with persistent buffers."""
    params = subject.params(case)
    return subject.backend.get_builder_cls()(params, spec_of(params), limits, subject.device)


def graph_support(subject: BaseSubject[Case, Any], case: Case) -> AttentionCGSupport:
    """How much of the backend a CUDA graph can hold, as its builder claims."""
    return subject.backend.get_builder_cls().get_cudagraph_support(spec_of(subject.params(case)))


def context_of(subject: BaseSubject[Any, Any], plan: AttentionMetadata) -> ForwardContext:
    """The context in which the subject's ops of group `GROUP` find ``plan``."""
    return ForwardContext(plans={(GROUP, subject.name): plan})
