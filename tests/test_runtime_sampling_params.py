from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attnbackend.runtime import SamplingParams


def test_defaults_are_greedy_with_sixteen_tokens() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert params.max_tokens == 16
    assert params.stop_strings == ()


def test_one_stop_string_is_not_taken_as_its_characters() -> None:
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_parameters_cannot_change_under_a_running_request() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 .*at least 1"),
        ({"temperature": -0.1}, "temperature=-0.1 .*at least 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": 1.0, "top_k": -2}, "top_k=-2 .*0 or -1 to keep all"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0 .*above 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5 .*at most 1"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"seed": -(2**63) - 1}, "seed=-9223372036854775809"),
        ({"stop": ["a", ""]}, r"stop\[1\] is empty"),
        ({"top_k": 5}, "top_k=5 has no effect at temperature=0"),
        ({"top_p": 0.9}, "top_p=0.9 has no effect at temperature=0"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"temperature": "hot"},
        {"seed": 0.5},
        {"stop": [1]},
        {"stop_token_ids": ["a"]},
        {"ignore_eos": 1},
        {"top_kk": 1},
    ],
    ids=repr,
)
def test_values_of_another_type_and_unknown_names_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop": 5}, "stop=5 must be a list of strings"),
        ({"stop": None}, "stop=None must be a list of strings; leave it out for none"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list of token ids"),
        ({"stop_token_ids": 5.5}, "stop_token_ids=5.5 must be a list of token ids"),
        ({"stop_token_ids": None}, "stop_token_ids=None must be a list"),
        ({"stop_token_ids": "ab"}, r"stop_token_ids\[0\]='a' is not an integer"),
    ],
    ids=repr,
)
def test_what_is_no_list_is_refused_in_words(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SamplingParams(**values)
