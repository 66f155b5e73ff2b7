"""What backends over the standard cache have in common: its shape, and a plan that needs no planning."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from attnbackend.backend import AttentionBackend
from attnbackend.backends.quantization import fold_query_scale, is_quantized, quantize_output
from attnbackend.impl import AttentionImpl, AttentionParams, OptionalTensors
from attnbackend.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from attnbackend.types import KVCacheLayout

__all__ = ["BatchMetadataBuilder", "StandardCacheBackend", "StandardImpl", "kernel_features"]


class BatchMetadataBuilder(AttentionMetadataBuilder[AttentionMetadata]):
    """For kernels that read the batch's own tensors: the plan is the batch."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AttentionMetadata:
        return AttentionMetadata(common=common_attn_metadata)


class StandardImpl(AttentionImpl):
    """For kernels that take no query scale and write no quantised output: both are done around them."""

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        k_scale = fold_query_scale(tensors.q_scale, tensors.k_scale)
        own = tensors._replace(q_scale=None, k_scale=k_scale, output_scale=None, output_block_scale=None)
        if not is_quantized(tensors.output_scale, tensors.output_block_scale):
            self.attend(query, key, value, kv_cache, attn_metadata, output, own)
            return
        exact = torch.empty(output.shape, dtype=query.dtype, device=query.device)
        self.attend(query, key, value, kv_cache, attn_metadata, exact, own)
        quantize_output(exact, output, tensors.output_scale, tensors.output_block_scale)

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        """`forward` without ``q_scale``, ``output_scale`` and ``output_block_scale``."""


class StandardCacheBackend(AttentionBackend, abstract=True):
    """A backend over caches of shape (num_blocks, 2, block_size, num_kv_heads, head_size), NHD or HND."""

    supported_layouts = (KVCacheLayout.NHD, KVCacheLayout.HND)

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return BatchMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)


def kernel_features(params: AttentionParams, tensors: OptionalTensors) -> dict[str, Any]:
    """The keyword arguments that the project's own kernels share."""
    return {
        "scale": params.scale,
        "causal": params.causal,
        "sliding_window": params.sliding_window,
        "logits_soft_cap": params.logits_soft_cap,
        "alibi_slopes": tensors.alibi_slopes,
        "sinks": tensors.sinks,
        "k_scale": tensors.k_scale,
        "v_scale": tensors.v_scale,
        "lse": tensors.lse,
    }
