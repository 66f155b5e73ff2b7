"""`CPU_ATTN`: the project's C++ kernels, which read the paged cache where it lies.

They are built with the compiler that Inductor needs anyway; without one, `TORCH_SDPA` serves CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attnbackend.backends.standard import FullFeaturedBackend, PagedKernelImpl
from attnbackend.impl import AttentionParams
from attnbackend.kernels import cpu
from attnbackend.ops.native import how_ops_are_called, serve_cpu_ops
from attnbackend.types import KVCacheLayout, MultipleOf

__all__ = ["CPUAttentionBackend", "CPUAttentionImpl"]


class CPUAttentionImpl(PagedKernelImpl):
    def __init__(self, params: AttentionParams) -> None:
        super().__init__(params)
        serve_cpu_ops()

    def attention_kernel(
        self, attn_metadata: Any, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> Callable[..., None]:
        return cpu.paged_attention

    def write_kernel(self) -> Callable[..., None]:
        return cpu.cache_write


class CPUAttentionBackend(FullFeaturedBackend):
    """The default on CPUs with a C++ compiler."""

    supported_head_sizes = (MultipleOf(8, 32, 256),)
    supported_block_sizes = (MultipleOf(1),)
    supported_device_types = ("cpu",)
    supported_layouts = (KVCacheLayout.HND, KVCacheLayout.NHD)
    """A head's keys lie one behind the other first: rows that are pages apart cost twice the time."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionImpl]:
        return CPUAttentionImpl

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        return cpu.unavailable_reason()

    @classmethod
    def library(cls) -> str | None:
        return how_ops_are_called()
