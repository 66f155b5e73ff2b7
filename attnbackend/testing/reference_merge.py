"""Merging two partial attention results over disjoint keys.

Shape suffixes: T tokens, H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["reference_merge_states"]


def reference_merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the result over each.

    out = (exp(lse_a) out_a + exp(lse_b) out_b) / (exp(lse_a) + exp(lse_b)), in float64. A state
    with LSE -inf saw no key: merging with it returns the other state's values unchanged, whatever
    its output holds, and two such states give (0, -inf).

    Args:
        out_a, out_b: [..., D], any floating dtype.
        lse_a, lse_b: [...], natural log.

    Returns:
        ``(out, lse)`` in float64.

    Raises:
        ValueError: the shapes of the two states differ.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or out_a.shape[:-1] != lse_a.shape:
        raise ValueError(
            "both states must have out [..., D] and lse [...] of one shape, got out "
            f"{tuple(out_a.shape)} and {tuple(out_b.shape)}, lse {tuple(lse_a.shape)} and "
            f"{tuple(lse_b.shape)}"
        )
    a_lse, b_lse = lse_a.to(torch.float64), lse_b.to(torch.float64)
    a_empty, b_empty = (a_lse == -torch.inf)[..., None], (b_lse == -torch.inf)[..., None]
    a_out = out_a.to(torch.float64).masked_fill(a_empty, 0.0)
    b_out = out_b.to(torch.float64).masked_fill(b_empty, 0.0)
    lse = torch.logaddexp(a_lse, b_lse)
    merged = torch.exp(a_lse - lse)[..., None] * a_out + torch.exp(b_lse - lse)[..., None] * b_out
    return torch.where(a_empty, b_out, torch.where(b_empty, a_out, merged)), lse
