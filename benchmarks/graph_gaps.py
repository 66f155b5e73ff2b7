"""What lies on a GPU's time line between the graphs of consecutive steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from attnbackend.cudagraph.graphs import CapturedGraph

__all__ = ["GraphGaps", "graph_gaps"]


class GraphGaps:
    """The replays of a ``with`` block, timed by the device."""

    def __init__(self) -> None:
        self._edges: list[tuple[Any, Any]] = []

    def add(self, begin: Any, end: Any) -> None:
        self._edges.append((begin, end))

    def microseconds(self) -> float:
        """Median from the end of a replay to the begin of the next: sampling, copies, plans, and idling."""
        torch.cuda.synchronize()
        pairs = zip(self._edges, self._edges[1:], strict=False)
        return 1e3 * median(before[1].elapsed_time(after[0]) for before, after in pairs)


@contextmanager
def graph_gaps() -> Iterator[GraphGaps]:
    """Times every replay of a CUDA graph inside the block."""
    gaps, replay = GraphGaps(), CapturedGraph.replay

    def timed(graph: CapturedGraph) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay(graph)
        end.record()
        gaps.add(begin, end)

    CapturedGraph.replay = timed  # type: ignore[method-assign]
    try:
        yield gaps
    finally:
        CapturedGraph.replay = replay  # type: ignore[method-assign]
