"""Is what the ops of latent attention left in a batch's outputs right?"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbackend.testing.mla_batches import MLABatch, absorbed_mixed, expected_mixed, expected_mqa
from attnbackend.testing.reference_mla import plain_torch_mla
from attnbackend.testing.rounding import float32_latent_spread
from attnbackend.testing.tolerance import RuleReport, assert_within_rule, assert_within_spread

__all__ = ["assert_mixed_within_rule", "assert_mqa_within_rule"]


def assert_mqa_within_rule(batch: MLABatch, *, factor: float = 2.0) -> tuple[RuleReport, ...]:
    """Hold ``batch.latent_output`` and, where there is one, ``batch.lse`` to the relative rule.

    In float32 each element is judged alone: by the spread of honest rounding, see `testing.rounding`.

    Raises:
        AssertionError: see `attnbackend.testing.assert_within_rule`; or a write past a strided view.
    """
    judged = {"output": batch.latent_output} | ({} if batch.lse is None else {"lse": batch.lse})
    is_float32 = batch.case.dtype is torch.float32
    known = expected_mqa(batch, float32_latent_spread if is_float32 else plain_torch_mla)
    hold = assert_within_spread if is_float32 else assert_within_rule
    reports = []
    for (what, tensor), exact, plain in zip(judged.items(), expected_mqa(batch), known, strict=False):
        _assert_rest_untouched(tensor, batch.case.num_heads, what)
        reports.append(hold(tensor, exact, plain, factor=factor, what=what))
    return tuple(reports)


def assert_mixed_within_rule(batch: MLABatch, *, factor: float = 2.0) -> RuleReport:
    """Hold ``batch.output`` to the relative rule.

    Some requests of a step run in the latent space and some in that of heads, so the yardstick is the worse
    of plain arithmetic in either; in float32 the wider spread.

    Raises:
        AssertionError: as `assert_mqa_within_rule`.
    """
    exact = expected_mixed(batch)
    if batch.case.dtype is torch.float32:
        _assert_rest_untouched(batch.output, batch.case.num_heads, "output")
        spread = expected_mixed(batch, float32_latent_spread)
        return assert_within_spread(batch.output, exact, spread, factor=factor)
    plain = max(
        (expected_mixed(batch, plain_torch_mla), absorbed_mixed(batch)),
        key=lambda x: float((x.double() - exact).abs().max()),
    )
    _assert_rest_untouched(batch.output, batch.case.num_heads, "output")
    return assert_within_rule(batch.output, exact, plain, factor=factor)


def _assert_rest_untouched(view: Tensor, num_heads: int, what: str) -> None:
    if view._base is not None and not bool(view._base[:, num_heads:].isnan().all()):
        raise AssertionError(f"{what}: the op wrote past the {num_heads} heads of its strided view")
