"""What the relative error rule catches: every mutant must fail, the honest result must pass.

A mutant is the float64 reference of subtly wrong arguments, rounded once to the output's dtype:
the least noisy form that the fault can take. Flat tolerances in use elsewhere are held to the same
mutants, to show what they let pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from attnbackend.testing import (
    AttentionCase,
    PagedBatch,
    assert_attention_within_rule,
    assert_within_rule,
    expected_attention,
    make_batch,
    reference_attention,
    yardstick_attention,
)
from attnbackend.testing.batches import _attention_features

BASE = AttentionCase(
    query_lens=(1, 1),
    context_lens=(1023, 1023),
    dtype=torch.bfloat16,
    num_heads=8,
    num_kv_heads=2,
    head_size=128,
)
WINDOWED = replace(BASE, sliding_window=512)
SEEDS = range(3)


@dataclass(frozen=True)
class Call:
    """Arguments of the reference, to be changed by a mutant."""

    tensors: dict[str, Tensor]
    features: dict[str, Any]

    @classmethod
    def of(cls, batch: PagedBatch) -> Call:
        names = ("query", "kv_cache", "query_start_loc", "seq_lens", "block_table")
        return cls({n: getattr(batch, n).clone() for n in names}, _attention_features(batch))

    def run(self) -> tuple[Tensor, Tensor]:
        return reference_attention(**self.tensors, **self.features)


def honest(call: Call) -> None:
    pass


def newest_key_missing(call: Call) -> None:
    call.tensors["seq_lens"] -= 1


def scale_wrong_by_one_percent(call: Call) -> None:
    call.features["scale"] *= 1.01


def window_one_too_wide(call: Call) -> None:
    call.features["sliding_window"] += 1


def window_one_too_narrow(call: Call) -> None:
    call.features["sliding_window"] -= 1


def window_ignored(call: Call) -> None:
    call.features["sliding_window"] = None


def one_stale_page(call: Call) -> None:
    call.tensors["block_table"][0, 40] = call.tensors["block_table"][0, 41]


def kv_heads_swapped(call: Call) -> None:
    call.tensors["kv_cache"] = call.tensors["kv_cache"].flip(3)


def soft_cap_ignored(call: Call) -> None:
    call.features["logits_soft_cap"] = 0.0


def soft_cap_before_scale(call: Call) -> None:
    """scale * c * tanh(q.k / c) is a cap of scale * c on the scaled logit."""
    call.features["logits_soft_cap"] *= call.features["scale"]


def sinks_ignored(call: Call) -> None:
    call.features["sinks"] = None


def alibi_ignored(call: Call) -> None:
    call.features["alibi_slopes"] = None


UNIT_NORMAL: list[tuple[AttentionCase, Mutant]] = [
    (BASE, newest_key_missing),
    (BASE, scale_wrong_by_one_percent),
    (BASE, one_stale_page),
    (BASE, kv_heads_swapped),
    (WINDOWED, window_one_too_wide),
    (WINDOWED, window_one_too_narrow),
    (WINDOWED, window_ignored),
    (replace(BASE, use_sinks=True), sinks_ignored),
    (replace(BASE, use_alibi=True), alibi_ignored),
]
EDGE = replace(WINDOWED, probe="window_edge")
CAPPED = replace(BASE, logits_soft_cap=50.0)
NEAR_CAP = replace(CAPPED, probe="soft_cap")
PROBING: list[tuple[AttentionCase, Mutant]] = [
    (EDGE, window_one_too_wide),
    (EDGE, window_one_too_narrow),
    (NEAR_CAP, soft_cap_ignored),
    (NEAR_CAP, soft_cap_before_scale),
]
MIXED = replace(BASE, query_lens=(4, 1), context_lens=(0, 1023))
"""A prompt of few keys, whose large outputs and errors hide the long request's."""


def name_of(value: object) -> str:
    if isinstance(value, AttentionCase):
        return value.probe or "unit_normal"
    return getattr(value, "__name__", str(value))


def filled_by(mutant: Mutant, case: AttentionCase) -> PagedBatch:
    """The batch with output and LSE as the mutant leaves them."""
    batch = make_batch(case)
    call = Call.of(batch)
    mutant(call)
    output, lse = call.run()
    batch.output.copy_(output)
    assert batch.lse is not None
    batch.lse.copy_(lse)
    return batch


def output_error(batch: PagedBatch) -> float:
    return float((batch.output - expected_attention(batch)[0]).abs().max())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("case", "mutant"), UNIT_NORMAL, ids=name_of)
def test_the_rule_rejects_every_mutant(case: AttentionCase, mutant: Mutant, seed: int) -> None:
    batch = filled_by(mutant, replace(case, seed=seed))
    with pytest.raises(AssertionError, match="ratio"):
        assert_attention_within_rule(batch)


@pytest.mark.parametrize("by", ["tensor", "row"])
@pytest.mark.parametrize(
    "case",
    [BASE, WINDOWED, CAPPED, EDGE, NEAR_CAP, MIXED, replace(BASE, use_sinks=True, use_alibi=True)],
    ids=lambda case: case.id,
)
def test_the_rule_accepts_the_honest_result(
    case: AttentionCase, by: Literal["tensor", "row"]
) -> None:
    reports = assert_attention_within_rule(filled_by(honest, case), by=by)
    assert [report.what for report in reports] == ["output", "lse"]
    assert reports[0].ratio < 0.3


@pytest.mark.parametrize(("case", "mutant"), PROBING, ids=name_of)
def test_probing_inputs_make_a_mutant_obvious_in_the_output(
    case: AttentionCase, mutant: Mutant
) -> None:
    batch = filled_by(mutant, case)
    assert output_error(batch) > 0.1
    with pytest.raises(AssertionError, match=r"^output: .* ratio [0-9]{2,}"):
        assert_attention_within_rule(batch)


def test_unit_normal_outputs_cannot_show_an_ignored_soft_cap() -> None:
    """Why the probing inputs exist; should this fail, say so in the rule's documentation."""
    batch = filled_by(soft_cap_ignored, CAPPED)
    exact, yardstick = expected_attention(batch)[0], yardstick_attention(batch)[0]
    assert assert_within_rule(batch.output, exact, yardstick).ratio < 0.7


@pytest.mark.parametrize(
    ("flat", "case", "mutant"),
    [
        (1.1e-2, BASE, newest_key_missing),
        (1e-2, BASE, scale_wrong_by_one_percent),
        (6e-2, BASE, one_stale_page),
        (4e-2, WINDOWED, window_one_too_wide),
    ],
    ids=name_of,
)
def test_flat_tolerances_let_the_mutant_pass(
    flat: float, case: AttentionCase, mutant: Mutant
) -> None:
    assert output_error(filled_by(mutant, case)) < flat


def test_rows_of_few_keys_hide_a_fault_in_long_rows_unless_judged_alone() -> None:
    batch = make_batch(MIXED)
    call = Call.of(batch)
    one_stale_page(call)
    last_table = call.tensors["block_table"]
    last_table[1, 40] = last_table[1, 41]
    exact, yardstick = expected_attention(batch)[0], yardstick_attention(batch)[0]
    faulty = exact + (call.run()[0] - exact) * 0.25
    assert_within_rule(faulty.bfloat16(), exact, yardstick)
    with pytest.raises(AssertionError, match=r"at \[4, "):
        assert_within_rule(faulty.bfloat16(), exact, yardstick, by="row")
