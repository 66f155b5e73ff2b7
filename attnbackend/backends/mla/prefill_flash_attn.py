"""`FLASH_ATTN`: attention of sequences to keys of their own by FlashAttention 3 or 2 of whichever library.

Version 3 takes values narrower than keys; for version 2 they are padded.

Shape legend: T tokens, S keys, H heads, D head size of query and key, V that of values.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from attnbackend.backends.mla.library import REFUSALS, import_problem
from attnbackend.backends.mla.prefill import MLAPrefill, MLAPrefillConfig
from attnbackend.mla_metadata import MLAPrefillMetadata
from attnbackend.types import LSEBase, Reason

__all__ = ["FlashAttentionPrefill"]

_MAX_HEAD_SIZE = 256


class PrefillProvider(ABC):
    """A library with a function for sequences of their own lengths of keys."""

    module: ClassVar[str]
    pads: ClassVar[bool]
    """Wants values as wide as keys."""
    capabilities: ClassVar[tuple[int, ...]]

    def problem(self, major: int) -> str | None:
        """Why it cannot be used on a device of this major compute capability."""
        if major not in self.capabilities:
            return f"for compute capability {', '.join(map(str, self.capabilities))}, not {major}"
        return import_problem(self.module) or self.load()

    @abstractmethod
    def load(self) -> str | None:
        """A reason where the version is not in the library."""

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: MLAPrefillMetadata, output: Tensor,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Writes the output, gives the natural LSE [T, H]."""


class VllmPrefill(PrefillProvider):
    module = "vllm.vllm_flash_attn.flash_attn_interface"
    version: ClassVar[int]

    def load(self) -> str | None:
        interface = importlib.import_module(self.module)
        self._attend = interface.flash_attn_varlen_func
        available = getattr(interface, f"FA{self.version}_AVAILABLE", False)
        return None if available else f"it was built without version {self.version}"

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: MLAPrefillMetadata, output: Tensor,
        scale: float,
    ) -> Tensor:  # fmt: skip
        _, lse_HT = self._attend(
            query, key, value, out=output, cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seqlen_q, cu_seqlens_k=metadata.cu_seqlens_k,
            max_seqlen_k=metadata.max_seqlen_k, softmax_scale=scale, causal=metadata.causal,
            return_softmax_lse=True, fa_version=self.version,
        )  # fmt: skip
        return lse_HT.t()


class VllmPrefill3(VllmPrefill):
    version, pads, capabilities = 3, False, (9,)


class VllmPrefill2(VllmPrefill):
    version, pads, capabilities = 2, True, (8, 9, 10, 11, 12)


class FlashAttn2Prefill(PrefillProvider):
    module, pads, capabilities = "flash_attn", True, (8, 9, 10, 11, 12)

    def load(self) -> str | None:
        self._attend = importlib.import_module(self.module).flash_attn_varlen_func
        return None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: MLAPrefillMetadata, output: Tensor,
        scale: float,
    ) -> Tensor:  # fmt: skip
        out, lse_HT, _ = self._attend(
            query, key, value, metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.max_seqlen_q,
            metadata.max_seqlen_k, softmax_scale=scale, causal=metadata.causal, return_attn_probs=True,
        )  # fmt: skip
        output.copy_(out)
        return lse_HT.t()


PREFILL_PROVIDERS: tuple[PrefillProvider, ...] = (VllmPrefill3(), VllmPrefill2(), FlashAttn2Prefill())


@cache
def _installed(major: int) -> tuple[PrefillProvider, ...]:
    return tuple(p for p in PREFILL_PROVIDERS if p.problem(major) is None)


def provider_for(config: MLAPrefillConfig) -> PrefillProvider | None:
    """The first that gives right results for such sequences when it is tried."""
    major = 0 if config.compute_capability is None else config.compute_capability[0]
    with torch.device("cpu"):  # whatever the default device is
        return next((p for p in _installed(major) if _problem(p, config) is None), None)


