"""`FLASHINFER`: attention of sequences to keys of their own, planned on the host.

Shape legend: T tokens, S keys, H heads, D head size of query and key, V that of values.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnbackend.backends.mla.library import import_problem
from attnbackend.backends.mla.prefill import MLAPrefill, MLAPrefillConfig
from attnbackend.mla_metadata import MLAPrefillMetadata
from attnbackend.types import LSEBase, Reason

__all__ = ["FlashInferPrefill"]

_WORKSPACE = 128 << 20
_SIZES = ((192, 128), (128, 128), (256, 256), (64, 64))
"""Pairs of head sizes that the library's ready kernels or its compiler know."""


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class PlannedPrompts:
    wrapper: Any
    num_tokens: int
    """Queries of all sequences: those behind belong to none."""


class FlashInferPrefill(MLAPrefill):
    """Each step's pieces (new tokens, chunks of context) are planned in objects of their own, so that all
    plans of a step live side by side."""

    name = "FLASHINFER"
    lse_base = LSEBase.TWO

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        if device_type != "cuda" or not torch.cuda.is_available():
            return "needs an NVIDIA GPU, and torch finds none"
        from attnbackend.kernels import triton

        found = import_problem("flashinfer", ("BatchPrefillWithRaggedKVCacheWrapper",))
        return found or triton.unavailable_reason("cuda")

    @classmethod
    def reasons(cls, config: MLAPrefillConfig) -> list[Reason]:
        reasons = []
        if config.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(Reason("dtype", config.dtype, "float16, bfloat16"))
        pair = config.qk_head_dim, config.v_head_dim
        if pair not in _SIZES:
            allowed = ", ".join(f"{a} and {b}" for a, b in _SIZES)
            reasons.append(Reason("qk_head_dim, v_head_dim", f"{pair[0]} and {pair[1]}", allowed))
        return reasons

    def plan(self, metadata: MLAPrefillMetadata) -> PlannedPrompts:
        c, wrapper = self.config, self._wrapper()
        starts_q, starts_k = (
            (x if cpu is None else cpu).cpu()
            for x, cpu in (
                (metadata.cu_seqlens_q, metadata.cu_seqlens_q_cpu),
                (metadata.cu_seqlens_k, metadata.cu_seqlens_k_cpu),
            )
        )
        wrapper.plan(
            starts_q, starts_k, c.num_heads, c.num_heads, c.qk_head_dim, c.v_head_dim,
            causal=metadata.causal, sm_scale=self.scale, q_data_type=c.dtype, kv_data_type=c.dtype,
        )  # fmt: skip
        return PlannedPrompts(wrapper, int(starts_q[-1]))

    def _wrapper(self) -> Any:
        library = importlib.import_module("flashinfer")
        return library.BatchPrefillWithRaggedKVCacheWrapper(_workspace(self.device), "NHD", backend="auto")

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        from attnbackend.kernels import triton

        planned: PlannedPrompts = self.plan(metadata) if metadata.plan is None else metadata.plan
        out = output if output.is_contiguous() else output.new_empty(output.shape)
        own_lse = torch.empty(output.shape[:2], dtype=torch.float32, device=output.device)
        tokens = planned.num_tokens
        if tokens and key.shape[0]:
            planned.wrapper.run(
                query[:tokens], key, value, out=out[:tokens], lse=own_lse[:tokens], return_lse=True
            )
        if out is not output:
            output.copy_(out)
        triton.finish_attention(
            output, own_lse, lse, metadata.cu_seqlens_q, metadata.cu_seqlens_k.diff(), causal=metadata.causal,
            base_2=True,
        )  # fmt: skip
