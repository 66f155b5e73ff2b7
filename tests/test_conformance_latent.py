"""The kit for latent attention: the project's backends conform, and each broken one is rejected by name."""

from __future__ import annotations

import pytest

from attnbackend.testing.conformance import Status, check_backend
from attnbackend.testing.conformance.latent import LATENT_CHECKS
from attnbackend.testing.conformance.latent.mutants import LATENT_MUTANTS

WITHOUT_A_MUTANT = {"opcheck", "compiled"}


@pytest.mark.parametrize("name", LATENT_MUTANTS)
def test_the_named_check_rejects(name: str) -> None:
    mutant = LATENT_MUTANTS[name]
    with mutant.at_work():
        report = check_backend(mutant.backend(), only=[mutant.caught_by], quick=True, stop_at_first=True)
    assert [failure.check for failure in report.failures] == [mutant.caught_by], mutant.fault


def test_every_check_has_a_mutant() -> None:
    assert {m.caught_by for m in LATENT_MUTANTS.values()} == LATENT_CHECKS.keys() - WITHOUT_A_MUTANT


def test_torch_mla_conforms() -> None:
    only = [name for name in LATENT_CHECKS if name not in WITHOUT_A_MUTANT]
    report = check_backend("TORCH_MLA", only=only, quick=True)
    report.assert_ok()
    assert report.count(Status.PASSED) > 150


def test_torch_mla_sparse_conforms() -> None:
    report = check_backend("TORCH_MLA_SPARSE", quick=True)
    report.assert_ok()
    assert report.count(Status.PASSED) > 90


def test_an_unknown_check_is_answered_with_those_of_latent_attention() -> None:
    with pytest.raises(
        ValueError, match=r"unknown check 'numerics'; allowed: refusal, cache_writes, mqa, mha"
    ):
        check_backend("TORCH_MLA", only=["numerics"])
