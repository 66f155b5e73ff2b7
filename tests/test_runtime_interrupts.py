"""An interrupt, wherever it comes, changes no token of a request, and leaves an engine that serves on."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from runtime_toys import ByteTokenizer, ToyRunner, check_invariants, toy_engine
from torch import Tensor

from attnbackend.runtime import EngineCore, PreparedBatch, RequestOutput, SamplingParams
from attnbackend.runtime.advance_decodes import advance_decodes
from attnbackend.runtime.sampler import take_largest
from attnbackend.runtime.started_step import StartedStep, TokenMemory
from attnbackend.runtime.step_graphs import inputs_of

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
PARAMS = [
    SamplingParams(max_tokens=14),
    SamplingParams(max_tokens=4, temperature=0.7, seed=3),
    SamplingParams(max_tokens=12, stop_token_ids=(11,)),
]
IDS = ["a", "b", "c"]
NUM_BLOCKS = 14
"""Too few for all requests, so that one loses its blocks."""


class RepeatingRunner(ToyRunner):
    """Makes the batch of each decode step the next one, as graphs do, and starts it again."""

    num_drafts = 0

    def __init__(self) -> None:
        super().__init__(num_blocks=NUM_BLOCKS)
        self._chosen = TokenMemory.on(self.device, 4, torch.float32)
        self.greedy: TokenMemory | None = None
        self.repeat: Callable[[], bool] | None = None
        self.num_repeats = 0

    @property
    def has_advanced(self) -> bool:
        return self.greedy is not None

    def execute(self, batch: PreparedBatch) -> Tensor:
        self.greedy = self.repeat = None
        logits = super().execute(batch)
        if batch.is_pure_decode:
            self._advance(batch, logits)
            self.greedy, self.repeat = self._chosen, lambda: self._run_again(batch)
        return logits

    def _run_again(self, batch: PreparedBatch) -> bool:
        self.num_repeats += 1
        self._advance(batch, super().execute(batch))
        return True

    def _advance(self, batch: PreparedBatch, logits: Tensor) -> None:
        count = len(logits)
        ids = take_largest(logits, self._chosen.leading(count)).ids
        advance_decodes(ids, inputs_of(batch, count, count, count, False), self.block_size)


def make_engine(kind: str) -> EngineCore:
    options: dict[str, Any] = {"max_num_seqs": 4, "budget": 16, "eos_token_ids": ()}
    if kind in ("sync", "ahead"):
        return toy_engine(RepeatingRunner(), async_scheduling=kind == "ahead", **options)
    if kind == "drafts":
        options["speculative"] = "ngram"
    return toy_engine(ToyRunner(num_blocks=NUM_BLOCKS), ByteTokenizer(), **options)


class Interrupt:
    """Raises KeyboardInterrupt at one of the lines of the runtime that a call runs, counted from 1."""

    def __init__(self, line: int) -> None:
        self.lines_left = line

    def call(self, function: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return function()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._run if "/attnbackend/runtime/" in frame.f_code.co_filename else None

    def _run(self, frame: FrameType, event: str, arg: object) -> Any:
        self.lines_left -= event == "line"
        if self.lines_left == 0 and event == "line":
            raise KeyboardInterrupt
        return self._run


def serve(engine: EngineCore, interrupt: Interrupt) -> dict[str, RequestOutput]:
    """What `step` returns until nothing is left to do, through an interrupt."""
    for added in zip(PROMPTS, PARAMS, IDS, strict=True):
        engine.add_request(*added)
    finished: dict[str, RequestOutput] = {}
    for _ in range(200):
        if not engine.has_unfinished():
            return finished
        try:
            outputs = interrupt.call(engine.step)
        except KeyboardInterrupt:
            continue
        finished.update((o.request_id, o.output) for o in outputs if o.output)
    raise AssertionError("requests never end")


@pytest.mark.parametrize("kind", ["sync", "ahead", "text", "drafts"])
def test_an_interrupt_at_any_line_changes_no_token(kind: str) -> None:
    never = Interrupt(1 << 60)
    engine = make_engine(kind)
    expected = serve(engine, never)
    num_lines = (1 << 60) - never.lines_left
    assert sorted(expected) == IDS
    assert not isinstance(engine.runner, RepeatingRunner) or engine.runner.num_repeats > 3
    for line in random.Random(0).sample(range(1, num_lines), 40):
        engine = make_engine(kind)
        found = serve(engine, Interrupt(line))
        assert all(found[i] == expected[i] for i in found), line
        assert len(found) >= 2, "an output may be lost while it is returned"
        check_invariants(engine)
        assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_usable


@pytest.mark.parametrize("kind", ["sync", "ahead", "text", "drafts"])
def test_generate_that_is_interrupted_leaves_nothing_behind(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, calls = StartedStep.tokens, 0

    def interrupted(step: StartedStep) -> list[int]:
        nonlocal calls
        calls += 1
        if calls in (3, 8):
            raise KeyboardInterrupt
        return tokens(step)

    engine = make_engine(kind)
    expected = [o.token_ids for o in engine.generate(PROMPTS, PARAMS)]
    monkeypatch.setattr(StartedStep, "tokens", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, PARAMS)
        assert not engine.has_unfinished()
    assert [o.token_ids for o in engine.generate(PROMPTS, PARAMS)] == expected
