"""Is what an attention op left in a batch's output and LSE right?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from attnbackend.testing.batches import PagedBatch, expected_attention, yardstick_attention
from attnbackend.testing.tolerance import RuleReport, assert_within_rule

__all__ = ["assert_attention_within_rule"]


def assert_attention_within_rule(
    batch: PagedBatch,
    *,
    factor: float = 2.0,
    by: Literal["tensor", "row"] = "tensor",
    yardstick: Callable[[PagedBatch], tuple[Tensor, Tensor]] = yardstick_attention,
) -> tuple[RuleReport, ...]:
    """Hold ``batch.output`` and ``batch.lse`` (where the case has one) to the relative rule.

    The new tokens count as written in the cache, whoever wrote them. Where output and LSE are views
    of larger buffers, the rest of those must still be NaN.

    Args:
        batch: after the call.
        factor, by: see :func:`attnbackend.testing.assert_within_rule`.
        yardstick: gives plain PyTorch's output and LSE.

    Returns:
        The report of the output, then that of the LSE.

    Raises:
        AssertionError: see :func:`attnbackend.testing.assert_within_rule`; or a write outside.
    """
    judged = {"output": batch.output} | ({} if batch.lse is None else {"lse": batch.lse})
    for what, tensor in judged.items():
        _assert_rest_untouched(tensor, batch.case.num_heads, what)
    expected = zip(expected_attention(batch), yardstick(batch), strict=True)
    return tuple(
        assert_within_rule(tensor, exact, plain, factor=factor, what=what, by=by)
        for (what, tensor), (exact, plain) in zip(judged.items(), expected, strict=False)
    )


def _assert_rest_untouched(view: Tensor, num_heads: int, what: str) -> None:
    if view._base is not None and not bool(view._base[:, num_heads:].isnan().all()):
        raise AssertionError(f"{what}: the op wrote past the {num_heads} heads of its strided view")
