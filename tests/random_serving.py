"""Requests that come and go at random, and the logits of every step that serves them."""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor

from attnbackend import SamplingParams
from attnbackend.runtime.engine_core import EngineCore

StepLogits = tuple[tuple[str, ...], Tensor]
"""The request of each row, and the rows."""


def logits_of_all_steps(
    engine: EngineCore, seed: int, steps: int = 40, vocab_size: int = 90
) -> list[StepLogits]:
    """Serves requests of short and long prompts, one of them aborted, until none is left.

    Args:
        engine: without requests.
        seed: decides the requests.
        steps: at most so many; requests come in the first half of them.
        vocab_size: token ids of prompts are below.
    """
    rng, found = random.Random(seed), []
    execute, repeat = engine.runner.execute, engine._repeat

    def recorded(batch: Any) -> Tensor:
        logits = execute(batch)
        found.append((tuple(batch.request_ids[row] for row in batch.sampled_rows), logits.clone()))
        return logits

    def repeated(repeatable: Any) -> Any:
        started = repeat(repeatable)
        if started is not None:
            ids = tuple(request.request_id for request in repeatable.lockstep.requests)
            found.append((ids, engine.runner.graphs._last.logits.clone()))  # type: ignore[attr-defined]
        return started

    engine.runner.execute = recorded  # type: ignore[method-assign]
    engine._repeat = repeated  # type: ignore[method-assign]
    for step in range(steps):
        if 8 * step < 5 * steps and rng.random() < 0.5:
            prompt = [rng.randrange(3, vocab_size) for _ in range(rng.choice((1, 2, 9, 30)))]
            engine.add_request(prompt, SamplingParams(max_tokens=rng.randrange(1, 9)), f"r{step}")
        if step == steps // 2 and engine.scheduler.has_unfinished:
            engine.abort(next(iter(engine._progress)))
        engine.step()
    assert not engine.has_unfinished()
    return found
