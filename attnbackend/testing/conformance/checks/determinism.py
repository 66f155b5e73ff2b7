"""The same arguments, the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from attnbackend.testing.conformance.base_subject import BaseSubject, Batch
from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED, UNEVEN_DECODE
from attnbackend.testing.conformance.bits import differing, same_bits
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.outcome import Skipped
from attnbackend.testing.conformance.subject import Subject

__all__ = ["Determinism", "repeats_differ"]

REPEATS = 4


class Determinism(Check):
    name = "determinism"
    proves = "Where is_deterministic is claimed, equal calls give equal bits."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        yield from generate.some(
            ("plain", MIXED),
            ("everything", MIXED),
            ("plain", DECODE),
            ("plain", UNEVEN_DECODE),
            ("no_lse", UNEVEN_DECODE),
        )

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        return list(repeats_differ(subject, subject.batch(case.attention)))


def repeats_differ(subject: BaseSubject[Any, Batch], batch: Batch) -> Iterator[str]:
    """Raises `Skipped` where the backend does not claim to be deterministic."""
    if not subject.backend.is_deterministic:
        raise Skipped(f"{subject.name} does not claim is_deterministic")
    for role in subject.roles:
        output, first = subject.results(role, batch)["output"], None
        for repeat in range(1, REPEATS + 1):
            batch.poison_outputs()
            subject.run(role, batch)
            first = output.clone() if first is None else first
            if not same_bits(output, first):
                yield f"{subject.called(role)}call {repeat} differs from call 1: {differing(output, first)}"
                break
