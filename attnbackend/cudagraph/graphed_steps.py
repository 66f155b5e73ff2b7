"""Steps from graphs: captured once for each size, replayed for every batch that fits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnbackend.cudagraph.dispatcher import Dispatch
from attnbackend.cudagraph.graphs import Graph, GraphLibrary, Work
from attnbackend.cudagraph.safety import LongLivedTensors, TensorRecord, check_unmoved, record_tensors

__all__ = ["CaptureCost", "GraphedSteps", "PreparedStep"]


@dataclass(frozen=True)
class PreparedStep:
    """A batch that is ready to run: what the graph would read, and the work itself."""

    tensors: Mapping[str, Tensor]
    """Every tensor that changes its contents from step to step, by name: inputs and plans."""
    work: Work


@dataclass(frozen=True)
class CaptureCost:
    """What one graph took."""

    key: Dispatch
    seconds: float
    bytes: int


@dataclass(frozen=True)
class _Captured:
    graph: Graph
    records: dict[str, TensorRecord]


@dataclass
class GraphedSteps:
    """Graphs by what they were captured for.

    Args:
        library: makes graphs.
        long_lived: weights and caches.
    """

    library: GraphLibrary
    long_lived: LongLivedTensors
    costs: list[CaptureCost] = field(default_factory=list)
    num_replays: dict[Dispatch, int] = field(default_factory=dict)
    _captured: dict[Dispatch, _Captured] = field(default_factory=dict)

    def capture(self, key: Dispatch, step: PreparedStep) -> None:
        """Captures one graph of the step's work.

        Raises:
            RuntimeError: the work cannot be captured; the message says for what.
        """
        started, before = time.perf_counter(), _memory_in_use()
        try:
            graph = self.library.capture(step.work)
        except Exception as error:
            raise RuntimeError(f"capturing the graph of {key.descriptor} failed: {error}") from error
        self._captured[key] = _Captured(graph, record_tensors(step.tensors))
        self.costs.append(CaptureCost(key, time.perf_counter() - started, _memory_in_use() - before))

    def __contains__(self, key: object) -> bool:
        return key in self._captured

    def replay(self, key: Dispatch, tensors: Mapping[str, Tensor]) -> Tensor:
        """Replays the graph of ``key`` on what ``tensors`` hold now.

        Returns:
            The output of the work, at an address that the next replay writes to again.

        Raises:
            RuntimeError: a tensor is not where the graph reads it.
        """
        captured = self._captured[key]
        check_unmoved(key.descriptor, captured.records, tensors)
        self.long_lived.check_some(key.descriptor)
        captured.graph.replay()
        self.num_replays[key] = self.num_replays.get(key, 0) + 1
        return captured.graph.output


def _memory_in_use() -> int:
    """What the device's allocator holds and cannot give back: graphs keep theirs."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
