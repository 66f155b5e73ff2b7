"""The relative error rule: how far from float64 a result may be.

A result passes when

    max |actual - exact|  <=  factor * max |yardstick - exact|  +  one ulp

where ``exact`` is float64, ``yardstick`` is what plain PyTorch gives in the same dtype, and the ulp
is that of the actual result's dtype at the largest finite magnitude of ``exact``: the distance
between neighbouring values in the binade of max |exact|, that is eps * 2 ** floor(log2(max)). The
criterion (with factor 2) is that of the flash-attention and PyTorch test suites.

What it catches, measured with one bf16 query of unit-normal data over 1024 keys, head size 128, 8
query heads over 2, window 512, six seeds: the smallest ratio of error to what is allowed, above 1
being caught. An honest result, float64 rounded once, has at most 0.25 in the output and 0.001 in
the LSE. ``tests/test_testing_power.py`` holds the rule to this.

=========================  ======  =====
fault                      output  LSE
=========================  ======  =====
newest key missing         0.73    0.87
scale wrong by 1%          0.93    10
window one too wide        1.6     3.1
window one too narrow      1.4     2.8
one stale page of 16       10      10
window ignored             32      550
key/value heads swapped    75      33
sinks ignored              29      740
alibi ignored              66      1500
=========================  ======  =====

So judge the LSE too wherever a backend returns it: the yardstick's LSE carries the rounding of
bf16 logits, an honest kernel's does not.

What it cannot be relied on to catch, and what does (:mod:`attnbackend.testing.probes`):

* The newest key missing: one seed of six slips through both. The probe ``newest_key`` shows it.
* A scale wrong by 1%, from the output alone: two seeds of six slip through.
* A soft-cap of 50 that is ignored: no unit-normal logit comes near the cap (ratio 0.2 in the
  output). The probe ``soft_cap`` raises it to 200, and ``window_edge`` a window off by one to 115.
* A fault in rows of many keys, when the same tensor has rows of few keys: outputs and errors
  shrink with the number of keys, and the largest error of the tensor is that of the short rows.
  ``by="row"`` applies the rule to each row alone: with prompt tokens in the same batch it lifts
  the 1% scale from 0.34 to 0.86, and costs the honest result nothing (0.25 at most).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["RuleReport", "assert_within_rule", "assert_within_spread", "ulp_at"]


@dataclass(frozen=True)
class RuleReport:
    """How one tensor (or, with ``by="row"``, its worst row) stood under the rule."""

    what: str
    error: float
    yardstick_error: float
    ulp: float
    allowed: float
    worst_index: tuple[int, ...]
    actual: float
    exact: float

    @property
    def ratio(self) -> float:
        """error / allowed: above 1 is a failure. An error of 0 gives 0, also where 0 is allowed."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.allowed if self.allowed else math.inf

    @property
    def within(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        return (
            f"{self.what}: at {list(self.worst_index)} actual {self.actual:.9g}, exact "
            f"{self.exact:.9g}, error {self.error:.3e}; allowed {self.allowed:.3e} (yardstick "
            f"error {self.yardstick_error:.3e}, one ulp {self.ulp:.3e}); ratio {self.ratio:.3g}"
        )


def assert_within_rule(
    actual: Tensor,
    exact_f64: Tensor,
    yardstick: Tensor,
    *,
    factor: float = 2.0,
    what: str = "output",
    by: Literal["tensor", "row"] = "tensor",
) -> RuleReport:
    """Hold ``actual`` to the relative error rule of this module.

    Args:
        actual: the result judged, any floating dtype and shape, on any device.
        exact_f64: float64 reference of the same shape; may hold -inf (LSE of an empty row).
        yardstick: plain PyTorch's result for the same inputs, of the same shape.
        factor: multiple of the yardstick's error that is allowed.
        what: name for messages.
        by: "tensor" compares the largest errors of the whole tensor; "row" those of each slice
            along the first dimension (a token), which is stricter in batches of mixed lengths.

    Returns:
        The report of the tensor, or of the row with the largest ratio.

    Raises:
        AssertionError: NaN in ``actual``; -inf not exactly where the reference has it; anything but
            0 where both reference and yardstick are exactly 0; an error above what is allowed.
        ValueError: reference or yardstick are no yardstick: wrong dtype, shape, or NaN in them.
    """
    _check_yardstick(exact_f64, yardstick)
    if actual.shape != exact_f64.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact_f64.shape)}")
    got, exact, plain = (x.detach().cpu().to(torch.float64) for x in (actual, exact_f64, yardstick))
    _assert_special_values(got, exact, plain, what)
    finite = torch.isfinite(exact)
    got, exact, plain = (x.masked_fill(~finite, 0.0) for x in (got, exact, plain))
    reports = [
        _report(got[rows], exact[rows], plain[rows], rows.start, factor, actual.dtype, what)
        for rows in _slices(exact, by)
    ]
    worst = max(reports, key=lambda report: report.ratio)
    if not worst.within:
        raise AssertionError(str(worst))
    return worst


