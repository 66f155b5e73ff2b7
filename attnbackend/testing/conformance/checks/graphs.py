"""CUDA graphs: captured once, replayed on other contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbackend.forward_context import set_forward_context
from attnbackend.testing.batches import PagedBatch
from attnbackend.testing.cases import AttentionCase
from attnbackend.testing.conformance.base_subject import AnyBatch, BaseSubject, Batch, Case
from attnbackend.testing.conformance.batch_shapes import LARGEST
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.checks.compiled import differences
from attnbackend.testing.conformance.checks.plan import moved
from attnbackend.testing.conformance.exchange import put_in
from attnbackend.testing.conformance.kinds import resized
from attnbackend.testing.conformance.outcome import Skipped
from attnbackend.testing.conformance.planned import (
    GROUP,
    PersistentBatch,
    context_of,
    graph_support,
    make_builder,
    plan_tensors,
)
from attnbackend.testing.conformance.subject import Subject
from attnbackend.testing.paging import PagedCase
from attnbackend.types import AttentionCGSupport

__all__ = [
    "BATCHES_IN_GRAPHS",
    "Graphs",
    "Recorder",
    "Run",
    "capture_and_replay",
    "claimed_level",
    "recorder",
    "spare_blocks",
]

Run = Callable[[], None]
Recorder = Callable[[Run], Run]

BATCHES_IN_GRAPHS: dict[AttentionCGSupport, tuple[dict[str, Any], dict[str, Any]]] = {
    AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE: (
        {"query_lens": (1,) * 5, "context_lens": (70, 3, 33, 0, 50)},
        {"query_lens": (1,) * 5, "context_lens": (11, 99, -1, -1, -1)},
    ),
    AttentionCGSupport.UNIFORM_BATCH: (
        {"query_lens": (4,) * 4, "context_lens": (60, 3, 33, 20)},
        {"query_lens": (4,) * 4, "context_lens": (7, 95, -4, -4)},
    ),
    AttentionCGSupport.ALWAYS: (
        LARGEST,
        {"query_lens": (3, 1, 7), "context_lens": (30, 98, 0), "num_padded_rows": 2, "num_padded_tokens": 13},
    ),
}
"""Level -> the batch that is captured and one of as many tokens, longer and padded, that is replayed."""


class Graphs(Check):
    name = "graphs"
    proves = "A CUDA graph captured at the claimed level gives eager's bits when replayed on other contents."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        features = ("plain", "everything", "no_lse", "chunks", "ranges", "encoder_only", "cross")
        for feature in (*features, generate.scaled_cache):
            for case in generate.case(feature, "decode"):
                yield replace(case, id=f"{feature}-captured")

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        record = recorder(subject.device)
        level = claimed_level(subject, case.attention)
        captured, replayed = (_sized(subject, case.attention, x) for x in BATCHES_IN_GRAPHS[level])
        return list(capture_and_replay(subject, "forward", record, captured, replayed))


def claimed_level(subject: BaseSubject[Case, Any], case: Case) -> AttentionCGSupport:
    """Raises `Skipped` where the builder claims no graph support."""
    level = graph_support(subject, case)
    if level is AttentionCGSupport.NEVER:
        raise Skipped(f"the builder of {subject.name} claims no graph support")
    return level


def _sized(subject: Subject, case: AttentionCase, lengths: dict[str, Any]) -> PagedBatch:
    case = resized(case, lengths)
    return subject.batch(replace(case, spare_blocks=spare_blocks(case)))


def spare_blocks(case: PagedCase) -> int:
    """So many that all batches of a case have caches of one size: contents can be exchanged."""
    return -(-200 // case.block_size) + 40 - sum(-(-n // case.block_size) for n in case.seq_lens)


def capture_and_replay(
    subject: BaseSubject[Any, Batch], role: str, record: Recorder, captured: Batch, replayed: Batch,
    exactly: bool = True,
) -> Iterator[str]:  # fmt: skip
    """Captures one batch; its replays on both must equal eager calls.

    Args:
        exactly: bit for bit; False: where bits differ, the replay is held to float64.
    """
    buffers = PersistentBatch.for_batches([captured, replayed], subject.device)
    builder = make_builder(subject, captured.case, buffers.limits)
    # A runner tells a capture the longest that any step may be.
    common = buffers.fill(captured).replace(max_seq_len=buffers.limits.max_model_len)
    plan = builder.build_for_cudagraph_capture(common)
    planned = dict(plan_tensors(plan))
    run = partial(subject.run, role, captured, **buffers.arguments, group=GROUP)
    with set_forward_context(context_of(subject, plan)):
        replay = record(run)
    for what, contents in (("other", replayed), ("the captured", subject.batch(captured.case))):
        plan = builder.build(0, buffers.fill(contents))
        yield from moved(planned, dict(plan_tensors(plan)), "replayed")
        batch = put_in(captured, contents, keep=tuple(buffers.arguments))
        with set_forward_context(context_of(subject, plan)):
            ways = [_after(way, batch, subject.results(role, captured)) for way in (replay, run)]
        where = f"{subject.called(role)}%s of the replay on {what} contents"
        yield from _unequal(subject, role, batch, where, ways, exactly)


def _after(run: Run, batch: AnyBatch, results: dict[str, Tensor]) -> dict[str, Tensor]:
    batch.poison_outputs()
    run()
    return {name: result.clone() for name, result in results.items()}


def _unequal(
    subject: BaseSubject[Any, Batch], role: str, batch: Batch, where: str,
    ways: Sequence[dict[str, Tensor]], exactly: bool,
) -> Iterator[str]:  # fmt: skip
    """Where the replay's results, the first of ``ways``, differ from eager's."""
    replayed, eager = ways
    unequal = list(differences(where, {name: (x, eager[name]) for name, x in replayed.items()}))
    if exactly or not unequal:
        yield from unequal
        return
    for name, result in subject.results(role, batch).items():
        result.copy_(replayed[name])
    subject.judge(role, batch)


def recorder(device: torch.device) -> Recorder:
    """Captures what a function does; what it gives back does that again.

    Raises:
        Skipped: the device has no CUDA graphs.
    """
    if device.type != "cuda":
        raise Skipped(f"CUDA graphs need a CUDA device; this is {device.type}")
    return _capture


def _capture(run: Run) -> Run:
    """After two runs on a side stream, as torch's documentation of graphs asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
