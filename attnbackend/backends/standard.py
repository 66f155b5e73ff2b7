"""What backends over the standard cache have in common: its shape, and a plan that needs no planning."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
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
from attnbackend.types import AttentionType, KVCacheLayout, LSEBase

__all__ = [
    "BatchMetadataBuilder",
    "FullFeaturedBackend",
    "PagedKernelImpl",
    "StandardCacheBackend",
    "StandardImpl",
    "kernel_features",
    "write_empty",
]


class BatchMetadataBuilder(AttentionMetadataBuilder[AttentionMetadata]):
    """For kernels that read the batch's own tensors: the plan is the batch."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AttentionMetadata:
        return AttentionMetadata(common=common_attn_metadata)

    def plans_each_replay(self, max_query_len: int) -> bool:
        return type(self).build is not BatchMetadataBuilder.build


class StandardImpl(AttentionImpl):
    """For kernels that take no query scale or quantised query, and may write no quantised output.

    What they do not is done around them.
    """

    takes_quantized_query = False
    """Whether `attend` may be given a query in float8."""

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        is_plain = query.dtype is self.params.dtype and tensors.q_scale is None
        if is_plain and not is_quantized(tensors.output_scale, tensors.output_block_scale):
            self.attend(query, key, value, kv_cache, attn_metadata, output, tensors)
            return
        k_scale = fold_query_scale(tensors.q_scale, tensors.k_scale)
        own = tensors._replace(q_scale=None, k_scale=k_scale)
        if not self.takes_quantized_query:
            query = query.to(self.params.dtype)
        quantized = is_quantized(tensors.output_scale, tensors.output_block_scale)
        if not quantized or self.quantizes(attn_metadata, own):
            output = output.view(torch.float8_e4m3fn) if output.dtype is torch.uint8 else output
            self.attend(query, key, value, kv_cache, attn_metadata, output, own)
            return
        exact = torch.empty(output.shape, dtype=self.params.dtype, device=query.device)
        own = own._replace(output_scale=None, output_block_scale=None)
        self.attend(query, key, value, kv_cache, attn_metadata, exact, own)
        quantize_output(exact, output, tensors.output_scale, tensors.output_block_scale)

    def quantizes(self, attn_metadata: Any, tensors: OptionalTensors) -> bool:
        """Whether `attend` takes the scales of the output that are given, and writes float8 itself."""
        return False

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        """`forward` without ``q_scale``, and without scales of the output unless it `quantizes`."""


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


class FullFeaturedBackend(StandardCacheBackend, abstract=True):
    """A standard backend whose kernels do all of the dense contract; devices and sizes are left to say."""

    supported_dtypes = (torch.float32, torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = (
        "auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2",
    )  # fmt: skip
    supported_attn_types = tuple(AttentionType)
    lse_base = LSEBase.E
    supports_sliding_window = True
    supports_logits_soft_cap = True
    supports_alibi = True
    supports_sinks = True
    supports_non_causal = True
    supports_attention_chunks = True
    supports_bidirectional_ranges = True
    supports_query_scale = True
    supports_quantized_query = True
    supports_output_scale = True
    supports_output_block_scale = True
    supports_per_head_quant_scales = True


class PagedKernelImpl(StandardImpl):
    """For the project's own kernels, which all take the same arguments.

    With no cache they are given key and value in the caches' place, and None for the block table.
    """

    @abstractmethod
    def attention_kernel(
        self, attn_metadata: Any, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> Callable[..., None]:
        """The function that serves a step; what it does with key and value beside the cache is its own."""

    @abstractmethod
    def write_kernel(self) -> Callable[..., None]:
        """The function that writes new keys and values."""

    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        batch, table = attn_metadata.common, attn_metadata.common.block_table
        if self.params.attn_type.keeps_no_cache:
            keys, values, table = key, value, None
        else:
            keys, values = kv_cache.unbind(1)
        self.attention_kernel(attn_metadata, query, key, value)(
            query, keys, values, output, batch.query_start_loc, batch.seq_lens, table,
            **kernel_features(self.params, tensors),
        )  # fmt: skip

    def kv_cache_update(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, tensors: OptionalTensors
    ) -> None:
        write_sides(self.write_kernel(), key, value, kv_cache, slot_mapping, tensors)


def write_empty(output: Tensor, lse: Tensor | None, rows: slice | Tensor) -> None:
    """The state of rows that see no key."""
    output[rows] = 0
    if lse is not None:
        lse[rows] = -torch.inf


def write_sides(
    write: Callable[..., None], key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor,
    tensors: OptionalTensors,
) -> None:  # fmt: skip
    """Calls one of the project's writers, which take the two sides of the standard cache apart."""
    key_cache, value_cache = kv_cache.unbind(1)
    scales = {"k_scale": tensors.k_scale, "v_scale": tensors.v_scale}
    write(key, value, key_cache, value_cache, slot_mapping, **scales)


def kernel_features(params: AttentionParams, tensors: OptionalTensors) -> dict[str, Any]:
    """The keyword arguments that the project's own kernels share; the output's scales where it has any."""
    scales = {"output_scale": tensors.output_scale, "output_block_scale": tensors.output_block_scale}
    return {
        "scale": params.scale,
        "causal": params.causal,
        "sliding_window": params.sliding_window,
        "attention_chunk_size": params.attention_chunk_size,
        "logits_soft_cap": params.logits_soft_cap,
        "alibi_slopes": tensors.alibi_slopes,
        "sinks": tensors.sinks,
        "bidirectional_ranges": tensors.bidirectional_ranges,
        "k_scale": tensors.k_scale,
        "v_scale": tensors.v_scale,
        "lse": tensors.lse,
        **{name: scale for name, scale in scales.items() if scale is not None},
    }
