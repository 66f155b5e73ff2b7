"""Graphs that hold a step's work: CUDA's, and a stand-in that runs the same path on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CUDAGraphs", "Graph", "GraphLibrary", "RecordedGraphs"]

Work = Callable[[], Tensor]
_WARM_UPS = 2
"""Runs before a capture: the first lets lazy libraries finish their work, the second sees it done."""


class Graph(Protocol):
    """Captured work. ``output`` is written anew by each replay, at one address."""

    output: Tensor

    def replay(self) -> None: ...


class GraphLibrary(Protocol):
    """Where graphs come from."""

    def capture(self, work: Work) -> Graph: ...


class _CUDAGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self.output = output
        self.replay = graph.replay
        self._graph = graph


class CUDAGraphs:
    """CUDA graphs that share one memory pool; capture the largest first, so that the others reuse it.

    Every graph is kept: the pool of a graph that is gone cannot be captured into.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._kept: list[_CUDAGraph] = []

    def capture(self, work: Work) -> Graph:
        """Runs ``work`` a few times on a stream of its own, then captures it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = work()
        self._kept.append(_CUDAGraph(graph, output))
        return self._kept[-1]


class _RecordedGraph:
    def __init__(self, work: Work) -> None:
        self.output = work().clone()
        self._work = work

    def replay(self) -> None:
        self.output.copy_(self._work())


class RecordedGraphs:
    """Runs what was captured again at each replay, over the captured tensors and with the captured plan.

    What a CUDA graph would not see, it does not see: another tensor in place of a captured one, another
    plan, a changed number on the host.
    """

    def capture(self, work: Work) -> Graph:
        return _RecordedGraph(work)
