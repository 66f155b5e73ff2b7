"""`TRITON_ATTN`: the project's Triton kernels, on GPUs and, for tests, in Triton's interpreter on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnbackend.backends.standard import StandardCacheBackend, StandardImpl, kernel_features
from attnbackend.impl import OptionalTensors
from attnbackend.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from attnbackend.types import AttentionCGSupport, LSEBase, MultipleOf

__all__ = [
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonMetadata",
    "TritonMetadataBuilder",
]


@dataclass(frozen=True, kw_only=True)
class TritonMetadata(AttentionMetadata):
    is_decode: bool
    """No request brings more than one token, in a graph at no replay: the split-KV kernel serves."""


class TritonMetadataBuilder(AttentionMetadataBuilder[TritonMetadata]):
    """A plan that only chooses the kernel, from the bound of the query lengths.

    Both kernels read lengths on the device and launch grids that depend on shapes alone, so a graph
    of either replays any batch that its bound allows. For a capture, `max_query_len` must therefore
    bound every batch that will be replayed: 1 for a graph of decode steps only, more for any other.
    """

    cudagraph_support = AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TritonMetadata:  # fmt: skip
        is_decode = common_attn_metadata.max_query_len <= 1
        return TritonMetadata(common=common_attn_metadata, is_decode=is_decode)


class TritonAttentionImpl(StandardImpl):
    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: TritonMetadata, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        from attnbackend.kernels import triton

        batch = attn_metadata.common
        key_cache, value_cache = kv_cache.unbind(1)
        # Padding tokens beyond one a row are the unified kernel's to write.
        is_decode = attn_metadata.is_decode and query.shape[0] <= batch.seq_lens.shape[0]
        kernel = triton.paged_decode_attention if is_decode else triton.paged_attention
        kernel(
            query, key_cache, value_cache, output, batch.query_start_loc, batch.seq_lens,
            batch.block_table, **kernel_features(self.params, tensors),
        )  # fmt: skip

    def kv_cache_update(
        self,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        tensors: OptionalTensors,
    ) -> None:
        from attnbackend.kernels import triton

        key_cache, value_cache = kv_cache.unbind(1)
        triton.cache_write(
            key, value, key_cache, value_cache, slot_mapping, k_scale=tensors.k_scale, v_scale=tensors.v_scale
        )  # fmt: skip


class TritonAttentionBackend(StandardCacheBackend):
    """Any GPU that Triton compiles for; a CPU under TRITON_INTERPRET=1."""

    supported_dtypes = (torch.float32, torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = (
        "auto",
        "float32",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
    )
    supported_head_sizes = (MultipleOf(8, 32, 256),)
    supported_block_sizes = (MultipleOf(16),)
    supported_device_types = ("cuda", "xpu", "cpu")
    lse_base = LSEBase.E
    supports_sliding_window = True
    supports_logits_soft_cap = True
    supports_alibi = True
    supports_sinks = True
    supports_non_causal = True
    supports_query_scale = True
    supports_output_scale = True
    supports_output_block_scale = True
    supports_per_head_quant_scales = True

    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return TritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMetadataBuilder]:
        return TritonMetadataBuilder

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        from attnbackend.kernels import triton

        return triton.unavailable_reason(device_type)
