"""Waiting for the device where a graph must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from attnbackend.forward_context import set_forward_context
from attnbackend.ops.generate import has_own_writer
from attnbackend.testing.conformance.base_subject import BaseSubject, Batch
from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED, PADDED
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
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
from attnbackend.types import AttentionCGSupport

__all__ = ["HostSync", "waits"]


class HostSync(Check):
    name = "host_sync"
    proves = "Where the builder claims graph support, planned ops never wait for the device."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        yield from generate.some(("plain", DECODE), ("everything", DECODE), ("everything", MIXED))
        fp8 = next((n for n in generate.features if "float32_cache_fp8" in n), "hnd")
        yield from generate.some((fp8, DECODE), ("no_lse", PADDED))

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        level = graph_support(subject, case.attention)
        if level is AttentionCGSupport.NEVER:
            raise Skipped(f"the builder of {subject.name} claims no graph support")
        if level < AttentionCGSupport.ALWAYS and not case.id.endswith(DECODE):
            raise Skipped(f"the builder claims graph support for {level.name} only")
        return list(waits(subject, ("forward",), subject.batch(case.attention)))


def waits(subject: BaseSubject[Any, Batch], roles: tuple[str, ...], batch: Batch) -> Iterator[str]:
    """Where planned ops of these roles wait for the device, and where the writer does."""
    buffers = PersistentBatch.for_batches([batch], subject.device)
    plan = make_builder(subject, batch.case, buffers.limits).build(0, buffers.fill(batch))
    for role in roles:
        call = subject.read_call(role, batch).with_given(**buffers.arguments, group=GROUP)
        with set_forward_context(context_of(subject, plan)):
            call()
            with watched(subject.device) as seen:
                call.directly(subject.name)
        yield from (f"{role}: {where}" for where in seen)
    with watched(subject.device) as seen:
        subject.write_call(batch).directly(subject.name)
    own = "" if has_own_writer(subject.backend) else " (the default writer; define kv_cache_update)"
    yield from (f"kv_cache_update{own}: {where}" for where in seen)
