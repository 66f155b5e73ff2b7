"""The relative rule with a yardstick that small batches cannot make sharp by luck.

In float32 the yardstick's error is that of one order of summation: torch's, which sums in many lanes and so
errs less than a kernel that sums element after element. Over a batch of a few rows its maximum is luck, too.
Where a result fails under it, the yardstick is plain PyTorch in torch's own order and, over arrangements of a
head's elements, element after element; of each element of the result the value farthest from float64 counts.

Shape legend: T tokens, H query heads, D head size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnbackend.testing.batches import PagedBatch, expected_attention, yardstick_attention
from attnbackend.testing.judgement import assert_attention_within_rule

__all__ = ["judge"]

ARRANGEMENTS = 3


def judge(batch: PagedBatch) -> None:
    """Raises AssertionError when output or LSE of the batch are outside the rule."""
    try:
        assert_attention_within_rule(batch)
    except AssertionError:
        if batch.case.dtype is not torch.float32:
            raise
        # Slow, so only where torch's own order alone does not settle it.
        assert_attention_within_rule(batch, yardstick=_sampled)


def _sampled(batch: PagedBatch) -> tuple[Tensor, Tensor]:
    exact = expected_attention(batch)
    worst = yardstick_attention(batch)
    generator = torch.Generator().manual_seed(batch.case.seed)
    for _ in range(ARRANGEMENTS):
        order_D = torch.randperm(batch.case.head_size, generator=generator)
        out_THD, lse_TH = yardstick_attention(_arranged(batch, order_D), in_order=True)
        other = (out_THD[..., order_D.argsort()], lse_TH)
        worst = (_farther(worst[0], other[0], exact[0]), _farther(worst[1], other[1], exact[1]))
    return worst


def _arranged(batch: PagedBatch, order_D: Tensor) -> PagedBatch:
    """The same attention with the elements of every head in another order."""

    def arranged(x: Tensor) -> Tensor:
        bits = x.cpu().view(torch.uint8) if x.dtype.itemsize == 1 else x.cpu()
        return bits[..., order_D].view(x.dtype)

    query, key, value, kv_cache = map(arranged, (batch.query, batch.key, batch.value, batch.kv_cache))
    return replace(batch, query=query, key=key, value=value, kv_cache=kv_cache)


def _farther(a: Tensor, b: Tensor, exact: Tensor) -> Tensor:
    finite = exact.isfinite()
    off_a, off_b = ((x.double() - exact).abs().masked_fill(~finite, 0.0) for x in (a, b))
    return torch.where(off_b > off_a, b, a)
