"""Steps of latent attention, one after another: with plans, on other contents, in graphs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from attnbackend.config import set_config
from attnbackend.forward_context import set_forward_context
from attnbackend.testing.conformance.batch_shapes import BATCHES, DECODE, MIXED, PADDED, UNEVEN_DECODE
from attnbackend.testing.conformance.checks.determinism import Determinism as DenseDeterminism
from attnbackend.testing.conformance.checks.determinism import repeats_differ
from attnbackend.testing.conformance.checks.graphs import (
    BATCHES_IN_GRAPHS,
    capture_and_replay,
    claimed_level,
    recorder,
    spare_blocks,
)
from attnbackend.testing.conformance.checks.host_sync import SMALLER, blocks_left, unfit_for_graphs
from attnbackend.testing.conformance.checks.host_sync import HostSync as DenseHostSync
from attnbackend.testing.conformance.checks.plan import moved
from attnbackend.testing.conformance.checks.stateless import Stateless as DenseStateless
from attnbackend.testing.conformance.checks.stateless import later_calls
from attnbackend.testing.conformance.latent.base import LatentCheck
from attnbackend.testing.conformance.latent.case import LatentCase
from attnbackend.testing.conformance.latent.cases import LatentCases
from attnbackend.testing.conformance.latent_subject import MIXED as ON_STEPS
from attnbackend.testing.conformance.latent_subject import LatentSubject
from attnbackend.testing.conformance.outcome import Skipped
from attnbackend.testing.conformance.planned import (
    GROUP,
    PersistentBatch,
    context_of,
    make_builder,
    plan_tensors,
)
from attnbackend.testing.mla_batches import MLABatch
from attnbackend.testing.mla_cases import MLACase
from attnbackend.types import AttentionCGSupport

__all__ = ["Determinism", "Graphs", "HostSync", "Plan", "Stateless"]

_KEPT = "kept_buffers"


class Stateless(LatentCheck):
    name = DenseStateless.name
    proves = DenseStateless.proves

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        pairs = [("plain", MIXED), ("plain", DECODE), ("plain", UNEVEN_DECODE), ("cache_fp8_scaled", DECODE)]
        further = [] if generate.quick else [("no_lse", DECODE)]
        yield from generate.some(*pairs, *further, new_tokens_written=False)

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        mla = case.mla
        other = subject.batch(
            replace(
                mla, seed=mla.seed + 1, query_lens=mla.query_lens[::-1], context_lens=mla.context_lens[::-1],
                k_scale=None if mla.k_scale is None else mla.k_scale / 2,
            )
        )  # fmt: skip
        return list(later_calls(subject, mla, other, partial(_write_and_judge, subject)))


def _write_and_judge(subject: LatentSubject, batch: MLABatch) -> None:
    subject.run_write(batch)
    batch.poison_outputs()
    for role in subject.roles:
        subject.run(role, batch)
        subject.judge(role, batch)


class Determinism(LatentCheck):
    name = DenseDeterminism.name
    proves = DenseDeterminism.proves

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        yield from generate.some(("plain", MIXED), ("plain", UNEVEN_DECODE), ("no_lse", DECODE))

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        return list(repeats_differ(subject, subject.batch(case.mla)))


class Plan(LatentCheck):
    name = "plan"
    proves = (
        "With a step's plan from one builder, batch after batch, the answers are as right as without; plans "
        "for graphs keep their buffers."
    )

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        for batch in BATCHES:
            yield from generate.case("plain", batch)
        yield from generate.some(("layers_interleaved", MIXED), ("cache_fp8_scaled", MIXED))
        for case in generate.case("plain", DECODE):
            yield replace(case, id=_KEPT)

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        """Another batch goes first: what a builder keeps of it must not be seen in the next."""
        if case.id == _KEPT:
            return list(_unkept(subject, case.mla))
        lengths = {"query_lens": (1, 1, 20), "context_lens": (60, 3, 31), "num_padded_rows": 2}
        other = subject.batch(replace(case.mla, **lengths, seed=99))  # type: ignore[arg-type]
        batches = (other, subject.batch(case.mla))
        buffers = PersistentBatch.for_batches(batches, subject.device)
        builder = make_builder(subject, case.mla, buffers.limits)
        for batch, role in itertools.product(batches, subject.roles):
            with set_config(mla_context_tokens=32):  # A plan for each role: layers of a step have one.
                plan = builder.build(0, buffers.fill(batch))
            with set_forward_context(context_of(subject, plan)):
                subject.run(role, batch, **buffers.arguments, group=GROUP)
            subject.judge(role, batch)
        return ()


def _unkept(subject: LatentSubject, case: MLACase) -> Iterator[str]:
    """What plans of a small and a large batch, both of which a graph may hold, do not hold in one place."""
    large, small = (replace(case, **x) for x in BATCHES_IN_GRAPHS[claimed_level(subject, case)])
    batches = tuple(map(subject.batch, (small, large)))
    buffers = PersistentBatch.for_batches(batches, subject.device)
    builder = make_builder(subject, case, buffers.limits)
    before: dict[str, Tensor] = {}
    for what, batch in zip(("small", "large", "small"), (*batches, batches[0]), strict=True):
        now = dict(plan_tensors(builder.build(0, buffers.fill(batch))))
        yield from moved(before or now, now, what)
        before = now


class HostSync(LatentCheck):
    name = DenseHostSync.name
    proves = DenseHostSync.proves

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        yield from generate.some(("plain", DECODE), ("no_lse", "uniform_of_four"), ("plain", PADDED))
        yield from generate.some(("cache_fp8_scaled", DECODE), ("layers_interleaved", DECODE))

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        level = claimed_level(subject, case.mla)
        if level < (needed := _least_support(case.mla)):
            raise Skipped(f"the builder claims graph support for {level.name} only, not for {needed.name}")
        batch, smaller = subject.batch(case.mla), replace(case.mla, **SMALLER)
        smaller = replace(smaller, spare_blocks=blocks_left(smaller, batch))
        roles = _roles_in_graphs(subject, level)
        return list(unfit_for_graphs(subject, roles, batch, subject.batch(smaller)))


def _least_support(case: MLACase) -> AttentionCGSupport:
    """With which a graph may hold the batch."""
    lengths = set(case.query_lens)
    if lengths == {1}:
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return AttentionCGSupport.UNIFORM_BATCH if len(lengths) == 1 else AttentionCGSupport.ALWAYS


def _roles_in_graphs(subject: LatentSubject, level: AttentionCGSupport) -> tuple[str, ...]:
    """A model calls `forward_mixed` in steps with prompts alone, which graphs hold at the highest level."""
    return tuple(r for r in subject.roles if r != ON_STEPS or level is AttentionCGSupport.ALWAYS)


class Graphs(LatentCheck):
    name = "graphs"
    proves = (
        "CUDA graphs captured up to the claimed level give eager's bits when replayed on other contents, or, "
        "where determinism is not claimed, answers as right."
    )

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        for feature in ("plain", "no_lse", "cache_fp8_scaled", "layers_interleaved"):
            for case in generate.case(feature, DECODE):
                yield replace(case, id=f"{feature}-captured")

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        record, level = recorder(subject.device), claimed_level(subject, case.mla)
        findings: list[str] = []
        exactly = subject.backend.is_deterministic
        for role in _roles_in_graphs(subject, level):
            for lengths in (x for held, x in BATCHES_IN_GRAPHS.items() if held <= level):
                large, other = (_sized(subject, case.mla, x) for x in lengths)
                findings += capture_and_replay(subject, role, record, large, other, exactly)
        return findings


def _sized(subject: LatentSubject, case: MLACase, lengths: dict[str, Any]) -> MLABatch:
    case = replace(case, **lengths)
    return subject.batch(replace(case, spare_blocks=spare_blocks(case)))
