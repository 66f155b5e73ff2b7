"""Weights that are nothing but numbers in memory: kernels may read them, and copies may replace them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["is_plain_weight"]


def is_plain_weight(weight: object) -> bool:
    """Whether a weight is dense and no subclass of a tensor, as quantised and distributed ones are.

    Those compute `F.linear` in a way of their own, and their data may be none.
    """
    return type(weight) in (nn.Parameter, Tensor) and weight.layout is torch.strided  # type: ignore[attr-defined]
