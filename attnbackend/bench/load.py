"""Runs a trace through an engine and notes when each token came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from attnbackend.bench.traces import TraceRequest
from attnbackend.runtime import EngineCore, SamplingParams, StepOutput

__all__ = ["Clock", "RequestTimes", "ServeRun", "run_trace"]


class Clock(Protocol):
    """Time as the run sees it."""

    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class _WallClock:
    now = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)


@dataclass
class RequestTimes:
    """When what came of one request, in seconds after the start.

    Attributes:
        arrival_s: when it should come, whether or not the engine could take it then.
        prompt_tokens: tokens of the prompt.
        outputs: time and number of tokens of each output.
        finish_reason: None while it runs.
    """

    arrival_s: float
    prompt_tokens: int = 0
    outputs: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.outputs)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from arrival to the first token; None if there was none."""
        return self.outputs[0][0] - self.arrival_s if self.outputs else None

    @property
    def latency_s(self) -> float | None:
        """Seconds from arrival to the last token."""
        return self.outputs[-1][0] - self.arrival_s if self.outputs else None

    def gaps_s(self) -> list[float]:
        """Seconds before each token but the first; tokens that come together share the time before them."""
        gaps: list[float] = []
        for (before, _), (at, count) in pairwise(self.outputs):
            gaps += [(at - before) / count] * count
        # Tokens that came with the first one cost nothing more.
        return [0.0] * (self.outputs[0][1] - 1) + gaps if self.outputs else gaps


@dataclass
class ServeRun:
    """What a trace took.

    Attributes:
        requests: in order of arrival.
        seconds: from the start to the last output.
        steps: steps by what they ran from: "decode", "mixed" or "pieces" of graphs, or "none".
    """

    requests: list[RequestTimes]
    seconds: float = 0.0
    steps: dict[str, int] = field(default_factory=dict)


def run_trace(
    engine: EngineCore, trace: Sequence[TraceRequest], *, params: SamplingParams | None = None,
    clock: Clock | None = None, on_finished: Callable[[int], None] = lambda count: None,
) -> ServeRun:  # fmt: skip
    """Sends each request when its time has come, until all have ended.

    Every request generates its `max_tokens`: the end-of-sequence token does not end it.

    Args:
        engine: has no other requests.
        trace: in order of arrival.
        params: of all requests but for the number of tokens; None: greedy.
        clock: None: the wall's.
        on_finished: is told how many have ended, whenever that has changed.

    Raises:
        ValueError: a request that the engine refuses, by number; nothing has run then if it is refused for
            what it is, since all are looked at first.
    """
    return _Load(engine, trace, params or SamplingParams(), clock or _WallClock(), on_finished).run()


class _Load:
    def __init__(
        self, engine: EngineCore, trace: Sequence[TraceRequest], params: SamplingParams, clock: Clock,
        on_finished: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._engine, self._trace, self._clock, self._on_finished = engine, trace, clock, on_finished
        self._params = [_params_of(params, request.max_tokens) for request in trace]
        for number, (request, own) in enumerate(zip(trace, self._params, strict=True), 1):
            try:
                engine.check_request(request.prompt, own)
            except (ValueError, TypeError) as error:
                raise ValueError(f"request {number} of {len(trace)}: {error}") from error
        self._times: dict[str, RequestTimes] = {}
        self._num_finished = 0

    def run(self) -> ServeRun:
        before, start = self._engine.steps_by_graph(), self._clock.now()
        while len(self._times) < len(self._trace) or self._engine.has_unfinished():
            self._send(self._clock.now() - start)
            if not self._engine.has_unfinished():
                next_s = self._trace[len(self._times)].arrival_s
                self._clock.sleep(max(0.0, next_s - (self._clock.now() - start)))
                continue
            outputs = self._engine.step()
            self._note(outputs, self._clock.now() - start)
        after = self._engine.steps_by_graph()
        steps = {kind: count - before.get(kind, 0) for kind, count in after.items()}
        return ServeRun(list(self._times.values()), self._clock.now() - start, steps)

    def _send(self, now: float) -> None:
        while len(self._times) < len(self._trace) and self._trace[len(self._times)].arrival_s <= now:
            request, params = self._trace[len(self._times)], self._params[len(self._times)]
            request_id = self._engine.add_request(request.prompt, params)
            self._times[request_id] = RequestTimes(request.arrival_s)

    def _note(self, outputs: Sequence[StepOutput], now: float) -> None:
        for output in outputs:
            times = self._times[output.request_id]
            if output.token_ids:
                times.outputs.append((now, len(output.token_ids)))
            if output.output is not None:
                times.finish_reason = output.finish_reason
                times.prompt_tokens = len(output.output.prompt_token_ids)
                self._num_finished += 1
        if any(output.finished for output in outputs):
            self._on_finished(self._num_finished)


def _params_of(params: SamplingParams, max_tokens: int) -> SamplingParams:
    return replace(params, max_tokens=max_tokens, ignore_eos=True)
