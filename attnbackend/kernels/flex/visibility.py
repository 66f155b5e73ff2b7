"""Which keys a query sees. In every kind of attention here they are one interval of positions.

Causality, windows and chunks are intervals around the query's own position; a bidirectional range that
counts for a query contains that position too, so what it adds leaves one interval. Shape legend: M packed
query rows, G ranges of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnbackend.impl import AttentionParams

__all__ = ["Visibility", "widen_by_ranges"]


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """The rules of a layer that do not depend on the batch."""

    causal: bool
    window: int | None = None
    two_sided: bool = False
    """The window ends keys after the query too."""
    chunk: int | None = None

    @classmethod
    def of(cls, params: AttentionParams) -> Visibility:
        return cls(
            causal=params.causal,
            window=params.sliding_window,
            two_sided=params.attn_type.keeps_no_cache and not params.causal,
            chunk=params.attention_chunk_size,
        )

    def first(self, position: Tensor) -> Tensor:
        """The first key position that a query at ``position`` sees; it never falls as positions rise."""
        first = torch.zeros_like(position)
        if self.window is not None:
            first = torch.maximum(first, position - self.window + 1)
        if self.chunk is not None:
            first = torch.maximum(first, position // self.chunk * self.chunk)
        return first

    def stop(self, position: Tensor, seq_len: Tensor) -> Tensor:
        """One past the last key position seen; not above `first` where the query sees no key."""
        stop = seq_len
        if self.causal:
            stop = torch.minimum(stop, position + 1)
        if self.window is not None and self.two_sided:
            stop = torch.minimum(stop, position + self.window)
        if self.chunk is not None:
            stop = torch.minimum(stop, (position // self.chunk + 1) * self.chunk)
        return stop


def widen_by_ranges(
    first_M: Tensor, stop_M: Tensor, position_M: Tensor, seq_len_M: Tensor, ranges_MG2: Tensor
) -> tuple[Tensor, Tensor]:
    """The intervals ``first_M``, ``stop_M`` of positions, with all of each range that holds the query."""
    start_MG, end_MG = ranges_MG2.unbind(-1)
    position_M1 = position_M.unsqueeze(1)
    holds_MG = (start_MG <= position_M1) & (position_M1 < end_MG)
    start_MG = torch.where(holds_MG, start_MG, first_M.unsqueeze(1))
    end_MG = torch.where(holds_MG, end_MG, stop_M.unsqueeze(1))
    first = torch.cat([first_M.unsqueeze(1), start_MG], dim=1).amin(1)
    stop = torch.cat([stop_M.unsqueeze(1), end_MG], dim=1).amax(1)
    return first.clamp(min=0), torch.minimum(stop, seq_len_M)
