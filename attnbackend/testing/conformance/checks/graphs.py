"""CUDA graphs: captured once, replayed on other contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbackend.forward_context import set_forward_context
from attnbackend.testing.batches import PagedBatch
from attnbackend.testing.cases import AttentionCase
from attnbackend.testing.conformance.batch_shapes import LARGEST
from attnbackend.testing.conformance.bits import differing, same_bits
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
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
from attnbackend.types import AttentionCGSupport

__all__ = ["Graphs"]

_BATCHES: dict[AttentionCGSupport, tuple[dict[str, Any], dict[str, Any]]] = {
    AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE: (
        {"query_lens": (1,) * 5, "context_lens": (70, 3, 33, 0, 50)},
        {"query_lens": (1,) * 5, "context_lens": (11, 69, -1, -1, -1)},
    ),
    AttentionCGSupport.UNIFORM_BATCH: (
        {"query_lens": (4,) * 4, "context_lens": (60, 3, 33, 20)},
        {"query_lens": (4,) * 4, "context_lens": (7, 59, -4, -4)},
    ),
    AttentionCGSupport.ALWAYS: (
        LARGEST,
        {"query_lens": (3, 1, 7), "context_lens": (30, 69, 0), "num_padded_rows": 2, "num_padded_tokens": 13},
    ),
}
"""Level -> the batch that is captured and one of the same size that is replayed."""


class Graphs(Check):
    name = "graphs"
    proves = "A CUDA graph captured at the claimed level gives eager's bits when replayed on other contents."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        for feature in ("plain", "everything", "no_lse", "chunks", "ranges", "encoder_only", "cross"):
            for case in generate.case(feature, "decode"):
                yield replace(case, id=f"{feature}-captured")

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        if subject.device.type != "cuda":
            raise Skipped(f"CUDA graphs need a CUDA device; this is {subject.device.type}")
        level = graph_support(subject, case.attention)
        if level is AttentionCGSupport.NEVER:
            raise Skipped(f"the builder of {subject.name} claims no graph support")
        captured, replayed = (_sized(subject, case.attention, lengths) for lengths in _BATCHES[level])
        return _capture_and_replay(subject, captured, replayed)


def _sized(subject: Subject, case: AttentionCase, lengths: dict[str, Any]) -> PagedBatch:
    """All batches of a case with caches of one size, so that contents can be exchanged."""
    blocks = sum(-(-n // case.block_size) for n in (200,))
    case = resized(case, lengths)
    used = sum(-(-n // case.block_size) for n in case.seq_lens)
    return subject.batch(replace(case, spare_blocks=blocks + 40 - used))


def _capture_and_replay(subject: Subject, captured: PagedBatch, replayed: PagedBatch) -> Sequence[str]:
    buffers = PersistentBatch.for_batches([captured, replayed], subject.device)
    builder = make_builder(subject, captured.case, buffers.limits)
    static = captured
    plan = builder.build_for_cudagraph_capture(buffers.fill(captured))
    with set_forward_context(context_of(subject, plan)):
        graph = _capture(subject, static, buffers)
    findings: list[str] = []
    for what, batch in (("other contents", replayed), ("the captured contents", _copy(subject, captured))):
        plan = builder.build(0, buffers.fill(batch))
        _exchange(static, batch)
        static.poison_outputs()
        graph.replay()
        got = [x.clone() for x in (static.output, static.lse) if x is not None]
        static.poison_outputs()
        with set_forward_context(context_of(subject, plan)):
            subject.run_forward(static, **buffers.arguments, group=GROUP)
        wanted = [x.clone() for x in (static.output, static.lse) if x is not None]
        findings += _unequal(what, got, wanted)
    return findings


def _copy(subject: Subject, batch: PagedBatch) -> PagedBatch:
    return subject.batch(batch.case)


def _capture(subject: Subject, batch: PagedBatch, buffers: PersistentBatch) -> torch.cuda.CUDAGraph:
    """After two runs on a side stream, as torch's documentation of graphs asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            subject.run_forward(batch, **buffers.arguments, group=GROUP)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        subject.run_forward(batch, **buffers.arguments, group=GROUP)
    return graph


def _exchange(static: PagedBatch, batch: PagedBatch) -> None:
    for name in ("query", "key", "value", "bidirectional_ranges"):
        if getattr(static, name) is not None:
            getattr(static, name).copy_(getattr(batch, name))
    static.kv_buffer.view(torch.uint8).copy_(batch.kv_buffer.view(torch.uint8))


def _unequal(what: str, got: list[Tensor], wanted: list[Tensor]) -> Iterator[str]:
    for name, a, b in zip(("output", "LSE"), got, wanted, strict=False):
        if not same_bits(a, b):
            yield f"{name} of the replay on {what} differs from eager's: {differing(a, b)}"
