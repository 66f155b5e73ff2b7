"""The same arguments, the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED, UNEVEN_DECODE
from attnbackend.testing.conformance.bits import differing, same_bits
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.outcome import Skipped
from attnbackend.testing.conformance.subject import Subject

__all__ = ["Determinism"]

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
        if not subject.backend.is_deterministic:
            raise Skipped(f"{subject.name} does not claim is_deterministic")
        batch = subject.batch(case.attention)
        subject.run_forward(batch)
        first = batch.output.clone()
        for repeat in range(1, REPEATS):
            batch.poison_outputs()
            subject.run_forward(batch)
            if not same_bits(batch.output, first):
                return [f"call {repeat + 1} differs from call 1: {differing(batch.output, first)}"]
        return ()
