"""Is what an attention op left in a batch's output and LSE right?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from attnbackend.testing.batches import (
    PagedBatch,
    expected_attention,
    rounding_spread,
    yardstick_attention,
)
from attnbackend.testing.tolerance import RuleReport, assert_within_rule, assert_within_spread

__all__ = ["AttentionJudge", "assert_attention_within_rule"]


@dataclass(frozen=True)
class AttentionJudge:
    """Judges results for one batch, whose right answer is found once; the batch's contents must stay."""

    batch: PagedBatch

    @cached_property
    def exact(self) -> tuple[Tensor, Tensor]:
        return expected_attention(self.batch)

    @cached_property
    def yardstick(self) -> tuple[Tensor, Tensor]:
        """Plain PyTorch's results; in float32 the spread that they are drawn from."""
        if self.batch.case.dtype is torch.float32:
            return rounding_spread(self.batch)
        return yardstick_attention(self.batch)

    def hold(
        self,
        output: Tensor,
        lse: Tensor | None,
        *,
        factor: float = 2.0,
        by: Literal["tensor", "row"] = "tensor",
    ) -> tuple[RuleReport, ...]:
        """As `assert_attention_within_rule`, of this output and LSE."""
        judged = {"output": output} | ({} if lse is None else {"lse": lse})
        for what, tensor in judged.items():
            _assert_rest_untouched(tensor, what)
        reports = []
        for (what, got), exact, known in zip(judged.items(), self.exact, self.yardstick, strict=False):
            if self.batch.case.dtype is torch.float32:
                reports.append(assert_within_spread(got, exact, known, factor=factor, what=what))
            else:
                reports.append(assert_within_rule(got, exact, known, factor=factor, what=what, by=by))
        return tuple(reports)


def assert_attention_within_rule(
    batch: PagedBatch, *, factor: float = 2.0, by: Literal["tensor", "row"] = "tensor"
) -> tuple[RuleReport, ...]:
    """Hold ``batch.output`` and ``batch.lse`` (where the case has one) to the relative rule.

    The new tokens count as written in the cache, whoever wrote them. Where output and LSE are views
    of larger buffers, the rest of those must still be NaN.

    Args:
        batch: after the call.
        factor, by: see :func:`attnbackend.testing.assert_within_rule`. In float32 each element is judged
            alone, whatever ``by`` says: by the spread of honest rounding, see `attnbackend.testing.rounding`.

    Returns:
        The report of the output, then that of the LSE.

    Raises:
        AssertionError: see :func:`attnbackend.testing.assert_within_rule`; or a write outside.
    """
    return AttentionJudge(batch).hold(batch.output, batch.lse, factor=factor, by=by)


def _assert_rest_untouched(view: Tensor, what: str) -> None:
    if view._base is None:
        return
    rest = view._base.clone()
    rest.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(torch.nan)
    if not bool(rest.isnan().all()):
        raise AssertionError(f"{what}: the op wrote beside the {view.shape[1]} heads of its strided view")
