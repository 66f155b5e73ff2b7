"""The relative error rule itself: what it allows, what it never allows, what it says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnbackend.testing import assert_within_rule, ulp_at

F64 = torch.float64


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


@pytest.mark.parametrize(
    ("magnitude", "dtype", "expected"),
    [
        (1.0, torch.bfloat16, 2**-7),
        (1.99, torch.bfloat16, 2**-7),
        (2.0, torch.bfloat16, 2**-6),
        (0.3, torch.float16, 2**-12),
        (1.0, torch.float32, 2**-23),
        (300.0, torch.float8_e4m3fn, 32.0),
        (0.0, torch.float32, 0.0),
    ],
)
def test_ulp_is_the_gap_between_neighbours(magnitude: float, dtype: torch.dtype, expected: float) -> None:
    assert ulp_at(magnitude, dtype) == expected


def test_twice_the_yardsticks_error_plus_one_ulp_is_allowed_and_no_more() -> None:
    exact, yardstick = f64(1.0, 0.5), f64(1.0, 0.6)
    allowed = 0.2 + 2**-23
    report = assert_within_rule(f64(1.0, 0.5 + 0.2).float(), exact, yardstick)
    assert report.allowed == pytest.approx(allowed, rel=1e-12)
    with pytest.raises(AssertionError, match="ratio"):
        assert_within_rule(f64(1.0, 0.5 + 0.2 + 4e-7).float(), exact, yardstick)


def test_factor_scales_what_is_allowed() -> None:
    exact, yardstick = f64(1.0), f64(1.1)
    with pytest.raises(AssertionError):
        assert_within_rule(f64(1.25).float(), exact, yardstick)
    assert_within_rule(f64(1.25).float(), exact, yardstick, factor=3.0)


def test_an_exact_yardstick_leaves_one_ulp() -> None:
    exact = f64(1.0, 0.25)
    near = torch.tensor([1.0078125, 0.25], dtype=torch.bfloat16)
    assert assert_within_rule(near, exact, exact).ratio == 1.0
    with pytest.raises(AssertionError):
        assert_within_rule(torch.tensor([1.015625, 0.25], dtype=torch.bfloat16), exact, exact)


def test_a_failure_names_index_values_error_allowance_and_ratio() -> None:
    exact = f64(1, 2, 3, 4).reshape(2, 2)
    actual = torch.tensor([[1.0, 2.0], [3.5, 4.0]])
    with pytest.raises(AssertionError) as failure:
        assert_within_rule(actual, exact, exact + 0.0625, what="logits")
    message = str(failure.value)
    for part in (
        "logits: at [1, 0]",
        "actual 3.5",
        "exact 3,",
        "error 5.000e-01",
        "allowed 1.250e-01",
        "ratio 4",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("actual", "exact", "message"),
    [
        (math.nan, 1.0, "NaN"),
        (math.nan, -math.inf, "NaN"),
        (-1e30, -math.inf, "wrong -inf"),
        (-math.inf, 1.0, "wrong -inf"),
        (math.inf, 1.0, r"\+inf"),
        (math.inf, -math.inf, "wrong -inf"),
        (1e-30, 0.0, "not exactly zero"),
    ],
)
def test_special_values_must_match_exactly(actual: float, exact: float, message: str) -> None:
    good = f64(5.0, exact, 5.0)
    loose_yardstick = good + f64(1.0, 0.0, 0.0)
    with pytest.raises(AssertionError, match=rf"output: {message}.* first at \[1\]"):
        assert_within_rule(f64(5.0, actual, 5.0).float(), good, loose_yardstick)


def test_matching_special_values_pass_whatever_surrounds_them() -> None:
    exact = f64(-math.inf, 0.0, 1.0)
    report = assert_within_rule(exact.float(), exact, exact)
    assert (report.error, report.ratio) == (0.0, 0.0)
    assert_within_rule(f64(-math.inf).float(), f64(-math.inf), f64(-math.inf))


def test_a_zero_by_cancellation_is_no_structural_zero() -> None:
    assert_within_rule(f64(1e-9, 1.0).float(), f64(0.0, 1.0), f64(-1e-8, 1.0))


def test_by_row_judges_each_token_by_its_own_yardstick() -> None:
    exact = f64(100.0, 1.0).reshape(2, 1)
    yardstick, actual = exact + f64(1.0, 0.01).reshape(2, 1), exact + f64(0, 0.5).reshape(2, 1)
    assert_within_rule(actual.float(), exact, yardstick)
    with pytest.raises(AssertionError, match=r"at \[1, 0\]"):
        assert_within_rule(actual.float(), exact, yardstick, by="row")


def test_a_wrong_shape_is_a_failure() -> None:
    with pytest.raises(AssertionError, match=r"shape \(1,\), expected \(2,\)"):
        assert_within_rule(torch.ones(1), f64(1, 1), f64(1, 1))


@pytest.mark.parametrize(
    ("exact", "yardstick", "message"),
    [
        (torch.ones(2), f64(1, 1), "must be float64"),
        (f64(1, math.nan), f64(1, 1), "no reference"),
        (f64(1, 1), f64(1, math.nan), "no yardstick"),
        (f64(1, -math.inf), f64(1, 1), "no yardstick"),
        (f64(1, 1), f64(1), "they must be equal"),
    ],
)
def test_a_reference_or_yardstick_that_is_none_is_refused(
    exact: Tensor, yardstick: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        assert_within_rule(torch.ones(2), exact, yardstick)


def test_nothing_to_compare_is_refused() -> None:
    empty = torch.empty(0, 2, dtype=F64)
    with pytest.raises(ValueError, match="nothing to compare"):
        assert_within_rule(empty.float(), empty, empty)
