"""For backends over libraries: the project's Triton writer puts new keys and values in the standard cache."""

from __future__ import annotations

from torch import Tensor

from attnbackend.backends.standard import StandardImpl, write_sides
from attnbackend.impl import OptionalTensors

__all__ = ["TritonWriterImpl"]


class TritonWriterImpl(StandardImpl):
    def kv_cache_update(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, tensors: OptionalTensors
    ) -> None:
        from attnbackend.kernels import triton

        write_sides(triton.cache_write, key, value, kv_cache, slot_mapping, tensors)
