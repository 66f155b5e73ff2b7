"""`FLASHINFER_MLA`: FlashInfer's paged kernels over latents, planned on the host once a step.

Shape legend: Q requests, T tokens, H heads, W table width.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnbackend.backends.flashinfer.page_lists import PageLists
from attnbackend.backends.flashinfer.wrappers import Planner, scratch_tensors
from attnbackend.backends.host_lengths import with_host_lengths
from attnbackend.backends.mla.common import MLACommonImpl, MLACommonMetadataBuilder
from attnbackend.backends.mla.library import RANK, ROPE, LibraryMLABackend, LibraryRows, import_problem
from attnbackend.impl import AttentionParams, MLAAttentionImpl, MLATensors
from attnbackend.metadata import AttentionMetadata, CommonAttentionMetadata
from attnbackend.mla_metadata import MLAMetadata
from attnbackend.types import AttentionCGSupport, LSEBase

__all__ = ["FlashInferMLABackend"]

_WORKSPACE = 128 << 20
"""Bytes for partial results, as FlashInfer's documentation recommends."""


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


class LatentPlanner(Planner):
    """A plan/run object; with `graph` in memory that a CUDA graph of as many requests and tokens may read."""

    def __init__(
        self, params: AttentionParams, device: torch.device, rows: int = 0, max_pages: int = 0
    ) -> None:
        super().__init__(params)
        mla = importlib.import_module("flashinfer.mla")
        buffers: dict[str, Any] = {}
        if max_pages:
            sizes = {
                "qo_indptr": rows + 1,
                "kv_indptr": rows + 1,
                "kv_indices": max_pages,
                "kv_len_arr": rows,
            }
            buffers = {k: torch.zeros(n, dtype=torch.int32, device=device) for k, n in sizes.items()}
            buffers["use_cuda_graph"] = True
        self.wrapper = mla.BatchMLAPagedAttentionWrapper(_workspace(device), backend="auto", **buffers)
        self.clears = getattr(self.wrapper, "_backend", None) == "fa3"
        """Hopper's kernel gives zeros and -inf where no key is seen; the others leave a mean and -5e4."""

    def plan(self, batch: CommonAttentionMetadata) -> None:
        """Plans a batch whose lengths are known on the host."""
        from attnbackend.kernels import triton

        p, table = self.params, batch.block_table
        starts, lens = batch.host_query_start_loc(), batch.host_seq_lens()
        queries = starts.diff()
        pages = PageLists.of(starts, lens, p.block_size, table.shape[1])
        self._begin_plan()
        indices = torch.zeros(max(1, pages.num_pages), dtype=torch.int32, device=table.device)
        triton.gather_page_indices(table, pages.starts.to(table.device, non_blocking=True), indices)
        self.wrapper.plan(
            starts, pages.starts, indices, torch.where(queries > 0, lens, 0), p.num_heads, RANK, ROPE,
            p.block_size, bool((queries > 1).any()), p.scale, p.dtype, p.dtype,
        )  # fmt: skip
        self._note_copy(table.device)

    def attend(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor, output: Tensor, lse: Tensor
    ) -> None:
        """The planned batch; output and lse contiguous."""
        self.wrapper.run(
            query_latent, query_rope, kv_cache[..., :RANK], kv_cache[..., RANK:], out=output, lse=lse,
            return_lse=True,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FlashInferMLAMetadata(AttentionMetadata):
    planner: LatentPlanner | None
    """Holds the plan; None where no request brings tokens."""
    num_tokens: int
    """Of all requests."""


class FlashInferMLAMetadataBuilder(MLACommonMetadataBuilder):
    """Needs the lengths on the host, and copies them there where a step does not bring them.

    A graph holds uniform batches of the number of requests and tokens that it was captured with. Without
    limits, as where an op plans for itself, a plan lasts until the next one.
    """

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = 16

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._eager: LatentPlanner | None = None
        self._graphs: dict[tuple[int, int], LatentPlanner] = {}

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> MLAMetadata:
        """Makes the memory that the graph of as many requests and tokens reads, and plans in it.

        Raises:
            ValueError: the builder has no limits.
        """
        if self.limits is None:
            raise ValueError("FLASHINFER_MLA captures with a builder that has limits; limits=None")
        common = with_host_lengths(common_attn_metadata)
        rows, table = common.seq_lens.shape[0], common.block_table
        key = rows, int(common.host_query_start_loc()[-1])
        if key not in self._graphs:
            widest = max(table.shape[1], -(-self.limits.max_model_len // self.params.block_size))
            self._graphs[key] = LatentPlanner(self.params, table.device, rows, rows * widest)
        return self.build(0, common)

    def build_decode(self, common: CommonAttentionMetadata) -> FlashInferMLAMetadata:
        batch = with_host_lengths(common)
        rows, tokens = batch.seq_lens.shape[0], int(batch.host_query_start_loc()[-1])
        if tokens == 0:
            return FlashInferMLAMetadata(common=batch, planner=None, num_tokens=0)
        planner = self._graphs.get((rows, tokens))
        if planner is None or not _is_uniform(batch):
            planner = self._eager = self._eager or LatentPlanner(self.params, batch.block_table.device)
        planner.plan(batch)
        return FlashInferMLAMetadata(common=batch, planner=planner, num_tokens=tokens)


def _is_uniform(batch: CommonAttentionMetadata) -> bool:
    queries = batch.host_query_start_loc().diff()
    return bool((queries == queries[0]).all())


class FlashInferMLAImpl(LibraryRows, MLACommonImpl):
    base_2 = True

    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor,
        attn_metadata: FlashInferMLAMetadata, output: Tensor, tensors: MLATensors,
    ) -> None:  # fmt: skip
        tokens, planner = attn_metadata.num_tokens, attn_metadata.planner
        lse = tensors.lse
        if lse is None or not lse.is_contiguous():
            lse = torch.empty(output.shape[:2], dtype=torch.float32, device=output.device)
        if planner is not None:
            target = output[:tokens]
            if not target.is_contiguous():
                target = target.new_empty(target.shape)
            planner.attend(query_latent[:tokens], query_rope[:tokens], kv_cache, target, lse[:tokens])
            if target.data_ptr() != output.data_ptr():
                output[:tokens].copy_(target)
        if planner is None or not planner.clears:
            self.finish(output, lse, attn_metadata.common, tensors)
        else:
            self._finish_padding(output, lse, tokens, tensors)

    def _finish_padding(self, output: Tensor, lse: Tensor, tokens: int, tensors: MLATensors) -> None:
        if tokens < len(output):
            output[tokens:] = 0
            lse[tokens:] = -math.inf
        if tensors.lse is not None and tensors.lse is not lse:
            tensors.lse.copy_(lse)


class FlashInferMLABackend(LibraryMLABackend):
    min_compute_capability = (8, 0)
    lse_base = LSEBase.TWO

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER_MLA"

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        return FlashInferMLAImpl

    @staticmethod
    def get_builder_cls() -> type[MLACommonMetadataBuilder]:
        return FlashInferMLAMetadataBuilder

    @classmethod
    def workspaces(cls) -> list[Tensor]:
        return list(scratch_tensors())

    @classmethod
    def library_problem(cls) -> str | None:
        return import_problem("flashinfer.mla", ("BatchMLAPagedAttentionWrapper",))

    @classmethod
    def library(cls) -> str | None:
        if cls.library_problem():
            return None
        library = importlib.import_module("flashinfer")
        return f"flashinfer {getattr(library, '__version__', 'of unknown version')}"
