"""The plan of a step: FlashInfer decides on the host which tiles each processor works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnbackend.backends.flashinfer.page_lists import PageLists
from attnbackend.backends.flashinfer.wrappers import DecodeGraph, EagerPlans, Planner, shared_workspace
from attnbackend.backends.host_lengths import BatchFacts, with_host_lengths
from attnbackend.kv_cache import resolve_kv_cache_dtype
from attnbackend.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attnbackend.types import AttentionCGSupport

__all__ = ["FlashInferMetadata", "FlashInferMetadataBuilder", "prefill_kernel"]

_LONG_QUERIES = 32
"""Tokens a request from which the library chooses its kernel; chosen without a measurement."""


@dataclass(frozen=True, kw_only=True)
class FlashInferMetadata(AttentionMetadata):
    planner: Planner | None
    """Holds the plan; None where no request brings tokens."""
    facts: BatchFacts
    is_decode: bool
    """Every request that brings tokens brings one."""


def prefill_kernel(tokens: int, requests: int, *, is_quantized: bool, causal: bool, windowed: bool) -> str:
    """FlashInfer's backend for a batch: "auto", its best for prompts on this device, or "fa2".

    Args:
        tokens: of the batch.
        requests: that bring tokens.
        is_quantized: the cache is float8 and the query is not, which only "fa2" takes.
        causal, windowed: a window without causality is in "fa2" alone.
    """
    short = tokens < _LONG_QUERIES * requests
    return "fa2" if short or is_quantized or (windowed and not causal) else "auto"


class FlashInferMetadataBuilder(AttentionMetadataBuilder[FlashInferMetadata]):
    """Needs the lengths on the host and copies them there where a step does not bring them.

    A graph holds single-token decode for the number of rows it was captured with. Without limits, as where an
    op plans for itself, a plan lasts until the next one.
    """

    cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._eager: dict[str, EagerPlans] = {}
        self._graphs: dict[int, DecodeGraph] = {}
        self._indices: Tensor | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashInferMetadata:  # fmt: skip
        common = with_host_lengths(common_attn_metadata)
        starts, lens = common.host_query_start_loc(), common.host_seq_lens()
        facts = BatchFacts.of(common, causal=self.params.causal)
        queries = starts.diff()
        graph = self._graphs.get(len(lens))
        if graph is not None and bool((queries == 1).all()):
            graph.plan(self._pages(starts, lens, common.block_table), common.block_table)
            return FlashInferMetadata(common=common, planner=graph, facts=facts, is_decode=True)
        planner = self._plan_eager(starts, lens, queries, common.block_table)
        is_decode = bool((queries <= 1).all())
        return FlashInferMetadata(common=common, planner=planner, facts=facts, is_decode=is_decode)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashInferMetadata:
        """Makes the memory that the graph of as many rows reads, and plans in it.

        Raises:
            ValueError: the batch is not one token a row, or the builder has no limits.
        """
        common = with_host_lengths(common_attn_metadata)
        starts, lens = common.host_query_start_loc(), common.host_seq_lens()
        if self.limits is None or not bool((starts.diff() == 1).all()):
            raise ValueError(
                "FLASHINFER captures batches of one token a row, with a builder that has limits; query "
                f"lengths are {starts.diff().tolist()}, limits={self.limits}"
            )
        graph = self._graphs.get(len(lens)) or self._new_graph(len(lens), common.block_table)
        graph.plan(self._pages(starts, lens, common.block_table), common.block_table)
        return FlashInferMetadata(
            common=common, planner=graph, facts=BatchFacts.of_capture(common), is_decode=True
        )

    def _new_graph(self, rows: int, block_table: Tensor) -> DecodeGraph:
        assert self.limits is not None
        if self._indices is None:
            widest = max(block_table.shape[1], -(-self.limits.max_model_len // self.params.block_size))
            most = max(rows, self.limits.max_num_seqs) * widest
            self._indices = torch.zeros(most, dtype=torch.int32, device=block_table.device)
        graph = DecodeGraph(self.params, self._workspace(block_table.device), rows, self._indices)
        self._graphs[rows] = graph
        return graph

    def _workspace(self, device: torch.device) -> Tensor:
        rows = 0 if self.limits is None else self.limits.max_num_seqs
        return shared_workspace(self.params, rows, device)

    def _pages(self, starts: Tensor, lens: Tensor, block_table: Tensor) -> PageLists:
        return PageLists.of(starts, lens, self.params.block_size, block_table.shape[1])

    def _plan_eager(
        self, starts: Tensor, lens: Tensor, queries: Tensor, block_table: Tensor
    ) -> EagerPlans | None:
        tokens = int(starts[-1])
        if tokens == 0:
            return None
        p = self.params
        kernel = prefill_kernel(
            tokens, int((queries > 0).sum()), causal=p.causal, windowed=p.sliding_window is not None,
            is_quantized=resolve_kv_cache_dtype(p.kv_cache_dtype, p.dtype).itemsize == 1,
        )  # fmt: skip
        planner = self._eager.get(kernel)
        if planner is None:
            planner = EagerPlans(p, self._workspace(block_table.device), kernel)
            self._eager[kernel] = planner
        planner.plan(starts, self._pages(starts, lens, block_table), block_table)
        return planner
