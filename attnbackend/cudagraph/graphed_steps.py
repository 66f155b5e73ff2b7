"""Steps from graphs: captured once for each size, replayed for every batch that fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from attnbackend.cudagraph.capture_report import CaptureCost, CaptureReport
from attnbackend.cudagraph.dispatcher import Dispatch
from attnbackend.cudagraph.graphs import Graph, GraphLibrary, Work
from attnbackend.cudagraph.modes import CUDAGraphMode
from attnbackend.cudagraph.safety import LongLivedTensors, TensorRecord, check_unmoved, record_tensors

__all__ = ["GraphedSteps", "PreparedStep"]


@dataclass(frozen=True)
class PreparedStep:
    """A batch that is ready to run: what the graph would read, and the work itself."""

    tensors: Mapping[str, Tensor]
    """Every tensor that the graph reads and the step writes, by name: inputs, and plans that are in it."""
    work: Work
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """In which calls between pieces run."""
    lasts: bool = False
    """It serves every batch in the same tensors: nothing is planned anew."""


@dataclass
class _Captured:
    graph: Graph
    records: dict[str, TensorRecord]
    checked: PreparedStep | None = None
    """A step that lasts, and whose tensors are where the graph reads them."""
    num_replays: int = 0


@dataclass
class GraphedSteps:
    """Graphs by what they were captured for.

    Args:
        library: makes graphs.
        long_lived: weights and caches.
    """

    library: GraphLibrary
    long_lived: LongLivedTensors
    report: CaptureReport = field(default_factory=CaptureReport)
    _captured: dict[Dispatch, _Captured] = field(default_factory=dict)

    def capture(self, key: Dispatch, step: PreparedStep) -> None:
        """Captures one graph of the step's work.

        Raises:
            RuntimeError: the work cannot be captured; the message says for what.
        """
        started, in_pieces = time.perf_counter(), key.mode is CUDAGraphMode.PIECEWISE
        kinds = {(other.mode, other.descriptor.uniform) for other in self._captured}
        is_first = (key.mode, key.descriptor.uniform) not in kinds
        try:
            graph = self.library.capture(step.work, in_pieces=in_pieces, is_first=is_first)
        except Exception as error:
            raise RuntimeError(f"capturing the graph of {key.descriptor} failed: {error}") from error
        self._captured[key] = _Captured(graph, record_tensors(step.tensors))
        seconds = time.perf_counter() - started - graph.warm_up_seconds
        self.report.costs.append(CaptureCost(key, seconds, graph.num_bytes, graph.warm_up_seconds))

    @property
    def num_replays(self) -> dict[Dispatch, int]:
        """Of each graph that was replayed."""
        return {key: c.num_replays for key, c in self._captured.items() if c.num_replays}

    def __contains__(self, key: object) -> bool:
        return key in self._captured

    def replay(self, key: Dispatch, step: PreparedStep, *, poisoned: bool = False) -> Tensor:
        """Replays the graph of ``key`` on what the step's tensors hold now.

        Args:
            key: which graph.
            step: what it is replayed for.
            poisoned: with NaN in the memory that the graph is to write before it reads.

        Returns:
            The output of the work. It holds until the next replay, of whichever graph: they share memory.

        Raises:
            RuntimeError: a tensor is not where the graph reads it.
        """
        captured = self._captured[key]
        if step is not captured.checked:
            check_unmoved(key.descriptor, captured.records, step.tensors)
            captured.checked = step if step.lasts else None
        self.long_lived.check_some(key.descriptor)
        if poisoned:
            captured.graph.poison()
        if key.mode is CUDAGraphMode.PIECEWISE:
            with step.context():
                captured.graph.replay()
        else:
            captured.graph.replay()
        captured.num_replays += 1
        return captured.graph.output

    def repeat(self, key: Dispatch) -> Callable[[], None]:
        """Replays the whole graph of ``key`` for the step that it was replayed for last, which lasts."""
        captured, descriptor = self._captured[key], key.descriptor

        def run() -> None:
            self.long_lived.check_some(descriptor)
            captured.graph.replay()
            captured.num_replays += 1

        assert captured.checked is not None
        return run