@cache
def _problem(provider: PrefillProvider, config: MLAPrefillConfig) -> str | None:
    """What a run over sequences with and without keys gave wrong, its output full of NaN before."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "FlashAttention was not tried for such prompts, and cannot be inside a graph capture"
        )
    rng, device, scale = torch.Generator().manual_seed(7), config.device_type, config.qk_head_dim**-0.5
    starts = torch.tensor([0, 5, 8, 108], dtype=torch.int32)
    starts_k = torch.tensor([0, 40, 40, 140], dtype=torch.int32)
    width = config.qk_head_dim if provider.pads else config.v_head_dim

    def normal(rows: int, size: int) -> Tensor:
        return torch.randn(rows, config.num_heads, size, generator=rng).to(device, config.dtype)

    query, key, value = normal(108, config.qk_head_dim), normal(140, config.qk_head_dim), normal(140, width)
    for causal in (True, False):
        metadata = MLAPrefillMetadata(
            cu_seqlens_q=starts.to(device), cu_seqlens_k=starts_k.to(device), max_seqlen_q=100,
            max_seqlen_k=100, causal=causal,
        )  # fmt: skip
        output = torch.full((108, config.num_heads, width), math.nan, dtype=config.dtype, device=device)
        try:
            lse = provider.attend(query, key, value, metadata, output, scale)
        except REFUSALS as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        for rows, keys in ((slice(0, 5), slice(0, 40)), (slice(8, 108), slice(40, 140))):
            exact = _attend(query[rows], key[keys], value[keys], scale, causal)
            for got, right in zip((output[rows], lse[rows]), exact, strict=True):
                off = float((got.float() - right).abs().nan_to_num(nan=math.inf).max())
                if not off <= 0.02 * max(1.0, float(right.abs().max())):
                    return f"results are off by {off:.3g}"
    return None


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("thd,khd->htk", q.float(), k.float()) * scale
    if causal:
        own = torch.arange(len(q), device=q.device) + len(k) - len(q)
        scores = scores.masked_fill(torch.arange(len(k), device=q.device) > own.unsqueeze(1), -math.inf)
    return torch.einsum("htk,khd->thd", scores.softmax(-1), v.float()), scores.logsumexp(-1).t()


class FlashAttentionPrefill(MLAPrefill):
    name = "FLASH_ATTN"
    lse_base = LSEBase.E

    def __init__(self, config: MLAPrefillConfig, scale: float, device: torch.device) -> None:
        super().__init__(config, scale, device)
        provider = provider_for(config)
        assert provider is not None
        self._provider = provider
        self.equal_head_sizes = provider.pads  # type: ignore[misc]

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        if device_type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
            return "needs an NVIDIA GPU, and torch finds none"
        from attnbackend.kernels import triton

        major = torch.cuda.get_device_capability()[0]
        if not _installed(major):
            problems = (f"{p.module}: {p.problem(major)}" for p in PREFILL_PROVIDERS)
            return f"no library of FlashAttention can be used: {'; '.join(problems)}"
        return triton.unavailable_reason("cuda")

    @classmethod
    def reasons(cls, config: MLAPrefillConfig) -> list[Reason]:
        reasons = []
        if config.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(Reason("dtype", config.dtype, "float16, bfloat16"))
        sizes = config.qk_head_dim, config.v_head_dim
        if sizes[0] % 8 or sizes[1] % 8 or not sizes[1] <= sizes[0] <= _MAX_HEAD_SIZE:
            allowed = f"multiples of 8, v_head_dim <= qk_head_dim <= {_MAX_HEAD_SIZE}"
            reasons.append(Reason("qk_head_dim, v_head_dim", f"{sizes[0]}, {sizes[1]}", allowed))
        if not reasons and config.device_type == "cuda" and provider_for(config) is None:
            reasons.append(
                Reason(
                    "qk_head_dim, v_head_dim",
                    f"{sizes[0]}, {sizes[1]}",
                    "sizes that a library computes right",
                )
            )
        return reasons

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        from attnbackend.kernels import triton

        out = output if output.is_contiguous() else output.new_empty(output.shape)
        own_lse = self._provider.attend(query, key, value, metadata, out, self.scale)
        if out is not output:
            output.copy_(out)
        triton.finish_attention(
            output, own_lse, lse, metadata.cu_seqlens_q, metadata.cu_seqlens_k.diff(), causal=metadata.causal
        )
