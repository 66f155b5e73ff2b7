"""For backends on a GPU: the project's Triton kernels write and read rows of the latent cache.

Unlike torch's own ops they wait for nothing, so a CUDA graph can hold them.

Shape legend: T tokens, S slots, L kv_lora_rank, R qk_rope_head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbackend.impl import MLAAttentionImpl

__all__ = ["KERNEL_DTYPES", "KERNEL_KV_CACHE_DTYPES", "TritonLatentRows"]

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNEL_KV_CACHE_DTYPES = (
    "auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla",
)  # fmt: skip
"""What the Triton kernels read and write."""


class TritonLatentRows(MLAAttentionImpl):
    def mla_kv_cache_update(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None
    ) -> None:
        from attnbackend.kernels import triton

        triton.write_latents(kv_c, k_pe, kv_cache, slot_mapping, k_scale=k_scale)

    def gather_latents(
        self, kv_cache: Tensor, slots: Tensor, k_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from attnbackend.kernels import triton

        mla = self.params.mla
        assert mla is not None
        return triton.gather_latents(
            kv_cache, slots, mla.kv_lora_rank, mla.qk_rope_head_dim, self.params.dtype, k_scale=k_scale
        )
