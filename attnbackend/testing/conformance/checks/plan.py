"""Plans are caches: with one or without, an op gives the same answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from attnbackend.forward_context import set_forward_context
from attnbackend.metadata import AttentionMetadata
from attnbackend.testing.batches import PagedBatch
from attnbackend.testing.conformance.batch_shapes import BATCHES, LARGEST, MIXED
from attnbackend.testing.conformance.bits import differing, same_bits
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.kinds import resized
from attnbackend.testing.conformance.planned import (
    GROUP,
    PersistentBatch,
    context_of,
    graph_support,
    make_builder,
    plan_tensors,
)
from attnbackend.testing.conformance.subject import Subject
from attnbackend.types import AttentionCGSupport

__all__ = ["Plan", "moved"]


class Plan(Check):
    name = "plan"
    proves = (
        "A planned call equals one that plans for itself, bit for bit; plans for graphs keep their buffers."
    )

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        for batch in BATCHES:
            if batch != MIXED:
                yield from generate.case("plain", batch)
        yield from generate.some(("everything", "decode"), ("everything", "chunked_prefill"))
        yield from generate.case(generate.scaled_cache, "decode")
        yield from generate.some(("chunks", "decode"), ("encoder_only", "prefill"), ("cross", "decode"))

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        small = subject.batch(case.attention)
        padding = {"num_padded_rows": 0, "num_padded_tokens": 0}
        large = subject.batch(resized(replace(case.attention, probe=None), {**LARGEST, **padding}))
        buffers = PersistentBatch.for_batches([large, small], subject.device)
        builder = make_builder(subject, case.attention, buffers.limits)
        level = graph_support(subject, case.attention)
        # A graph of mixed batches says its own bound of query lengths, whatever a batch's is.
        longest = max(large.case.query_lens) if level is AttentionCGSupport.ALWAYS else 0
        findings: list[str] = []
        before: dict[str, Tensor] = {}
        for what, batch in (("first", small), ("large", large), ("small", small), ("large again", large)):
            common = buffers.fill(batch)
            plan = builder.build(0, common.replace(max_query_len=max(longest, common.max_query_len)))
            findings += _unplanned_differs(subject, batch, buffers, plan, what)
            if level > AttentionCGSupport.NEVER:
                now = dict(plan_tensors(plan))
                findings += moved(before or now, now, what)
                before = now
        return findings


def _unplanned_differs(
    subject: Subject, batch: PagedBatch, buffers: PersistentBatch, plan: AttentionMetadata, what: str
) -> Iterator[str]:
    results: list[list[Tensor]] = []
    for context in (None, context_of(subject, plan)):
        batch.poison_outputs()
        if context is None:
            subject.run_forward(batch, **buffers.arguments)
        else:
            with set_forward_context(context):
                subject.run_forward(batch, **buffers.arguments, group=GROUP)
        results.append([x.clone() for x in (batch.output, batch.lse) if x is not None])
    for name, alone, planned in zip(("output", "LSE"), *results, strict=False):
        if not same_bits(alone, planned):
            yield f"{name} of the {what} batch with a plan, against without: {differing(planned, alone)}"


def moved(before: dict[str, Tensor], now: dict[str, Tensor], what: str) -> Iterator[str]:
    """A captured graph reads where the first plan's tensors were."""
    for name in before.keys() | now.keys():
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            yield f"{name} is in the plans of some batches only, not in all (the {what} one)"
        elif (old.data_ptr(), old.shape, old.stride()) != (new.data_ptr(), new.shape, new.stride()):
            yield (
                f"{name} of the {what} batch has another address, shape or stride than before: "
                f"{tuple(old.shape)} -> {tuple(new.shape)}; write into a buffer that the builder keeps"
            )
