"""Graphs that hold a step's work: CUDA's, and a stand-in that runs the same path on a CPU.

Work is captured whole, or in pieces: then what `graph_breaks` hands over, attention and cache writes, runs
between the pieces, at each replay anew.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from attnbackend.cudagraph.aliases import alias_of, memory_at
from attnbackend.forward_context import get_forward_context, set_forward_context
from attnbackend.graph_breaks import Breaks, set_breaks

__all__ = ["CUDAGraphs", "CUDAPieces", "Graph", "GraphLibrary", "RecordedGraphs"]

Work = Callable[[], Tensor]
_WARM_UPS = 2
"""Runs before the first capture of a kind: the first lets lazy libraries finish their work, the second sees
it done. Before the others one is enough."""


class Graph(Protocol):
    """Captured work. ``output`` holds until the next replay of any graph of the library."""

    output: Tensor
    num_bytes: int
    """Memory that the capture added to what the library holds."""
    warm_up_seconds: float
    """Of the runs before the capture: compilation, loading, tuning."""

    def replay(self) -> None: ...

    def poison(self) -> None:
        """Fills the graph's memory, the output's too, with NaN."""


class GraphLibrary(Protocol):
    """Where graphs come from.

    ``is_first`` says that no work of this kind was captured before.
    """

    def capture(self, work: Work, *, in_pieces: bool, is_first: bool) -> Graph: ...


class CapturedGraph:
    """Graphs, and the calls between them. The output's memory is the pool's: later captures use it too."""

    def __init__(
        self, parts: Sequence[Callable[[], object]], output: Tensor, num_bytes: int, pool: tuple[int, int],
        warm_up_seconds: float,
    ) -> None:  # fmt: skip
        self.output, self.num_bytes = alias_of(output), num_bytes
        self.warm_up_seconds = warm_up_seconds
        self._parts, self._pool = parts, pool

    def replay(self) -> None:
        for part in self._parts:
            part()

    def poison(self) -> None:
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) == self._pool:
                memory_at(segment["address"], segment["total_size"], self.output.device).fill_(0xFF)


class CUDAGraphs:
    """CUDA graphs that share one memory pool; capture the largest first, so that the others reuse it.

    Every graph is kept: the pool of a graph that is gone cannot be captured into.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._kept: list[torch.cuda.CUDAGraph] = []

    def capture(self, work: Work, *, in_pieces: bool, is_first: bool) -> Graph:
        """Runs ``work`` on a stream of its own, then captures it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            warm_up_seconds = _warm_up(work, is_first)
            before = torch.cuda.memory_reserved()
            parts = CUDAPieces(self._begin, self._end)
            with parts, set_breaks(parts if in_pieces else None):
                output = work()
            num_bytes = torch.cuda.memory_reserved() - before
        torch.cuda.current_stream().wait_stream(self._stream)
        return CapturedGraph(parts.parts, output, num_bytes, self._pool, warm_up_seconds)

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # Nothing between two calls.
            graph.capture_end()
        self._kept.append(graph)


class CUDAPieces(Breaks):
    """One capture, ended before each call between pieces and begun again behind it."""

    def __init__(
        self, begin: Callable[[], torch.cuda.CUDAGraph], end: Callable[[torch.cuda.CUDAGraph], None]
    ) -> None:
        self.parts: list[Callable[[], object]] = []
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        self._graph = self._begin()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._finish()
            return
        with suppress(
            RuntimeError
        ):  # A capture that failed cannot be ended; its own error is the one to see.
            self._graph.capture_end()

    def _finish(self) -> None:
        self._end(self._graph)
        self.parts.append(self._graph.replay)

    def between(self, run: Callable[[Any], None], arguments: Any) -> None:
        self._finish()
        # Without ownership, or what lies between pieces would stay apart in all layers of all sizes.
        kept = _like(arguments, map(alias_of, arguments))
        run(kept)
        self.parts.append(lambda: run(kept))
        self._graph = self._begin()


def _warm_up(work: Work, is_first: bool) -> float:
    """The seconds that it took."""
    started = time.perf_counter()
    for _ in range(_WARM_UPS if is_first else 1):
        work()
    if is_first:
        _free_memory()
    return time.perf_counter() - started


def _free_memory() -> None:
    """Gives back what warm-ups took: inside a capture the allocator cannot."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


def _like(arguments: Any, values: Iterable[Any]) -> Any:
    """A tuple, named or not, of the type of ``arguments``."""
    return getattr(type(arguments), "_make", type(arguments))(values)


class _RecordedGraph:
    num_bytes, warm_up_seconds = 0, 0.0

    def __init__(self, work: Work, in_pieces: bool) -> None:
        self._calls: list[tuple[Callable[[Any], None], Any]] | None = [] if in_pieces else None
        self._work = work
        self.output = self._run(_Recording(self._calls) if self._calls is not None else None).clone()

    def replay(self) -> None:
        self.output.copy_(self._run(_Replaying(self._calls) if self._calls is not None else None))

    def poison(self) -> None:
        self.output.fill_(torch.nan)

    def _run(self, breaks: Breaks | None) -> Tensor:
        with set_breaks(breaks):
            return self._work()


class _Recording(Breaks):
    def __init__(self, calls: list[tuple[Callable[[Any], None], Any]]) -> None:
        self._calls = calls

    def between(self, run: Callable[[Any], None], arguments: Any) -> None:
        run(arguments)
        self._calls.append((run, arguments))


class _Replaying(Breaks):
    """Gives the pieces, run again, what calls between graphs leave in the memory that was captured.

    The calls run in the context of the step that is replayed, the pieces in that of the capture.
    """

    def __init__(self, calls: list[tuple[Callable[[Any], None], Any]]) -> None:
        self._calls = iter(calls)
        self._context = get_forward_context()

    def between(self, run: Callable[[Any], None], arguments: Any) -> None:
        run, captured = next(self._calls)
        moved = [
            (then, now)
            for then, now in zip(captured, arguments, strict=True)
            if isinstance(now, Tensor) and then.data_ptr() != now.data_ptr()
        ]
        for then, now in moved:
            then.copy_(now)
        with nullcontext() if self._context is None else set_forward_context(self._context):
            run(captured)
        for then, now in moved:
            now.copy_(then)


class RecordedGraphs:
    """Runs what was captured again at each replay, over the captured tensors and with the captured plan.

    What a CUDA graph would not see, it does not see: another tensor in place of a captured one, another
    plan, a changed number on the host.
    """

    def capture(self, work: Work, *, in_pieces: bool = False, is_first: bool = True) -> Graph:
        return _RecordedGraph(work, in_pieces)
