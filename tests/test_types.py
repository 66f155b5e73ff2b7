"""The vocabulary: membership, order, and how it prints."""

from __future__ import annotations

import pytest
import torch

from attnbackend.types import (
    AttentionCGSupport,
    AttentionType,
    KVCacheLayout,
    MultipleOf,
    Reason,
    Unavailable,
    describe,
)


@pytest.mark.parametrize(
    ("limits", "value", "is_in"),
    [
        (MultipleOf(16), 16, True),
        (MultipleOf(16), 48, True),
        (MultipleOf(16), 8, False),
        (MultipleOf(16), 0, False),
        (MultipleOf(16), -16, False),
        (MultipleOf(16), 16.0, False),
        (MultipleOf(8, 32, 256), 24, False),
        (MultipleOf(8, 32, 256), 32, True),
        (MultipleOf(8, 32, 256), 256, True),
        (MultipleOf(8, 32, 256), 264, False),
    ],
)
def test_multiple_of_contains_positive_multiples_within_its_limits(limits, value, is_in):
    assert (value in limits) is is_in


@pytest.mark.parametrize(
    ("limits", "value", "below", "above"),
    [
        (MultipleOf(16), 20, 16, 32),
        (MultipleOf(16), 32, 32, 32),
        (MultipleOf(8, 32, 256), 300, 256, 304),
        (MultipleOf(8, 30, 256), 5, 0, 32),
    ],
)
def test_multiple_of_finds_neighbours(limits, value, below, above):
    assert limits.at_most(value) == below
    assert limits.at_least(value) == above


@pytest.mark.parametrize("wrong", [(0,), (-8,), (16, 17, 31)])
def test_multiple_of_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="multiple"):
        MultipleOf(*wrong)


def test_multiple_of_prints_its_limits():
    assert str(MultipleOf(8, 32, 256)) == "multiples of 8 from 32 to 256"
    assert str(MultipleOf(16)) == "multiples of 16"


def test_graph_support_is_ordered_from_never_to_always():
    order = [
        AttentionCGSupport.NEVER,
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        AttentionCGSupport.UNIFORM_BATCH,
        AttentionCGSupport.ALWAYS,
    ]
    assert sorted(AttentionCGSupport) == order
    assert min(order[1:]) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def test_attention_types_are_the_strings_that_ops_take():
    assert AttentionType("encoder_only") is AttentionType.ENCODER_ONLY
    assert f"{AttentionType.DECODER}" == "decoder"
    assert KVCacheLayout("HND") is KVCacheLayout.HND


def test_a_reason_states_value_and_what_is_allowed():
    reason = Reason("dtype", torch.float64, "float16, bfloat16")
    assert str(reason) == "dtype=float64 (allowed: float16, bfloat16)"


def test_unavailability_is_a_reason_apart_from_the_configuration():
    reason = Unavailable(value="ImportError: no module named x")
    assert isinstance(reason, Reason)
    assert reason.field == "probe"
    assert str(reason) == "unavailable: ImportError: no module named x"


def test_describe_drops_the_torch_prefix():
    assert describe(torch.bfloat16) == "bfloat16"
    assert describe(None) == "None"
