"""`TRITON`: attention of sequences to keys of their own by the project's kernel.

Shape legend: T tokens, S keys, H heads, D head size of query and key, V that of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbackend.backends.mla.prefill import MLAPrefill, MLAPrefillConfig
from attnbackend.mla_metadata import MLAPrefillMetadata
from attnbackend.types import LSEBase, Reason

__all__ = ["TritonPrefill"]

_MAX_HEAD_SIZE = 256


class TritonPrefill(MLAPrefill):
    name = "TRITON"
    lse_base = LSEBase.E

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        from attnbackend.kernels import triton

        return triton.unavailable_reason(device_type)

    @classmethod
    def reasons(cls, config: MLAPrefillConfig) -> list[Reason]:
        sizes = {"qk_head_dim": config.qk_head_dim, "v_head_dim": config.v_head_dim}
        allowed = f"multiples of 8 up to {_MAX_HEAD_SIZE}"
        reasons = [Reason(k, v, allowed) for k, v in sizes.items() if v % 8 or v > _MAX_HEAD_SIZE]
        if config.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            reasons.append(Reason("dtype", config.dtype, "float32, float16, bfloat16"))
        return reasons

    def plan(self, metadata: MLAPrefillMetadata) -> Tensor:
        """Keys of each sequence, int32 [R]."""
        return metadata.cu_seqlens_k.diff()

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        from attnbackend.kernels import triton

        lens = self.plan(metadata) if metadata.plan is None else metadata.plan
        triton.paged_attention(
            query, key, value, output, metadata.cu_seqlens_q, lens, None, scale=self.scale,
            causal=metadata.causal, lse=lse, key_start_loc=metadata.cu_seqlens_k,
        )  # fmt: skip
