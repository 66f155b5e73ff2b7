"""Scales of stored keys where a kernel takes none: they go to the query instead.

Shape legend: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["scaled_query"]


def scaled_query(query_THD: Tensor, k_scale: Tensor | None) -> Tensor:
    """query * k_scale, rounded to the query's type; k_scale float32 [1] or [K], or None for no change."""
    if k_scale is None:
        return query_THD
    heads = query_THD.shape[1]
    scale_H1 = k_scale.repeat_interleave(heads // k_scale.numel()).unsqueeze(-1)
    return torch.mul(query_THD, scale_H1).to(query_THD.dtype)
