"""Output and LSE against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbackend.forward_context import set_forward_context
from attnbackend.testing.batches import PagedBatch
from attnbackend.testing.conformance.bits import same_bits
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.planned import GROUP, PersistentBatch, context_of, make_builder
from attnbackend.testing.conformance.subject import Subject
from attnbackend.testing.judgement import AttentionJudge

__all__ = ["Numerics", "in_other_settings"]


class Numerics(Check):
    name = "numerics"
    proves = "Output and LSE are within twice plain PyTorch's error of float64, planned or not, LSE or not."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        cases = list(generate.pairs())
        scaled = next((case.id for case in cases if case.attention.v_scale is not None), None)
        for case in cases:
            probes = case.feature == "all at once" or case.id == scaled
            yield replace(case, in_every_way=probes or not generate.quick)

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        batch = subject.batch(case.attention)
        judge = AttentionJudge(batch)
        subject.run_forward(batch)
        _hold(judge, batch.output, batch.lse)
        if not case.in_every_way:
            return ()
        findings, first = [], _copies(batch.output, batch.lse)
        for what, lse, way in _other_ways(subject, batch):
            batch.poison_outputs()
            way()
            try:
                if not all(map(same_bits, _copies(batch.output, lse), first)):
                    _hold(judge, batch.output, lse)
            except AssertionError as error:
                findings.append(f"{what}: {error}")
        return findings


def _copies(*tensors: Tensor | None) -> list[Tensor]:
    return [x.clone() for x in tensors if x is not None]


def _other_ways(
    subject: Subject, batch: PagedBatch
) -> Iterator[tuple[str, Tensor | None, Callable[[], None]]]:
    """As engines call: with a plan, whose bounds of lengths are tight, and without an LSE."""
    buffers = PersistentBatch.for_batches([batch], subject.device)
    plan = make_builder(subject, batch.case, buffers.limits).build(0, buffers.fill(batch))

    def planned(**changes: Any) -> None:
        with set_forward_context(context_of(subject, plan)):
            subject.run_forward(batch, **buffers.arguments, group=GROUP, **changes)

    yield "planned, without an LSE", None, partial(planned, lse=None)
    yield (
        "under the caller's settings of torch",
        batch.lse,
        partial(in_other_settings, subject.device, partial(subject.run_forward, batch)),
    )
    if batch.lse is not None:
        yield "planned, with an LSE", batch.lse, planned
        yield "without an LSE", None, partial(subject.run_forward, batch, lse=None)


def in_other_settings(device: torch.device, run: Callable[[], None]) -> None:
    """As of models that are loaded in half precision and run under autocast."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode(), torch.autocast(device.type, dtype=torch.bfloat16):
            run()
    finally:
        torch.set_default_dtype(before)


def _hold(judge: AttentionJudge, output: Tensor, lse: Tensor | None) -> None:
    judge.hold(output, lse)
    # Rounding to 16 bits makes the rule sharper row by row.
    if judge.batch.case.dtype is not torch.float32:
        judge.hold(output, None, by="row")
