"""Merging of partial attention results by their LSE.

Shape legend: T tokens, H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge_attn_states"]


def merge_attn_states(
    out_a_THD: Tensor, lse_a_TH: Tensor, out_b_THD: Tensor, lse_b_TH: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    With natural-log LSEs, ``lse = log(exp(lse_a) + exp(lse_b))`` and each output is weighted by
    ``exp(lse_i - lse)`` (FlashAttention-2, arXiv 2307.08691, section 3.1). The empty state is (0, -inf);
    merging with it returns the other state bit for bit, and two empty states stay empty.

    Args:
        out_a_THD, out_b_THD: [T, H, D], any strides.
        lse_a_TH, lse_b_TH: float32 [T, H], natural log.

    Returns:
        The merged output in ``out_a_THD``'s type, and its LSE.

    Raises:
        ValueError: shapes differ.
    """
    if out_a_THD.shape != out_b_THD.shape or lse_a_TH.shape != lse_b_TH.shape:
        raise ValueError(
            f"states to merge differ in shape: outputs {tuple(out_a_THD.shape)} and "
            f"{tuple(out_b_THD.shape)}, LSE {tuple(lse_a_TH.shape)} and {tuple(lse_b_TH.shape)}"
        )
    empty_a, empty_b = lse_a_TH == -torch.inf, lse_b_TH == -torch.inf
    lse_TH = torch.where(
        empty_a, lse_b_TH, torch.where(empty_b, lse_a_TH, torch.logaddexp(lse_a_TH, lse_b_TH))
    )
    finite = torch.where(empty_a & empty_b, 0.0, lse_TH)
    weight_a, weight_b = ((lse - finite).exp().unsqueeze(-1) for lse in (lse_a_TH, lse_b_TH))
    blended = (weight_a * out_a_THD.float() + weight_b * out_b_THD.float()).to(out_a_THD.dtype)
    out_THD = torch.where(empty_b.unsqueeze(-1), out_a_THD, blended)
    return torch.where(empty_a.unsqueeze(-1), out_b_THD, out_THD), lse_TH
