"""What the relative error rule catches: every mutant must fail, the honest result must pass.

A mutant is the float64 reference of subtly wrong arguments, rounded once to the output's dtype:
the least noisy form that the fault can take. Flat tolerances in use elsewhere are held to the same
mutants, to show what they let pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from attnbackend.testing import (
    AttentionCase,
    PagedBatch,
    RuleReport,
    assert_within_rule,
    expected_attention,
    make_batch,
    reference_attention,
    yardstick_attention,
)
from attnbackend.testing.batches import _attention_features

BASE = AttentionCase(
    query_lens=(1,),
    context_lens=(1023,),
    dtype=torch.bfloat16,
    num_heads=8,
    num_kv_heads=2,
    head_size=128,
)
WINDOWED = replace(BASE, sliding_window=512)
SEEDS = range(2)


@dataclass(frozen=True)
class Call:
    """Arguments of the reference, to be changed by a mutant."""

    tensors: dict[str, Any]
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


def stale_page_of_the_long_request(call: Call) -> None:
    call.tensors["block_table"][1, 40] = call.tensors["block_table"][1, 41]


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


Mutant = Callable[[Call], None]
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
NEWEST = replace(BASE, probe="newest_key")
EDGE = replace(WINDOWED, probe="window_edge")
CAPPED = replace(BASE, logits_soft_cap=50.0)
NEAR_CAP = replace(CAPPED, probe="soft_cap")
PROBING: list[tuple[AttentionCase, Mutant]] = [
    (NEWEST, newest_key_missing),
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


@functools.cache
def batch_of(case: AttentionCase) -> PagedBatch:
    return make_batch(case)


@functools.cache
def answers(case: AttentionCase) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(exact, yardstick), each (output, lse)"""
    return expected_attention(batch_of(case)), yardstick_attention(batch_of(case))


def result_of(mutant: Mutant, case: AttentionCase) -> tuple[Tensor, Tensor]:
    """Output and LSE of the mutant, in the dtypes that an op writes."""
    call = Call.of(batch_of(case))
    mutant(call)
    output, lse = call.run()
    return output.to(case.dtype), lse.float()


def judge(
    result: tuple[Tensor, Tensor], case: AttentionCase, by: Literal["tensor", "row"] = "tensor"
) -> list[RuleReport]:
    return [
        assert_within_rule(got, exact, yardstick, what=what, by=by)
        for what, got, exact, yardstick in zip(("output", "lse"), result, *answers(case), strict=True)
    ]


def output_error(result: tuple[Tensor, Tensor], case: AttentionCase) -> float:
    return float((result[0] - answers(case)[0][0]).abs().max())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("case", "mutant"), UNIT_NORMAL, ids=name_of)
def test_the_rule_rejects_every_mutant(case: AttentionCase, mutant: Mutant, seed: int) -> None:
    seeded = replace(case, seed=seed)
    result = result_of(mutant, seeded)
    with pytest.raises(AssertionError, match="ratio"):
        judge(result, seeded)


@pytest.mark.parametrize("by", ["tensor", "row"])
@pytest.mark.parametrize(
    "case",
    [
        BASE,
        WINDOWED,
        CAPPED,
        NEWEST,
        EDGE,
        NEAR_CAP,
        MIXED,
        replace(BASE, use_sinks=True, use_alibi=True),
    ],
    ids=lambda case: case.id,
)
def test_the_rule_accepts_the_honest_result(case: AttentionCase, by: Literal["tensor", "row"]) -> None:
    output, lse = judge(result_of(honest, case), case, by)
    assert output.ratio < 0.3
    assert lse.ratio < 0.01


@pytest.mark.parametrize(("case", "mutant"), PROBING, ids=name_of)
def test_probing_inputs_make_a_mutant_obvious_in_the_output(case: AttentionCase, mutant: Mutant) -> None:
    result = result_of(mutant, case)
    assert output_error(result, case) > 0.1
    with pytest.raises(AssertionError, match=r"^output: .* ratio [0-9]{2,}"):
        judge(result, case)


def test_unit_normal_outputs_cannot_show_an_ignored_soft_cap() -> None:
    """Why the probing inputs exist; should this fail, say so in the rule's documentation."""
    exact, yardstick = answers(CAPPED)
    output, _ = result_of(soft_cap_ignored, CAPPED)
    assert assert_within_rule(output, exact[0], yardstick[0]).ratio < 0.7


@pytest.mark.parametrize(
    ("flat", "case", "mutant"),
    [
        (1.1e-2, BASE, newest_key_missing),
        (1e-2, BASE, scale_wrong_by_one_percent),
        (6e-2, BASE, one_stale_page),
        (3e-2, replace(WINDOWED, seed=2), window_one_too_wide),
    ],
    ids=name_of,
)
def test_flat_tolerances_let_the_mutant_pass(flat: float, case: AttentionCase, mutant: Mutant) -> None:
    assert output_error(result_of(mutant, case), case) < flat


def test_rows_of_few_keys_hide_a_fault_in_long_rows_unless_judged_alone() -> None:
    (exact, _), (yardstick, _) = answers(MIXED)
    faulty, _ = result_of(stale_page_of_the_long_request, MIXED)
    # A quarter of the fault: as small as the tolerance that the short rows bring.
    mild = (exact + (faulty - exact) * 0.25).bfloat16()
    assert_within_rule(mild, exact, yardstick)
    with pytest.raises(AssertionError, match=r"at \[4, "):
        assert_within_rule(mild, exact, yardstick, by="row")
