"""Where a decode step's time on the host goes: batch preparation, plans, the model, the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from attnbackend.runtime import Engine, SamplingParams
from benchmarks.subjects import Subject, share_weights
from benchmarks.timing import Spread, Stopwatch

__all__ = ["StepTimes", "measure_steps"]


@dataclass(frozen=True)
class StepTimes:
    """One decode step of so many requests, in microseconds.

    Attributes:
        step_us: all of `Engine.step`.
        model_us: the model's forward pass.
        prepare_us: `InputBatch.prepare`.
        plan_us: the metadata builders, and the contexts around the forward pass.
        metadata_us: the two before together.
        outside_model_us: the step without the model: scheduling, metadata, sampling, outputs.
    """

    requests: int
    step_us: Spread
    model_us: Spread
    prepare_us: Spread
    plan_us: Spread
    metadata_us: Spread
    outside_model_us: Spread

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_steps(subject: Subject, requests: Sequence[int], *, steps: int, compile: bool) -> list[StepTimes]:
    """One engine for all numbers of requests.

    Args:
        requests: requests at a time, the largest not above the engine's 64.
        steps: timed steps of each number.
        compile: of the engine.
    """
    longest = max(map(len, subject.prompts)) + steps + _WARM_STEPS + 1
    blocks = 1 + max(requests) * (1 + -(-longest // 16))
    engine = Engine(share_weights(subject.model), compile=compile, num_blocks=blocks)
    return [_measure(engine, subject, count, steps) for count in requests]


_WARM_STEPS = 4
"""The prompts' step and a few decodes."""


def _measure(engine: Engine, subject: Subject, count: int, steps: int) -> StepTimes:
    with _decoding(engine, subject, count, steps + _WARM_STEPS), ExitStack() as watches:
        for _ in range(_WARM_STEPS):
            engine.step()
        step, prepare, execute, forward = (
            watches.enter_context(Stopwatch(owner, method))
            for owner, method in (
                (engine, "step"),
                (engine.input_batch, "prepare"),
                (engine.runner, "execute"),
                (engine.runner.model, "forward"),  # type: ignore[attr-defined]
            )
        )
        laps = []
        for _ in range(steps):
            outputs = engine.step()
            assert len(outputs) == count, f"{len(outputs)} of {count} requests got a token"
            laps.append([watch.lap() * 1e6 for watch in (step, prepare, execute, forward)])
    return _summarise(count, laps)


def _summarise(count: int, laps: list[list[float]]) -> StepTimes:
    return StepTimes(
        requests=count,
        step_us=Spread.of([step for step, _, _, _ in laps]),
        model_us=Spread.of([forward for _, _, _, forward in laps]),
        prepare_us=Spread.of([prepare for _, prepare, _, _ in laps]),
        plan_us=Spread.of([execute - forward for _, _, execute, forward in laps]),
        metadata_us=Spread.of([prep + execute - forward for _, prep, execute, forward in laps]),
        outside_model_us=Spread.of([step - forward for step, _, _, forward in laps]),
    )


@contextmanager
def _decoding(engine: Engine, subject: Subject, count: int, max_tokens: int) -> Iterator[None]:
    params = SamplingParams(max_tokens=max_tokens + 1, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in subject.take(count)]
    try:
        yield
    finally:
        for request_id in ids:
            engine.abort(request_id)
