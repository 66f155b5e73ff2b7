"""Waiting for the device where a graph must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from attnbackend.forward_context import set_forward_context
from attnbackend.ops.generate import has_own_writer
from attnbackend.testing.conformance.base_subject import AnyBatch, BaseSubject, Batch, OpCall
from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED, PADDED
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.kept_memory import KeptMemory
from attnbackend.testing.conformance.kinds import resized
from attnbackend.testing.conformance.outcome import Skipped
from attnbackend.testing.conformance.planned import (
    GROUP,
    PersistentBatch,
    context_of,
    graph_support,
    make_builder,
)
from attnbackend.testing.conformance.subject import Subject
from attnbackend.testing.conformance.sync_watch import watched
from attnbackend.testing.paging import PagedCase
from attnbackend.types import AttentionCGSupport

__all__ = ["SMALLER", "HostSync", "blocks_left", "unfit_for_graphs"]


class HostSync(Check):
    name = "host_sync"
    proves = (
        "Where the builder claims graph support, planned ops never wait for the device, and no call gives up "
        "memory that an earlier one keeps."
    )

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        yield from generate.some(("plain", DECODE), ("everything", DECODE), ("everything", MIXED))
        yield from generate.some((generate.scaled_cache, DECODE), ("no_lse", PADDED))

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        level = graph_support(subject, case.attention)
        if level is AttentionCGSupport.NEVER:
            raise Skipped(f"the builder of {subject.name} claims no graph support")
        if level < AttentionCGSupport.ALWAYS and not case.id.endswith(DECODE):
            raise Skipped(f"the builder claims graph support for {level.name} only")
        batch, smaller = subject.batch(case.attention), resized(case.attention, SMALLER)
        smaller = replace(smaller, spare_blocks=blocks_left(smaller, batch))
        return list(unfit_for_graphs(subject, ("forward",), batch, subject.batch(smaller)))


SMALLER: dict[str, Any] = {
    "query_lens": (1,), "context_lens": (3,), "num_padded_rows": 0, "num_padded_tokens": 0,
}  # fmt: skip
"""Lengths of a batch that is none of the cases'."""


def blocks_left(case: PagedCase, batch: AnyBatch) -> int:
    """Spare blocks with which the case's cache is as large as the batch's: both run on one implementation."""
    return batch.kv_cache.shape[0] - 1 - sum(-(-n // case.block_size) for n in case.seq_lens)


def unfit_for_graphs(
    subject: BaseSubject[Any, Batch], roles: tuple[str, ...], batch: Batch, smaller: Batch
) -> Iterator[str]:
    """Where planned ops of these roles wait for the device, or give memory up, and where the writer waits."""
    buffers = PersistentBatch.for_batches([batch, smaller], subject.device)
    builder = make_builder(subject, batch.case, buffers.limits)
    for role in roles:
        call = subject.read_call(role, batch).with_given(**buffers.arguments, group=GROUP)
        plan = builder.build(0, buffers.fill(batch))
        with set_forward_context(context_of(subject, plan)):
            with KeptMemory() as kept:
                call.directly(subject.name)
            with watched(subject.device) as seen:
                call.directly(subject.name)
        yield from (f"{role}: {where}" for where in seen)
        with set_forward_context(context_of(subject, builder.build(0, buffers.fill(smaller)))):
            subject.run(role, smaller, **buffers.arguments, group=GROUP)
        yield from (f"{role}: a call of one token gives up {size} {_FREED}" for size in kept.given_up)
    yield from _waits_of_the_writer(subject, subject.write_call(batch))


_FREED = (
    "bytes that an earlier call kept, and a graph captured then would read what is freed; allocate the "
    "largest once"
)


def _waits_of_the_writer(subject: BaseSubject[Any, Any], write: OpCall) -> Iterator[str]:
    with watched(subject.device) as seen:
        write.directly(subject.name)
    writer = write.role.suffix
    own = "" if has_own_writer(subject.backend) else f" (the default writer; define {writer})"
    yield from (f"{writer}{own}: {where}" for where in seen)
