"""Which keys a request's queries see, as explicit masks.

Shape legend: N query tokens, L keys, G ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnbackend.impl import AttentionParams

__all__ = ["KeyMask"]


@dataclass(frozen=True)
class KeyMask:
    """Queries at some positions of one request against keys at others."""

    params: AttentionParams
    queries: range
    """Their positions."""
    keys: range
    ranges_G2: Tensor | None
    """The request's bidirectional ranges."""
    device: torch.device

    @cached_property
    def p_N1(self) -> Tensor:
        return torch.arange(self.queries.start, self.queries.stop, device=self.device).unsqueeze(1)

    @cached_property
    def j_1L(self) -> Tensor:
        return torch.arange(self.keys.start, self.keys.stop, device=self.device).unsqueeze(0)

    def distance(self) -> Tensor:
        """Positions between query and key, int64 [N, L]."""
        return (self.j_1L - self.p_N1).abs()

    def visible(self) -> Tensor:
        """bool [N, L]."""
        ahead_NL = self.j_1L - self.p_N1
        seen_NL = ahead_NL <= 0 if self.params.causal else torch.ones_like(ahead_NL, dtype=torch.bool)
        if (window := self.params.sliding_window) is not None:
            two_sided = self.params.attn_type.keeps_no_cache and not self.params.causal
            seen_NL = seen_NL & (ahead_NL > -window) & ((ahead_NL < window) | (not two_sided))
        if (size := self.params.attention_chunk_size) is not None:
            seen_NL = seen_NL & (self.j_1L // size == self.p_N1 // size)
        return seen_NL if self.ranges_G2 is None else seen_NL | self._in_range(self.ranges_G2)

    def _in_range(self, ranges_G2: Tensor) -> Tensor:
        start_G11, end_G11 = ranges_G2.view(-1, 2, 1, 1).unbind(1)
        own_GN1, key_G1L = (
            (at >= start_G11) & (at < end_G11) for at in (self.p_N1.unsqueeze(0), self.j_1L.unsqueeze(0))
        )
        return (own_GN1 & key_G1L).any(0)
