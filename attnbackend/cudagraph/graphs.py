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


class _DeviceMemory:
    """Memory that its owner keeps, in the form in which libraries hand it to each other."""

    def __init__(self, owner: object, x: Tensor) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (x.numel() * x.element_size(),), "typestr": "|u1", "data": (x.data_ptr(), False), "version": 2,
        }  # fmt: skip


def _without_its_memory(x: Tensor, owner: object) -> Tensor:
    """The same tensor, not counted as a user of its memory: the graph that writes it keeps the pool.

    So the graphs captured after it put their outputs there too: one batch's logits are held, not all sizes'.
    """
    assert x.is_contiguous(), "a model's logits are a new tensor"
    raw = torch.as_tensor(_DeviceMemory(owner, x), device=x.device)
    return raw.view(x.dtype).view(x.shape)


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
        self._kept.append(_CUDAGraph(graph, _without_its_memory(output, graph)))
        del output
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
