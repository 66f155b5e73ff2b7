"""Output and LSE against float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from attnbackend.testing.batches import expected_attention, yardstick_attention
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.judge import judge
from attnbackend.testing.conformance.subject import Subject
from attnbackend.testing.tolerance import assert_within_rule

__all__ = ["Numerics"]


class Numerics(Check):
    name = "numerics"
    proves = "Output and LSE are within twice plain PyTorch's error of float64, for every claim and batch."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        yield from generate.pairs()

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        batch = subject.batch(case.attention)
        subject.run_forward(batch)
        judge(batch)
        # Rounding to 16 bits makes the rule sharper row by row; in float32 single rows are luck.
        if case.attention.dtype is not torch.float32:
            exact, yardstick = expected_attention(batch)[0], yardstick_attention(batch)[0]
            assert_within_rule(batch.output, exact, yardstick, by="row")
        return ()
