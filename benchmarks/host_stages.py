"""What the host does in a decode step, part by part, and what of it is waiting for the device.

The host's time between replays is what a step takes it without launching the graph and without waiting: if it
is shorter than the graph runs, the device never waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from attnbackend import Engine
from attnbackend.cudagraph.graphs import CapturedGraph
from attnbackend.runtime import EngineCore
from attnbackend.runtime.input_batch import InputBatch
from attnbackend.runtime.model_runner import ModelRunner
from attnbackend.runtime.request import StepOutput
from attnbackend.runtime.scheduler import Scheduler
from attnbackend.runtime.started_step import SampledTokens, StartedStep

__all__ = ["HostStages", "host_stages"]

_LAUNCH, _WAIT, _REST = "launch of the graph", "waiting for the device", "the rest"


@dataclass
class HostStages:
    """Seconds of each stage, step by step; time in a stage inside another counts for the inner one."""

    engine: Engine
    steps: list[dict[str, float]] = field(default_factory=list)
    _inner: list[float] = field(default_factory=lambda: [0.0])

    def step(self) -> list[StepOutput]:
        """A step of the engine, timed."""
        self.steps.append({})
        outputs: list[StepOutput] = self.timed(_REST, self.engine.step)()
        return outputs

    def timed(self, stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return work(*args, **options)
            finally:
                elapsed = time.perf_counter() - started
                now = self.steps[-1]
                now[stage] = now.get(stage, 0.0) + elapsed - self._inner.pop()
                self._inner[-1] += elapsed

        return run

    def microseconds(self) -> dict[str, float]:
        """The median of each stage, of their sum without launch and waiting, and of the step."""
        between = [sum(step.values()) - step.get(_LAUNCH, 0.0) - step.get(_WAIT, 0.0) for step in self.steps]
        found = {"between replays": between, "step": [sum(step.values()) for step in self.steps]}
        for stage in {stage for step in self.steps for stage in step}:
            found[stage] = [step.get(stage, 0.0) for step in self.steps]
        return {stage: round(1e6 * median(seconds), 1) for stage, seconds in found.items()}


_EDGES: list[tuple[Any, str, str]] = [
    (CapturedGraph, "replay", _LAUNCH), (StartedStep, "wait", _WAIT),
]  # fmt: skip
_PARTS: list[tuple[Any, str, str]] = [
    (Scheduler, "schedule", "schedule"), (InputBatch, "prepare", "input batch"),
    (ModelRunner, "_context", "plans"), (ModelRunner, "execute", "checks of the replay"),
    (SampledTokens, "sample", "sampling"), (SampledTokens, "start", "copy of the tokens"),
    (EngineCore, "_take_in", "outputs"),
]  # fmt: skip


@contextmanager
def host_stages(engine: Engine, in_parts: bool = True) -> Iterator[HostStages]:
    """Times the stages of the steps that are made with ``step`` of what this gives.

    Args:
        engine: whose steps.
        in_parts: what lies between replays part by part, which takes time itself.
    """
    stages = HostStages(engine)
    places = [*_EDGES, *(_PARTS if in_parts else ())]
    before = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, stage), work in zip(places, before, strict=True):
        setattr(owner, name, stages.timed(stage, work))
    try:
        yield stages
    finally:
        for (owner, name, _), work in zip(places, before, strict=True):
            setattr(owner, name, work)
