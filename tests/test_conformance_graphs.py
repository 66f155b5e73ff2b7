"""The check of CUDA graphs, with a stand-in for a graph that a CPU can run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from recorded_calls import recorded

from attnbackend import AttentionBackend
from attnbackend.testing.conformance import Subject, check_backend, open_subject
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks import graphs
from attnbackend.testing.conformance.honest import HonestBackend
from attnbackend.testing.conformance.mutants import MUTANTS
from attnbackend.types import AttentionCGSupport


def _findings(
    backend: type[AttentionBackend], level: AttentionCGSupport, feature: str = "plain"
) -> list[str]:
    with open_subject(backend) as subject:
        assert isinstance(subject, Subject)
        case = next(CaseGenerator(backend, "cpu").case(feature, "decode"))
        large, other = (
            graphs._sized(subject, case.attention, lengths) for lengths in graphs.BATCHES_IN_GRAPHS[level]
        )
        return list(graphs.capture_and_replay(subject, "forward", recorded, large, other))


LEVELS = [level for level in AttentionCGSupport if level]


@pytest.mark.parametrize("feature", ["plain", "everything", "no_lse"])
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_an_honest_backend_replays_what_eager_gives(level: AttentionCGSupport, feature: str) -> None:
    assert _findings(HonestBackend, level, feature) == []


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_lengths_baked_into_the_captured_plan_are_seen(level: AttentionCGSupport) -> None:
    class FrozenBuilder(HonestBackend.get_builder_cls()):  # type: ignore[misc]
        def build_for_cudagraph_capture(self, common):  # type: ignore[no-untyped-def]
            from attnbackend.testing.conformance.mutants.states import _Disguised

            return _Disguised(common=common, real=common.replace(seq_lens=common.seq_lens.clone()))

    mutant = replace(MUTANTS["baked_plan"], name="frozen_at_capture", builder=FrozenBuilder)
    differing = [finding for finding in _findings(mutant.backend(), level) if "eager" in finding]
    assert differing
    assert all("replay on other contents" in finding for finding in differing)


def test_batches_of_a_level_have_one_size_and_are_of_that_level() -> None:
    for level, pair in graphs.BATCHES_IN_GRAPHS.items():
        tokens = {sum(lengths["query_lens"]) + lengths.get("num_padded_tokens", 0) for lengths in pair}
        assert len(tokens) == 1
        if level < AttentionCGSupport.ALWAYS:
            assert all(len(set(lengths["query_lens"])) == 1 for lengths in pair)


def test_without_a_cuda_device_graphs_are_skipped_with_the_reason() -> None:
    report = check_backend(HonestBackend, only=["graphs"])
    assert {outcome.message for outcome in report.outcomes} == {"CUDA graphs need a CUDA device; this is cpu"}


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["graphs", "host_sync", "plan", "numerics"])
def test_the_honest_backend_passes_on_a_gpu(check: str) -> None:
    assert torch.cuda.is_available()
    check_backend(HonestBackend, device="cuda", only=[check], quick=True).assert_ok()
