"""`TRITON_MLA` and `TRITON_MLA_SPARSE`: the project's kernels over latents, on GPUs and interpreted on a CPU.

Shape legend: T tokens, H heads, L kv_lora_rank, R qk_rope_head_dim.
"""

from __future__ import annotations

from torch import Tensor

from attnbackend.backends.mla.common import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    SparseMLAMetadataBuilder,
)
from attnbackend.backends.mla.triton_rows import KERNEL_DTYPES, KERNEL_KV_CACHE_DTYPES, TritonLatentRows
from attnbackend.impl import MLAAttentionImpl, MLATensors, SparseMLAAttentionImpl
from attnbackend.metadata import AttentionMetadata
from attnbackend.selector import AttentionSelectorConfig
from attnbackend.types import AttentionCGSupport, LSEBase, MultipleOf, Reason

__all__ = ["TritonMLABackend", "TritonMLASparseBackend"]


class TritonMLAMetadataBuilder(MLACommonMetadataBuilder):
    """The kernel reads lengths on the device and its grid follows from shapes, so a graph of it replays any
    batch as large; prompts, whose context is cut in chunks on the host, stay outside of graphs."""

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = 16


class TritonMLASparseMetadataBuilder(SparseMLAMetadataBuilder):
    """As above; all queries run on the latent cache, so any batch may be in a graph."""

    cudagraph_support = AttentionCGSupport.ALWAYS


class _TritonRows(TritonLatentRows):
    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor, attn_metadata: AttentionMetadata,
        output: Tensor, tensors: MLATensors,
    ) -> None:  # fmt: skip
        from attnbackend.kernels import triton

        batch = attn_metadata.common
        triton.mla_attention(
            query_latent, query_rope, kv_cache, output, batch.query_start_loc, batch.seq_lens,
            batch.block_table, scale=self.params.scale, lse=tensors.lse, topk_indices=tensors.topk_indices,
            k_scale=tensors.k_scale,
        )  # fmt: skip


class TritonMLAImpl(_TritonRows, MLACommonImpl):
    pass


class TritonMLASparseImpl(_TritonRows, SparseMLAAttentionImpl):
    pass


class TritonMLABackend(MLACommonBackend):
    """Any GPU that Triton compiles for; a CPU under TRITON_INTERPRET=1.

    Rows of 512 + 64 in 16 bits and blocks of a multiple of 64 have a kernel for Hopper GPUs.
    """

    supported_dtypes = KERNEL_DTYPES
    supported_kv_cache_dtypes = KERNEL_KV_CACHE_DTYPES
    supported_head_sizes = (MultipleOf(8, 16, 2048),)
    supported_block_sizes = (MultipleOf(16),)
    supported_device_types = ("cuda", "xpu", "cpu")
    lse_base = LSEBase.E
    is_deterministic = True

    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA"

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        return TritonMLAImpl

    @staticmethod
    def get_builder_cls() -> type[MLACommonMetadataBuilder]:
        return TritonMLAMetadataBuilder

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        from attnbackend.kernels import triton

        return triton.unavailable_reason(device_type)

    @classmethod
    def supports_combination(cls, config: AttentionSelectorConfig) -> list[Reason]:
        reasons = super().supports_combination(config)
        rank = config.kv_lora_rank
        if rank is not None and (rank % 8 or rank > 1024):
            reasons.append(Reason("kv_lora_rank", rank, "multiples of 8 up to 1024"))
        return reasons


class TritonMLASparseBackend(TritonMLABackend):
    is_sparse = True

    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        return TritonMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[MLACommonMetadataBuilder]:
        return TritonMLASparseMetadataBuilder
