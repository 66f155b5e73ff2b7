"""`FLASH_ATTN_MLA`: FlashAttention 3 with the latent part of queries beside the rotated one.

Shape legend: T tokens, H heads, L kv_lora_rank, R qk_rope_head_dim.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, NamedTuple

from torch import Tensor

from attnbackend.backends.host_lengths import BatchFacts
from attnbackend.backends.mla.common import MLACommonImpl, MLACommonMetadataBuilder
from attnbackend.backends.mla.library import RANK, LibraryMLABackend, LibraryRows
from attnbackend.impl import MLAAttentionImpl, MLATensors
from attnbackend.metadata import AttentionMetadata, CommonAttentionMetadata
from attnbackend.mla_metadata import MLAMetadata
from attnbackend.types import AttentionCGSupport

__all__ = ["FlashAttentionMLABackend"]


class LatentCall(NamedTuple):
    """One call of a library."""

    query_latent: Tensor
    query_rope: Tensor
    kv_cache: Tensor
    output: Tensor
    batch: CommonAttentionMetadata
    max_query_len: int
    max_seq_len: int
    scale: float

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """Rotated keys and latents of the cache, with one head."""
        rows = self.kv_cache.unsqueeze(2)
        return rows[..., RANK:], rows[..., :RANK]


class LatentProvider(ABC):
    """A library that brings FlashAttention 3."""

    module: ClassVar[str]

    @abstractmethod
    def load(self) -> str | None:
        """Imports the library; a reason where version 3 is not in it."""

    @abstractmethod
    def attend(self, call: LatentCall) -> Tensor:
        """Writes the output and gives the natural LSE, [T, H] with any strides."""


class VllmLatents(LatentProvider):
    module = "vllm.vllm_flash_attn"

    def load(self) -> str | None:
        interface = importlib.import_module(f"{self.module}.flash_attn_interface")
        self._attend = interface.flash_attn_varlen_func
        if getattr(interface, "FA3_AVAILABLE", False):
            return None
        return str(getattr(interface, "FA3_UNAVAILABLE_REASON", "built without version 3"))

    def attend(self, call: LatentCall) -> Tensor:
        key, value = call.sides
        _, lse_HT = self._attend(
            q=call.query_rope, k=key, v=value, q_v=call.query_latent, out=call.output,
            cu_seqlens_q=call.batch.query_start_loc, max_seqlen_q=call.max_query_len,
            seqused_k=call.batch.seq_lens, max_seqlen_k=call.max_seq_len, block_table=call.batch.block_table,
            softmax_scale=call.scale, causal=True, return_softmax_lse=True, fa_version=3,
        )  # fmt: skip
        return lse_HT.t()


class HopperLatents(LatentProvider):
    """As its authors ship it, from the folder ``hopper``."""

    module = "flash_attn_interface"

    def load(self) -> str | None:
        self._attend = importlib.import_module(self.module).flash_attn_with_kvcache
        return None

    def attend(self, call: LatentCall) -> Tensor:
        key, value = call.sides
        out, lse_HT, *_ = self._attend(
            call.query_rope, key, value, qv=call.query_latent, cache_seqlens=call.batch.seq_lens,
            page_table=call.batch.block_table, cu_seqlens_q=call.batch.query_start_loc,
            max_seqlen_q=call.max_query_len, softmax_scale=call.scale, causal=True, return_softmax_lse=True,
        )  # fmt: skip
        call.output.copy_(out)
        return lse_HT.t()


LATENT_PROVIDERS: tuple[LatentProvider, ...] = (VllmLatents(), HopperLatents())


@cache
def installation_problem(provider: LatentProvider) -> str | None:
    """Why a provider cannot be used."""
    package = provider.module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    try:
        return provider.load()
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def installed() -> list[LatentProvider]:
    """Providers that can be used, best first."""
    return [p for p in LATENT_PROVIDERS if installation_problem(p) is None]


@dataclass(frozen=True, kw_only=True)
class FlashAttentionMLAMetadata(AttentionMetadata):
    max_query_len: int
    max_seq_len: int
    facts: BatchFacts


class FlashAttentionMLAMetadataBuilder(MLACommonMetadataBuilder):
    """The kernel reads lengths on the device; a graph keeps the bounds that it was captured with."""

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = 16

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> MLAMetadata:
        plan = self.build(0, common_attn_metadata)
        rows = plan.decode
        if self.limits is None or not isinstance(rows, FlashAttentionMLAMetadata):
            return plan
        longest, facts = max(self.limits.max_model_len, rows.max_seq_len), BatchFacts.of_capture(rows.common)
        return replace(plan, decode=replace(rows, max_seq_len=longest, facts=facts))

    def build_decode(self, common: CommonAttentionMetadata) -> FlashAttentionMLAMetadata:
        return FlashAttentionMLAMetadata(
            common=common, max_query_len=max(1, common.max_query_len), max_seq_len=max(1, common.max_seq_len),
            facts=BatchFacts.of(common, causal=True),
        )  # fmt: skip


class FlashAttentionMLAImpl(LibraryRows, MLACommonImpl):
    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor,
        attn_metadata: FlashAttentionMLAMetadata, output: Tensor, tensors: MLATensors,
    ) -> None:  # fmt: skip
        batch, target = attn_metadata.common, output
        if not output.is_contiguous():
            target = output.new_empty(output.shape)
        call = LatentCall(
            query_latent, query_rope, kv_cache, target, batch, attn_metadata.max_query_len,
            attn_metadata.max_seq_len, self.params.scale,
        )  # fmt: skip
        lse_TH = installed()[0].attend(call)
        if target is not output:
            output.copy_(target)
        self.finish(output, lse_TH, batch, tensors, attn_metadata.facts)


class FlashAttentionMLABackend(LibraryMLABackend):
    """Hopper GPUs; vLLM's build of FlashAttention 3, or the authors' own.

    It loads pages of 64 rows, or a multiple, whole: NaN behind a sequence's last key would reach the output.
    """

    supported_block_sizes = (16, 32)

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN_MLA"

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        return FlashAttentionMLAImpl

    @staticmethod
    def get_builder_cls() -> type[MLACommonMetadataBuilder]:
        return FlashAttentionMLAMetadataBuilder

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int] | None) -> bool:
        return capability is None or capability[0] == 9

    @classmethod
    def library_problem(cls) -> str | None:
        if installed():
            return None
        problems = "; ".join(f"{p.module}: {installation_problem(p)}" for p in LATENT_PROVIDERS)
        return f"no library of FlashAttention 3 can be used: {problems}"

    @classmethod
    def library(cls) -> str | None:
        return next((f"FlashAttention 3 of {p.module}" for p in installed()), None)
