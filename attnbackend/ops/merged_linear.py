"""`merged_linear`: several linear layers of one input as one matrix product.

Weights that lie one behind the other in memory are multiplied as the one matrix that they are; others one by
one, with the same answer. Where they lie is looked at on every call, so no answer depends on an arrangement.

Shape legend: I input features, O output features of one layer, all O the sum over the layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbackend.ops.argument_checks import check_device
from attnbackend.ops.library import NAMESPACE, define_function

__all__ = ["joined", "merged_linear"]


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor over parts that follow each other in memory along their first dimension, or None.

    Args:
        parts: contiguous, of one dtype and equal trailing dimensions.
    """
    first, rows = parts[0], 0
    for part in parts:
        expected = first.data_ptr() + rows * first.stride(0) * first.element_size()
        if not (part.is_contiguous() and part.dtype is first.dtype and part.data_ptr() == expected):
            return None
        rows += part.shape[0]
    end = first.storage_offset() + rows * first.stride(0)
    if end * first.element_size() > first.untyped_storage().nbytes():
        return None  # Neighbours by chance, of other allocations.
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _run(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    weight, bias = joined(weights), joined(biases) if biases else None
    if weight is not None and (bias is not None) == bool(biases):
        return F.linear(x, weight, bias)
    of_each: Sequence[Tensor | None] = biases or [None] * len(weights)
    return torch.cat([F.linear(x, w, b) for w, b in zip(weights, of_each, strict=True)], -1)


def _fake(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    if biases and len(biases) != len(weights):
        raise ValueError(
            f"merged_linear: {len(weights)} weights and {len(biases)} biases; give none or as many"
        )
    check_device("merged_linear", x, (*weights, *biases))
    return x.new_empty(*x.shape[:-1], sum(w.shape[0] for w in weights))


merged_linear = define_function(
    f"{NAMESPACE}::merged_linear", "(Tensor input, Tensor[] weights, Tensor[] biases) -> Tensor", _run, _fake
)
