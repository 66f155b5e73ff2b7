"""`CPU_ATTN`: the project's C++ kernels, which read the paged cache where it lies.

They are built with the compiler that Inductor needs anyway; without one, `TORCH_SDPA` serves CPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbackend.backends.standard import StandardCacheBackend, StandardImpl, kernel_features
from attnbackend.impl import OptionalTensors
from attnbackend.kernels import cpu
from attnbackend.metadata import AttentionMetadata
from attnbackend.types import LSEBase, MultipleOf

__all__ = ["CPUAttentionBackend", "CPUAttentionImpl"]


class CPUAttentionImpl(StandardImpl):
    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: AttentionMetadata, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        batch = attn_metadata.common
        key_cache, value_cache = kv_cache.unbind(1)
        cpu.paged_attention(
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
        key_cache, value_cache = kv_cache.unbind(1)
        cpu.cache_write(
            key, value, key_cache, value_cache, slot_mapping, k_scale=tensors.k_scale, v_scale=tensors.v_scale
        )  # fmt: skip


class CPUAttentionBackend(StandardCacheBackend):
    """The default on CPUs with a C++ compiler."""

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
    supported_block_sizes = (MultipleOf(1),)
    supported_device_types = ("cpu",)
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
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionImpl]:
        return CPUAttentionImpl

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        return cpu.unavailable_reason()
