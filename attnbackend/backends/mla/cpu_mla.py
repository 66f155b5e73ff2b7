"""`CPU_MLA`: latent attention with the project's C++ kernels, for which it is attention of one KV head.

A row of the cache is the key, and its first L elements are the value.

Shape legend: T tokens, H heads, L kv_lora_rank, R qk_rope_head_dim, B blocks, S block_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnbackend.backends.mla.common import MLACommonBackend, MLACommonImpl, joined_query
from attnbackend.impl import AttentionParams, MLAAttentionImpl, MLATensors
from attnbackend.kernels import cpu
from attnbackend.ops.native import how_ops_are_called, serve_cpu_ops
from attnbackend.types import LSEBase, MultipleOf

__all__ = ["CPUMLABackend", "CPUMLAImpl"]


class CPUMLAImpl(MLACommonImpl):
    def __init__(self, params: AttentionParams) -> None:
        super().__init__(params)
        serve_cpu_ops()

    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, tensors: MLATensors,
    ) -> None:  # fmt: skip
        batch, keys_BS1W = attn_metadata.common, kv_cache.unsqueeze(2)
        cpu.paged_attention(
            joined_query(query_latent, query_rope), keys_BS1W, keys_BS1W[..., : query_latent.shape[2]],
            output, batch.query_start_loc, batch.seq_lens, batch.block_table, scale=self.params.scale,
            k_scale=tensors.k_scale, v_scale=tensors.k_scale, lse=tensors.lse,
        )  # fmt: skip

    def mla_kv_cache_update(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None
    ) -> None:
        rows_BS1W, rank = kv_cache.unsqueeze(2), kv_c.shape[1]
        cpu.cache_write(
            kv_c.unsqueeze(1), k_pe.unsqueeze(1), rows_BS1W[..., :rank], rows_BS1W[..., rank:], slot_mapping,
            k_scale=k_scale, v_scale=k_scale,
        )  # fmt: skip


class CPUMLABackend(MLACommonBackend):
    """The default of latent attention on CPUs with a C++ compiler."""

    supported_dtypes = (torch.float32, torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = (
        "auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2",
    )  # fmt: skip
    supported_head_sizes = (MultipleOf(1, high=1024),)
    supported_block_sizes = (MultipleOf(1),)
    supported_device_types = ("cpu",)
    lse_base = LSEBase.E

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        return CPUMLAImpl

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        return cpu.unavailable_reason()

    @classmethod
    def library(cls) -> str | None:
        return how_ops_are_called()
