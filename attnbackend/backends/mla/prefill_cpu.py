"""`CPU`: prompts of latent attention with the project's C++ kernels.

Keys of their own are a cache with one slot a block, whose block tables count up.

Shape legend: N sequences, J keys of the longest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbackend.backends.mla.prefill import MLAPrefill, MLAPrefillConfig
from attnbackend.kernels import cpu
from attnbackend.mla_metadata import MLAPrefillMetadata
from attnbackend.types import LSEBase, MultipleOf, Reason

__all__ = ["CPUPrefill"]

_HEAD_SIZES = MultipleOf(1, high=1024)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class CPUPrefill(MLAPrefill):
    name = "CPU"
    lse_base = LSEBase.E

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        return cpu.unavailable_reason() if device_type == "cpu" else f"runs on CPUs, not on {device_type!r}"

    @classmethod
    def reasons(cls, config: MLAPrefillConfig) -> list[Reason]:
        sizes = {"qk_head_dim": config.qk_head_dim, "v_head_dim": config.v_head_dim}
        found = [Reason(what, n, str(_HEAD_SIZES)) for what, n in sizes.items() if n not in _HEAD_SIZES]
        if config.dtype not in _DTYPES:
            found.append(Reason("dtype", config.dtype, "float32, float16, bfloat16"))
        return found

    def plan(self, metadata: MLAPrefillMetadata) -> tuple[Tensor, Tensor]:
        """Lengths int32 [N] and tables int32 [N, J]."""
        starts = metadata.cu_seqlens_k
        lens_N = starts.diff()
        longest = int(lens_N.max()) if len(lens_N) else 0
        return lens_N, starts[:-1, None] + torch.arange(longest, dtype=torch.int32, device=starts.device)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        lens_N, table_NJ = metadata.plan or self.plan(metadata)
        cpu.paged_attention(
            query, key.unsqueeze(1), value.unsqueeze(1), output, metadata.cu_seqlens_q, lens_N, table_NJ,
            scale=self.scale, causal=metadata.causal, lse=lse,
        )  # fmt: skip
