"""Waiting for the device where a graph must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnbackend.forward_context import set_forward_context
from attnbackend.ops.bind import run_attention, run_update
from attnbackend.ops.calls import AttentionCall, KVCacheUpdateCall
from attnbackend.ops.generate import has_own_writer
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

__all__ = ["HostSync"]


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
        batch = subject.batch(case.attention)
        buffers = PersistentBatch.for_batches([batch], subject.device)
        plan = make_builder(subject, case.attention, buffers.limits).build(0, buffers.fill(batch))
        args, kwargs = subject.forward_args(batch, **buffers.arguments, group=GROUP)
        with set_forward_context(context_of(subject, plan)):
            subject.forward(*args, **kwargs)
            with watched(subject.device) as seen:
                run_attention(subject.name, AttentionCall(*args, **kwargs))
        findings = [f"forward: {where}" for where in seen]
        args, kwargs = subject.write_args(batch)
        with watched(subject.device) as seen:
            run_update(subject.name, KVCacheUpdateCall(*args, **kwargs))
        own = "" if has_own_writer(subject.backend) else " (the default writer; define kv_cache_update)"
        return [*findings, *(f"kv_cache_update{own}: {where}" for where in seen)]
