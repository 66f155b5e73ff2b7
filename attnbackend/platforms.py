"""Which backends a device tries, in which order.

The orders for CUDA, ROCm and XPU are those of vLLM 0.25.1's platforms, with torch's own backends,
which run anywhere, at the end of each, and one change: on Hopper, FlashAttention 3 reads prompts faster
than the project's Triton kernels, and these decode faster on the whole (not at each point:
docs/attention-h200.md), so the two go first together. The order for CPUs is the project's own, the fastest
first (docs/flex-attention.md has figures).
"""

from __future__ import annotations

import gc
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

__all__ = ["Platform", "as_current", "backend_priorities", "current_platform", "free_memory", "most_memory"]


@dataclass(frozen=True)
class Platform:
    """The device that a selection is for."""

    device_type: str
    """torch's device type: "cuda" (also for ROCm), "xpu", "cpu"."""
    compute_capability: tuple[int, int] | None
    """(major, minor) on NVIDIA; None elsewhere."""
    is_rocm: bool = False


def current_platform(device_type: str) -> Platform:
    """What this process sees of a device type. CUDA is initialised only when it is asked about."""
    is_rocm = torch.version.hip is not None
    capability = None
    if device_type == "cuda" and not is_rocm and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    return Platform(device_type, capability, is_rocm)


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Within, this device is the current one: events and libraries go by the current device's stream.

    What this gives may be entered again, though not inside itself.
    """
    return nullcontext() if device.type != "cuda" or device.index is None else torch.cuda.device(device)


_CUDA = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT", "TORCH_SDPA")
# FlashInfer is behind TRITON_ATTN: 64 requests of 4,096 keys in float8 took it 259 microseconds on an H200,
# instead of 129 (benchmarks/results/attention_shapes_h200.json).
_CUDA_SM90 = (
    "FLASH_ATTN+TRITON_ATTN", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TURBOQUANT",
    "TORCH_SDPA",
)  # fmt: skip
_CUDA_SM100 = (
    "FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT", "TORCH_SDPA",
)  # fmt: skip
_ROCM = (
    "ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", "TRITON_ATTN", "TURBOQUANT",
    "TORCH_SDPA",
)  # fmt: skip
_XPU = ("FLASH_ATTN", "TRITON_ATTN", "TURBOQUANT", "TORCH_SDPA")
_CPU = ("CPU_ATTN", "TORCH_SDPA", "FLEX_ATTENTION")
_MLA_CUDA = (
    "FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA", "FLASH_ATTN_MLA_SPARSE",
    "FLASHMLA_SPARSE", "TRITON_MLA_SPARSE", "TORCH_MLA", "TORCH_MLA_SPARSE",
)  # fmt: skip
_MLA_SM100 = (
    "FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA",
    "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE", "TRITON_MLA_SPARSE", "TORCH_MLA", "TORCH_MLA_SPARSE",
)  # fmt: skip
_MLA_SM120 = (
    "TRITON_MLA", "FLASHINFER_MLA_SPARSE_SM120", "TRITON_MLA_SPARSE", "TORCH_MLA", "TORCH_MLA_SPARSE",
)  # fmt: skip
_MLA_ROCM = (
    "ROCM_AITER_MLA", "TRITON_MLA", "ROCM_AITER_TRITON_MLA", "ROCM_AITER_MLA_SPARSE", "TRITON_MLA_SPARSE",
    "TORCH_MLA", "TORCH_MLA_SPARSE",
)  # fmt: skip
_MLA_XPU = ("TRITON_MLA", "XPU_MLA_SPARSE", "TORCH_MLA", "TORCH_MLA_SPARSE")
_MLA_CPU = ("CPU_MLA", "TORCH_MLA", "TORCH_MLA_SPARSE")


def backend_priorities(platform: Platform, *, use_mla: bool) -> tuple[str, ...]:
    """Names in the order in which automatic selection tries them; the first that can serve wins.

    Empty for a device type that the project has no order for: there a backend must be named.
    """
    if platform.device_type == "cuda":
        return _cuda_priorities(platform, use_mla)
    dense, mla = {"cpu": (_CPU, _MLA_CPU), "xpu": (_XPU, _MLA_XPU)}.get(platform.device_type, ((), ()))
    return mla if use_mla else dense


def _cuda_priorities(platform: Platform, use_mla: bool) -> tuple[str, ...]:
    if platform.is_rocm:
        return _MLA_ROCM if use_mla else _ROCM
    major = platform.compute_capability[0] if platform.compute_capability else 0
    if use_mla:
        return {10: _MLA_SM100, 12: _MLA_SM120}.get(major, _MLA_CUDA)
    return {9: _CUDA_SM90, 10: _CUDA_SM100}.get(major, _CUDA)


def most_memory(device: torch.device) -> int:
    """Bytes above which an allocation is in vain: what torch keeps unused counts as free.

    Of a CPU these are all it has: copies of files give way, and pages take memory when they are first used.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device now, what garbage and torch's reserve hold given back first."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
