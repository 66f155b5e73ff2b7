"""Softmax over explicit logits, in float32, with rows that see nothing.

Shape legend: H heads, N queries, J keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["attend_explicitly", "query_chunks"]

_MAX_SCORES = 1 << 24
"""Most logits held at once: 64 MiB in float32."""


def query_chunks(rows: slice, num_keys: int, num_heads: int) -> Iterator[slice]:
    """Pieces of ``rows`` whose logits are few enough to hold."""
    step = max(1, _MAX_SCORES // max(1, num_keys * num_heads))
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


def attend_explicitly(logits_HNJ: Tensor, visible_NJ: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights [H, N, J] and LSE [H, N]; a query that sees no key has weights of 0 and an LSE of -inf."""
    if visible_NJ is not None:
        logits_HNJ = logits_HNJ.masked_fill(~visible_NJ, -torch.inf)
    if logits_HNJ.shape[-1] == 0:
        return logits_HNJ, logits_HNJ.new_full(logits_HNJ.shape[:-1], -torch.inf)
    lse_HN = torch.logsumexp(logits_HNJ, -1)
    weights_HNJ = (logits_HNJ - lse_HN.unsqueeze(-1)).exp()
    return torch.where(lse_HN.unsqueeze(-1) == -torch.inf, 0.0, weights_HNJ), lse_HN
