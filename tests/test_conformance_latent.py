"""The kit for latent attention: the project's backends conform, and each broken one is rejected by name."""

from __future__ import annotations

import pytest
from recorded_calls import recorded

from attnbackend.backends.mla.torch_mla import TorchMLABackend
from attnbackend.testing.conformance import Status, check_backend
from attnbackend.testing.conformance.latent import LATENT_CHECKS, LatentCases, steps
from attnbackend.testing.conformance.latent.mutant import LatentMutant
from attnbackend.testing.conformance.latent.mutants import LATENT_MUTANTS
from attnbackend.testing.conformance.latent.state_mutants import DeviceLengths, DeviceLengthsBuilder


@pytest.fixture(autouse=True)
def graphs_that_a_cpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "recorder", lambda device: recorded)


@pytest.mark.parametrize("name", LATENT_MUTANTS)
def test_the_named_check_rejects(name: str) -> None:
    mutant = LATENT_MUTANTS[name]
    with mutant.at_work():
        report = check_backend(mutant.backend(), only=[mutant.caught_by], quick=True, stop_at_first=True)
    assert [failure.check for failure in report.failures] == [mutant.caught_by], mutant.fault


def test_every_check_has_a_mutant() -> None:
    assert {m.caught_by for m in LATENT_MUTANTS.values()} == LATENT_CHECKS.keys()


def test_plans_made_on_the_device_pass_where_those_of_the_host_are_rejected() -> None:
    honest = LatentMutant("none", "none", "graphs", DeviceLengths, builder=DeviceLengthsBuilder)
    report = check_backend(honest.backend(), only=["plan", "graphs"], quick=True)
    report.assert_ok()
    assert report.count(Status.SKIPPED) == 0
    host = LATENT_MUTANTS["claims_graphs"].backend()
    assert check_backend(host, only=["graphs"], case="plain-captured").failures


def test_memory_that_is_given_up_is_named_beside_what_waits() -> None:
    report = check_backend(LATENT_MUTANTS["workspace_regrown"].backend(), only=["host_sync"], quick=True)
    assert "forward_mqa: a call of one token gives up 3072 bytes" in report.failures[0].message
    waiting = check_backend(LATENT_MUTANTS["claims_graphs"].backend(), only=["host_sync"], quick=True)
    assert "gives up" not in str(waiting)


def test_torch_mla_conforms() -> None:
    only = [name for name in LATENT_CHECKS if name not in ("opcheck", "compiled")]
    report = check_backend("TORCH_MLA", only=only, quick=True)
    report.assert_ok()
    assert report.count(Status.PASSED) > 150


def test_torch_mla_sparse_conforms() -> None:
    report = check_backend("TORCH_MLA_SPARSE", quick=True)
    report.assert_ok()
    assert report.count(Status.PASSED) > 90


def test_full_runs_hold_pairs_under_ids_of_their_own() -> None:
    ids = [case.id for case in LatentCases(TorchMLABackend, "cpu").pairs()]
    assert len(set(ids)) == len(ids)
    assert any("heads_of_20" in i and "cache_fp8_scaled" in i for i in ids)


def test_an_unknown_check_is_answered_with_those_of_latent_attention() -> None:
    with pytest.raises(
        ValueError, match=r"unknown check 'numerics'; allowed: refusal, cache_writes, mqa, mha"
    ):
        check_backend("TORCH_MLA", only=["numerics"])
