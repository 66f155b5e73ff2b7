"""Output and LSE against float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from attnbackend.testing.batches import PagedBatch, expected_attention, yardstick_attention
from attnbackend.testing.conformance.bits import same_bits
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.subject import Subject
from attnbackend.testing.judgement import assert_attention_within_rule
from attnbackend.testing.tolerance import assert_within_rule

__all__ = ["Numerics"]


class Numerics(Check):
    name = "numerics"
    proves = "Output and LSE are within twice plain PyTorch's error of float64, with and without an LSE."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        for case in generate.pairs():
            again = case.attention.lse and (not generate.quick or case.feature == "all at once")
            yield replace(case, without_lse=again)

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        batch = subject.batch(case.attention)
        subject.run_forward(batch)
        _judge(batch)
        if case.without_lse:
            with_lse = batch.output.clone()
            batch.poison_outputs()
            subject.run_forward(batch, lse=None)
            if not same_bits(batch.output, with_lse):
                _judge(replace(batch, lse=None))
        return ()


def _judge(batch: PagedBatch) -> None:
    assert_attention_within_rule(batch)
    # Rounding to 16 bits makes the rule sharper row by row; in float32 single rows are luck.
    if batch.case.dtype is not torch.float32:
        exact, yardstick = expected_attention(batch)[0], yardstick_attention(batch)[0]
        assert_within_rule(batch.output, exact, yardstick, by="row")
