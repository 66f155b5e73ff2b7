"""Each deliberately broken backend is rejected by the check that its data names."""

from __future__ import annotations

import pytest
from recorded_calls import recorded

from attnbackend.testing.conformance import CHECKS, Status, check_backend
from attnbackend.testing.conformance.checks import graphs
from attnbackend.testing.conformance.mutants import MUTANTS


@pytest.fixture(autouse=True)
def graphs_that_a_cpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "recorder", lambda device: recorded)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_named_check_rejects(name: str) -> None:
    mutant = MUTANTS[name]
    case = mutant.shown_by or "*"
    report = check_backend(
        mutant.backend(), only=[mutant.caught_by], case=case, quick=case == "*" or "*" not in case,
        stop_at_first=True,
    )  # fmt: skip
    assert [failure.check for failure in report.failures] == [mutant.caught_by], mutant.fault


def test_a_fault_of_one_feature_leaves_the_others_passing() -> None:
    report = check_backend(MUTANTS["cap_ignored"].backend(), only=["numerics"], quick=True)
    failed = {failure.feature for failure in report.failures}
    assert failed == {"logits_soft_cap", "cross", "all at once"}


def test_every_check_has_a_mutant_that_only_it_need_reject() -> None:
    assert {mutant.caught_by for mutant in MUTANTS.values()} == CHECKS.keys()


@pytest.mark.parametrize(
    ("name", "also"),
    [("writes_cache", "opcheck"), ("writes_nothing", "cache_writes"), ("lse_in_base_two", "numerics")],
)
def test_some_faults_are_seen_by_more_than_one_check(name: str, also: str) -> None:
    report = check_backend(MUTANTS[name].backend(), only=[also], quick=True, stop_at_first=True)
    assert report.failures


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_SDPA"])
def test_the_project_s_backends_conform(backend: str) -> None:
    only = CHECKS.keys() - {"compiled", "export", "opcheck"}
    report = check_backend(backend, only=[name for name in CHECKS if name in only], quick=True)
    report.assert_ok()
    assert report.count(Status.PASSED) > 200