def assert_within_spread(
    actual: Tensor, exact_f64: Tensor, spread: Tensor, *, factor: float = 2.0, what: str = "output"
) -> RuleReport:
    """The rule with the yardstick's error known for each element: float32, see `testing.rounding`.

    Args:
        actual, exact_f64, factor, what: as of :func:`assert_within_rule`.
        spread: the yardstick's error, float64 of the same shape; 0 where it makes none.

    Returns:
        The report of the element with the largest ratio.

    Raises:
        AssertionError: as :func:`assert_within_rule`, each element judged alone.
    """
    if actual.shape != exact_f64.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact_f64.shape)}")
    got, exact = (x.detach().cpu().to(torch.float64) for x in (actual, exact_f64))
    _assert_special_values(got, exact, exact + spread, what)
    got, exact = (x.masked_fill(exact == -torch.inf, 0.0) for x in (got, exact))
    ulps = torch.finfo(actual.dtype).eps * exact.abs()
    errors, allowed = (got - exact).abs(), factor * spread + ulps
    worst = int((errors / allowed).nan_to_num(nan=0.0).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), errors.shape))
    found = (float(x[index]) for x in (errors, spread, ulps, allowed))
    error, yardstick_error, ulp, limit = found
    report = RuleReport(
        what, error, yardstick_error, ulp, limit, index, float(got[index]), float(exact[index])
    )
    if not report.within:
        raise AssertionError(str(report))
    return report


def ulp_at(magnitude: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring values of ``dtype`` in the binade of ``magnitude``; 0 at 0."""
    if magnitude == 0.0:
        return 0.0
    limits = torch.finfo(dtype)
    exponent = math.floor(math.log2(max(magnitude, limits.smallest_normal)))
    return float(limits.eps * 2.0**exponent)


def _report(
    got: Tensor,
    exact: Tensor,
    plain: Tensor,
    first_row: int,
    factor: float,
    dtype: torch.dtype,
    what: str,
) -> RuleReport:
    errors = (got - exact).abs()
    flat = int(errors.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), errors.shape))
    yardstick_error = float((plain - exact).abs().max())
    ulp = ulp_at(float(exact.abs().max()), dtype)
    return RuleReport(
        what=what,
        error=float(errors.flatten()[flat]),
        yardstick_error=yardstick_error,
        ulp=ulp,
        allowed=factor * yardstick_error + ulp,
        worst_index=(index[0] + first_row, *index[1:]) if index else index,
        actual=float(got.flatten()[flat]),
        exact=float(exact.flatten()[flat]),
    )


def _slices(exact: Tensor, by: Literal["tensor", "row"]) -> list[slice]:
    if by not in ("tensor", "row"):
        raise ValueError(f'by must be "tensor" or "row", got {by!r}')
    if exact.numel() == 0 or exact.dim() == 0:
        raise ValueError(f"nothing to compare: the reference has shape {tuple(exact.shape)}")
    if by == "tensor":
        return [slice(0, exact.shape[0])]
    return [slice(row, row + 1) for row in range(exact.shape[0])]


def _check_yardstick(exact_f64: Tensor, yardstick: Tensor) -> None:
    if exact_f64.dtype is not torch.float64:
        raise ValueError(f"exact_f64 must be float64, got {exact_f64.dtype}")
    if yardstick.shape != exact_f64.shape:
        raise ValueError(
            f"yardstick has shape {tuple(yardstick.shape)}, exact_f64 {tuple(exact_f64.shape)}; "
            "they must be equal"
        )
    if exact_f64.isnan().any() or (exact_f64 == torch.inf).any():
        raise ValueError("exact_f64 holds NaN or +inf: it is no reference")
    yardstick_finite = torch.isfinite(yardstick.to(torch.float64)).to(exact_f64.device)
    if not torch.equal(yardstick_finite, torch.isfinite(exact_f64)):
        raise ValueError("yardstick is not finite exactly where exact_f64 is: it is no yardstick")


def _assert_special_values(got: Tensor, exact: Tensor, plain: Tensor, what: str) -> None:
    _assert_nowhere(got.isnan(), got, exact, f"{what}: NaN")
    _assert_nowhere((got == -torch.inf) != (exact == -torch.inf), got, exact, f"{what}: wrong -inf")
    _assert_nowhere(got == torch.inf, got, exact, f"{what}: +inf")
    # A zero that even plain arithmetic meets exactly is structural (no visible key), not luck.
    structural_zero = (exact == 0) & (plain == 0)
    _assert_nowhere(structural_zero & (got != 0), got, exact, f"{what}: not exactly zero")


def _assert_nowhere(bad: Tensor, got: Tensor, exact: Tensor, fault: str) -> None:
    if not bad.any():
        return
    indices = bad.nonzero()
    first = tuple(int(i) for i in indices[0])
    raise AssertionError(
        f"{fault} in {len(indices)} of {bad.numel()} elements, first at {list(first)}: actual "
        f"{float(got[first]):.9g}, exact {float(exact[first]):.9g}"
    )
