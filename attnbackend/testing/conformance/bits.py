"""Equality of tensors bit for bit: NaN equals NaN, and 0 is not -0."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["differing", "same_bits"]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same shape, type and bytes, whatever their strides."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def differing(actual: Tensor, expected: Tensor) -> str:
    """How many elements differ, and the first of them with both values."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    unequal = (_bytes(actual) != _bytes(expected)).any(-1)
    where = unequal.nonzero()
    if not len(where):
        return "nothing differs"
    first = tuple(int(i) for i in where[0])
    got, wanted = (float(x[first].float()) for x in (actual, expected))
    return (
        f"{len(where)} of {unequal.numel()} elements differ, first at {list(first)}: {got:.9g} instead of "
        f"{wanted:.9g}"
    )


def _bytes(x: Tensor) -> Tensor:
    """uint8 [..., bytes of an element]."""
    return x.contiguous().unsqueeze(-1).view(torch.uint8)
