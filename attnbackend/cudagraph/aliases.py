"""Tensors over memory that they do not own: a graph's pool may give it to the next graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["alias_of", "memory_at"]


class _Memory:
    """Some bytes on a GPU, for ``torch.as_tensor``."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


def memory_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Bytes of a GPU's memory, uint8 [num_bytes]."""
    memory = torch.as_tensor(_Memory(address, num_bytes), device=device)
    assert memory.data_ptr() == address, "the memory was copied"
    return memory


def alias_of(value: Any) -> Any:
    """A tensor of the same address, dtype, shape and strides that does not keep the memory.

    Whatever is not a tensor with elements on a GPU is given back as it is.
    """
    if not isinstance(value, Tensor) or not value.is_cuda or value.numel() == 0:
        return value
    elements = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    memory = memory_at(value.data_ptr(), elements * value.element_size(), value.device)
    return memory.view(value.dtype).as_strided(value.shape, value.stride())
