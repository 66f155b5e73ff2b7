"""Rotary position embedding (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Each pair of elements turned by its angle, computed in float32.

    The result holds all first elements of pairs, then all second ones, whichever way they came: products of
    two results do not depend on the order.

    Args:
        x: [..., R].
        cos, sin: broadcast to [..., R / 2].
        interleaved: pairs are (2i, 2i + 1); False: (i, i + R / 2).

    Returns:
        [..., R] in the type of ``x``.
    """
    wide = x.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
