"""`FLASHINFER`: FlashInfer's paged kernels, planned on the host once a step."""

from __future__ import annotations

import importlib
import os
import shutil
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnbackend.backends.flashinfer.compiled_call import wrapping_problem
from attnbackend.backends.flashinfer.impl import FlashInferImpl
from attnbackend.backends.flashinfer.planning import FlashInferMetadataBuilder
from attnbackend.backends.standard import StandardCacheBackend
from attnbackend.kv_cache import resolve_kv_cache_dtype
from attnbackend.ops.library_calls import serve_library_calls
from attnbackend.types import LSEBase, MultipleOf, Reason

if TYPE_CHECKING:
    from attnbackend.selector import AttentionSelectorConfig

__all__ = ["FlashInferBackend"]


class FlashInferBackend(StandardCacheBackend):
    """NVIDIA GPUs from compute capability 8.0 on. Kernels that the installed package does not hold ready are
    compiled on first use, which takes a minute or two each and needs nvcc."""

    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
    supported_head_sizes = (64, 128, 256)
    supported_block_sizes = (MultipleOf(16),)
    supported_device_types = ("cuda",)
    min_compute_capability = (8, 0)
    lse_base = LSEBase.TWO
    supports_sliding_window = True
    supports_logits_soft_cap = True
    supports_sinks = True
    supports_non_causal = True
    supports_output_scale = True
    supports_output_block_scale = True
    supports_per_head_quant_scales = True

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER"

    @staticmethod
    def get_impl_cls() -> type[FlashInferImpl]:
        return FlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferMetadataBuilder]:
        return FlashInferMetadataBuilder

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        if device_type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
            return "needs an NVIDIA GPU, and torch finds none"
        from attnbackend.kernels import triton

        return _import_problem() or triton.unavailable_reason("cuda")

    @classmethod
    def library(cls) -> str | None:
        if _import_problem() is not None:
            return None
        compiler = "with nvcc" if _has_compiler() else "without nvcc: ready-made kernels only"
        problem = wrapping_problem() or serve_library_calls("FLASHINFER", "cuda")
        called = "called without Python" if problem is None else f"called through Python: {problem}"
        return f"flashinfer {_version()}, {compiler}, {called}"

    @classmethod
    def workspaces(cls) -> list[Tensor]:
        from attnbackend.backends.flashinfer.wrappers import scratch_tensors

        return list(scratch_tensors())

    @classmethod
    def supports_combination(cls, config: AttentionSelectorConfig) -> list[Reason]:
        if not (cls.supports_dtype(config.dtype) and cls.supports_kv_cache_dtype(config.kv_cache_dtype)):
            return []
        kv_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, config.dtype)
        if kv_dtype is not config.dtype and kv_dtype.itemsize > 1:
            return [
                Reason("kv_cache_dtype", config.kv_cache_dtype, f"auto, fp8, or the query's {config.dtype}")
            ]
        if config.sliding_window is not None and config.logits_soft_cap:
            allowed = "0.0 with a window: kernels with both are not proven by the conformance kit"
            return [Reason("logits_soft_cap", config.logits_soft_cap, allowed)]
        return []


@cache
def _import_problem() -> str | None:
    try:
        flashinfer = importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: its packages' versions differ
        return f"flashinfer cannot be imported: {type(error).__name__}: {error}"
    needed = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper", "fast_decode_plan")
    missing = [name for name in needed if not hasattr(flashinfer, name)]
    return f"flashinfer {_version()} lacks {', '.join(missing)}" if missing else None


def _version() -> str:
    return getattr(importlib.import_module("flashinfer"), "__version__", "of unknown version")


def _has_compiler() -> bool:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or os.path.exists(os.path.join(home, "bin", "nvcc"))
