"""`FLASHMLA`: the package flash_mla, or vLLM's build of it, dense decode on Hopper GPUs.

Its kernel takes as many tokens of every request, so a batch of mixed lengths becomes one of single tokens.

Shape legend: Q requests, T tokens, N tokens of each request, H heads, L kv_lora_rank, W table width.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from attnbackend.backends.host_lengths import BatchFacts
from attnbackend.backends.mla.common import MLACommonImpl, MLACommonMetadataBuilder, joined_query
from attnbackend.backends.mla.library import RANK, LibraryMLABackend, LibraryRows, import_problem
from attnbackend.impl import MLAAttentionImpl, MLATensors
from attnbackend.metadata import AttentionMetadata, CommonAttentionMetadata
from attnbackend.mla_metadata import MLAMetadata
from attnbackend.types import AttentionCGSupport

__all__ = [
    "FlashMLABackend",
    "attend_into",
    "each_token_alone",
    "flash_mla",
    "flash_mla_problem",
    "row_of_tokens",
    "takes_out",
]

FLASH_MLA_MODULES = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface")
"""Where the library's functions are found, best first."""


def flash_mla_problem(names: tuple[str, ...]) -> str | None:
    """Why no module can be used that has functions of these names."""
    problems = [import_problem(module, names) for module in FLASH_MLA_MODULES]
    return None if None in problems else "; ".join(map(str, problems))


@cache
def flash_mla() -> Any:
    """The library, where `flash_mla_problem` finds none.

    Raises:
        ImportError: none is installed.
    """
    for module in FLASH_MLA_MODULES[:-1]:
        with suppress(ImportError, OSError):
            return importlib.import_module(module)
    return importlib.import_module(FLASH_MLA_MODULES[-1])


@cache
def takes_out(function: Callable[..., Any]) -> bool:
    """Whether the library's version writes where it is told to."""
    return "out" in inspect.signature(function).parameters


def row_of_tokens(query_start_loc: Tensor, tokens: int) -> Tensor:
    """int64 [T]: each token's request; the last one for tokens past it. Nothing is waited for."""
    token_T = torch.arange(tokens, device=query_start_loc.device, dtype=query_start_loc.dtype)
    return torch.searchsorted(query_start_loc[1:], token_T, right=True).clamp_(max=len(query_start_loc) - 2)


def each_token_alone(batch: CommonAttentionMetadata, tokens: int) -> tuple[Tensor, Tensor]:
    """Lengths int32 [T] and block tables [T, W] of a batch in which every token is a request of its own."""
    row_T = row_of_tokens(batch.query_start_loc, tokens)
    token_T = torch.arange(tokens, device=row_T.device)
    behind_T = batch.query_start_loc[1:][row_T] - 1 - token_T
    lens_T = torch.where(behind_T < 0, 0, batch.seq_lens[row_T] - behind_T)
    return lens_T.clamp_(min=0).to(torch.int32), batch.block_table[row_T]


def attend_into(output: Tensor, attend: partial[tuple[Tensor, Tensor]], each: int) -> Tensor:
    """A call of `flash_mla_with_kvcache` for as many tokens of every request, its output in `output`
    [T, H, L]; gives the LSE.

    Where requests have several tokens, versions differ in the shape of ``out``: one that refuses this copies.
    """
    tokens, heads, rank = output.shape
    if output.is_contiguous() and takes_out(attend.func):
        try:
            _, lse = attend(out=output.view(tokens // each, 1, each * heads, rank))
        except RuntimeError:
            if each == 1:
                raise
        else:
            return lse
    out, lse = attend()
    output.copy_(out.reshape(output.shape))
    return lse


@dataclass(frozen=True, kw_only=True)
class FlashMLAMetadata(AttentionMetadata):
    tokens_each: int
    """Tokens of every request; 0: they differ, or nobody knows."""
    facts: BatchFacts
    schedules: dict[bool, tuple[Any, Any]] = field(default_factory=dict, compare=False)
    """The library's schedule of this batch: one made outside of a graph, and one that a graph makes anew at
    each replay. A plan serves one capture."""

    def schedule(self, lens: Tensor, queries: int) -> tuple[Any, Any]:
        """Made by the first layer, for all of them."""
        inside = lens.is_cuda and torch.cuda.is_current_stream_capturing()
        if inside not in self.schedules:
            self.schedules[inside] = flash_mla().get_mla_metadata(lens, queries, 1)
        return self.schedules[inside]


class FlashMLAMetadataBuilder(MLACommonMetadataBuilder):
    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = 16

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> MLAMetadata:
        plan = self.build(0, common_attn_metadata)
        rows = plan.decode
        if not isinstance(rows, FlashMLAMetadata):
            return plan
        return replace(plan, decode=replace(rows, facts=BatchFacts.of_capture(rows.common)))

    def build_decode(self, common: CommonAttentionMetadata) -> FlashMLAMetadata:
        each = 0
        if common.query_start_loc_cpu is not None:
            queries = common.query_start_loc_cpu.diff()
            each = int(queries[0]) if len(queries) and bool((queries == queries[0]).all()) else 0
        facts = BatchFacts.of(common, causal=True)
        return FlashMLAMetadata(common=common, tokens_each=each, facts=facts)


class FlashMLAImpl(LibraryRows, MLACommonImpl):
    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor, attn_metadata: FlashMLAMetadata,
        output: Tensor, tensors: MLATensors,
    ) -> None:  # fmt: skip
        batch, (tokens, heads, _) = attn_metadata.common, output.shape
        if tokens == 0:
            return
        each, lens, table = attn_metadata.tokens_each, batch.seq_lens, batch.block_table
        if each == 0 or each * lens.shape[0] != tokens:
            each, (lens, table) = 1, each_token_alone(batch, tokens)
        query = joined_query(query_latent, query_rope).contiguous().view(lens.shape[0], each, heads, -1)
        schedule, splits = attn_metadata.schedule(lens, each * heads)
        attend = partial(
            flash_mla().flash_mla_with_kvcache, query, kv_cache.unsqueeze(2), table, lens, RANK, schedule,
            splits, softmax_scale=self.params.scale, causal=True,
        )  # fmt: skip
        lse_QHN = attend_into(output, attend, each)
        # Kernels were tried with single tokens alone.
        facts = attn_metadata.facts if each == 1 or not attn_metadata.facts.may_see_no_key else None
        self.finish(output, lse_QHN.transpose(1, 2).reshape(tokens, heads), batch, tensors, facts)


class FlashMLABackend(LibraryMLABackend):
    supported_block_sizes = (64,)

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA"

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        return FlashMLAImpl

    @staticmethod
    def get_builder_cls() -> type[MLACommonMetadataBuilder]:
        return FlashMLAMetadataBuilder

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int] | None) -> bool:
        return capability is None or capability[0] == 9

    @classmethod
    def library_problem(cls) -> str | None:
        return flash_mla_problem(("flash_mla_with_kvcache", "get_mla_metadata"))

    @classmethod
    def library(cls) -> str | None:
        return None if cls.library_problem() else str(flash_mla().__name__)
