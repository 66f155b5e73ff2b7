"""What capturing graphs took, and a progress bar while it goes on."""

from __future__ import annotations

import gc
import importlib.util
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from attnbackend.cudagraph.dispatcher import Dispatch

__all__ = ["CaptureCost", "CaptureReport", "captures", "with_progress"]

T = TypeVar("T")


@dataclass(frozen=True)
class CaptureCost:
    """What one graph took."""

    key: Dispatch
    seconds: float
    """Without the warm-up."""
    num_bytes: int
    """By which the memory grew that the allocator holds for graphs."""
    warm_up_seconds: float
    """Of a run before the capture, in which kernels are compiled, loaded and tuned."""

    def __str__(self) -> str:
        kind = "decode" if self.key.descriptor.uniform else "mixed"
        return (
            f"{self.key.mode.name:9} {kind:6} {self.key.descriptor.num_tokens:6} tokens "
            f"{self.seconds:7.3f} s {self.num_bytes / 2**20:9.1f} MiB, warm-up {self.warm_up_seconds:7.3f} s"
        )


@dataclass
class CaptureReport:
    """All graphs that were captured before serving. ``print`` it for a line each."""

    costs: list[CaptureCost] = field(default_factory=list)
    seconds: float = 0.0
    """Without the warm-ups."""
    num_bytes: int = 0
    """By which the device's free memory shrank, the graphs' own memory with the driver included."""

    @property
    def warm_up_seconds(self) -> float:
        return sum(cost.warm_up_seconds for cost in self.costs)

    @property
    def total(self) -> str:
        return (
            f"{len(self.costs)} graphs in {self.seconds:.1f} s, {self.num_bytes / 2**30:.2f} GiB, after "
            f"{self.warm_up_seconds:.1f} s of warm-ups"
        )

    def __str__(self) -> str:
        return "\n".join([*map(str, self.costs), self.total])


@contextmanager
def captures(report: CaptureReport) -> Iterator[None]:
    """Measures what the block captures. The garbage collector rests meanwhile."""
    free, collects = _free_bytes(), gc.isenabled()
    started = time.perf_counter() - report.warm_up_seconds
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
    report.num_bytes += free - _free_bytes()
    report.seconds += time.perf_counter() - report.warm_up_seconds - started


def _free_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def with_progress(what: str, items: Sequence[T]) -> Iterable[T]:
    """The items, with a bar on a terminal where ``rich`` is installed."""
    if not items or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, what, console=Console(stderr=True), transient=True)
