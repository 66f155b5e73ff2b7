"""Steps started before the tokens of those before them are known: the same tokens, one step later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_zoo import make_model
from runtime_toys import (
    ByteTokenizer,
    Job,
    ScriptedRunner,
    ToyRunner,
    check_invariants,
    greedy_reference,
    poison_step_buffers,
    poison_unowned,
    random_jobs,
    toy_engine,
)
from torch import Tensor

from attnbackend import registry_scope
from attnbackend.cudagraph import RecordedGraphs
from attnbackend.cudagraph.graphs import _RecordedGraph
from attnbackend.registry import register_backend
from attnbackend.runtime import (
    EngineCore,
    PreparedBatch,
    RequestOutput,
    SamplingParams,
    StepOutput,
    batch_buffers,
    engine_core,
)
from attnbackend.runtime.model_runner import build_runner
from attnbackend.runtime.started_step import StartedStep
from attnbackend.runtime.step_graphs import GraphOptions
from attnbackend.testing.conformance.honest import HonestBackend

GREEDY = SamplingParams(max_tokens=6)


def async_engine(runner: ToyRunner | None = None, *args: Any, **options: Any) -> EngineCore:
    return toy_engine(runner, *args, async_scheduling=True, **options)


def serve(engine: EngineCore, runner: ToyRunner, jobs: list[Job]) -> list[RequestOutput]:
    """Jobs as they arrive, over memory that is poisoned wherever no request owns it."""
    finished, now = {}, 0
    while now < 13 or engine.has_unfinished():
        for index, job in enumerate(jobs):
            if job.arrives_at == now:
                engine.add_request(job.prompt, job.params, f"job-{index}")
        check_invariants(engine)
        poison_unowned(engine, runner)
        poison_step_buffers(engine)
        finished.update({output.request_id: output.output for output in engine.step() if output.output})
        now += 1
    allocator = engine.scheduler.allocator
    assert allocator.num_free == allocator.num_usable
    return [finished[f"job-{index}"] for index in range(len(jobs))]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("blocks", "seqs", "budget"), [(17, 5, 12), (33, 3, 64), (19, 10, 7)])
def test_every_token_is_that_of_the_request_alone(seed: int, blocks: int, seqs: int, budget: int) -> None:
    jobs = random_jobs(seed, count=9)
    expected = [toy_engine().generate([job.prompt], job.params)[0] for job in jobs]
    runner = ToyRunner(num_blocks=blocks)
    outputs = serve(async_engine(runner, max_num_seqs=seqs, budget=budget), runner, jobs)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.finish_reason for o in outputs] == [o.finish_reason for o in expected]


class Ordered(ToyRunner):
    """Writes down when steps start."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def execute(self, batch: PreparedBatch) -> Tensor:
        logits = super().execute(batch)
        self.events.append(f"start {self.num_steps}")
        return logits


def test_a_step_starts_before_the_tokens_of_the_one_before_it_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, read = Ordered(), StartedStep.tokens

    def tokens(step: StartedStep) -> list[int]:
        runner.events.append("read")
        return read(step)

    monkeypatch.setattr(StartedStep, "tokens", tokens)
    (output,) = async_engine(runner).generate([[1, 2]], SamplingParams(max_tokens=3))
    assert output.token_ids == greedy_reference([1, 2], 3)
    assert runner.events == ["start 1", "start 2", "read", "start 3", "read", "read"]


def test_the_engine_s_device_is_the_current_one_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events go by the current device's stream: another's would let a step's memory be written too soon."""
    current, read = [0], StartedStep.tokens

    class Current:
        def __enter__(self) -> None:
            assert current == [0]
            current[0] = 1

        def __exit__(self, *error: object) -> None:
            current[0] = 0

    class Placed(ToyRunner):
        def execute(self, batch: PreparedBatch) -> Tensor:
            assert current == [1]
            return super().execute(batch)

        def capture_graphs(self, padding: Callable[[int, int], PreparedBatch]) -> None:
            assert current == [1]

    def tokens(step: StartedStep) -> list[int]:
        assert current == [1]
        return read(step)

    monkeypatch.setattr(engine_core, "as_current", lambda device: Current())
    monkeypatch.setattr(StartedStep, "tokens", tokens)
    async_engine(Placed()).generate([[1, 2], [3]], SamplingParams(max_tokens=3))
    assert current == [0]


def test_no_step_is_started_for_a_request_whose_last_token_is_being_sampled() -> None:
    runner = ToyRunner()
    engine = async_engine(runner)
    engine.generate([[1], [2, 3]], SamplingParams(max_tokens=4))
    assert runner.num_steps == 4


def test_outputs_come_one_step_late_and_all_of_them() -> None:
    engine = async_engine()
    engine.add_request([1, 2], SamplingParams(max_tokens=3))
    steps = [engine.step() for _ in range(4)]
    assert [len(outputs) for outputs in steps] == [0, 1, 1, 1]
    assert steps[-1][0].finished
    assert not engine.has_unfinished()
    assert engine.step() == []


def test_tokens_behind_a_stop_are_dropped_and_blocks_come_back() -> None:
    script = [*b"ok", 256, *b"more"]
    runner = ScriptedRunner(script, prompt_len=2)
    engine = async_engine(runner, ByteTokenizer())
    (output,) = engine.generate(["Q:"], GREEDY)
    assert (output.token_ids, output.text, output.finish_reason) == ([*b"ok", 256], "ok", "stop")
    check_invariants(engine)
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_usable
    (again,) = engine.generate(["R:"], GREEDY)
    assert again.token_ids == output.token_ids


def test_a_request_admitted_into_the_blocks_of_a_stopped_one_gets_its_own_tokens() -> None:
    """The step that runs when a stop is noticed still writes for the stopped request."""
    stop = greedy_reference([5, 6, 7], 3)[-1]
    runner = ToyRunner(num_blocks=5)
    engine = async_engine(runner, max_num_seqs=1)
    params = [SamplingParams(max_tokens=10, stop_token_ids=[stop]), SamplingParams(max_tokens=10)]
    outputs = engine.generate([[5, 6, 7], [8, 9]], params)
    assert outputs[0].finish_reason == "stop"
    assert outputs[1].token_ids == greedy_reference([8, 9], 10)


class Faulty(ToyRunner):
    """Spoils the logits of the request whose first token is 13, from its third token on."""

    def _logits(self, batch: PreparedBatch, row: int, back: int = 0) -> Tensor:
        logits = super()._logits(batch, row, back)
        first = self.tokens[int(batch.block_table[row, 0]) * self.block_size]
        return logits * torch.nan if first == 13 and int(batch.seq_lens[row]) >= 5 else logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_end_one_request_and_feed_no_invalid_token(temperature: float) -> None:
    class Checked(Faulty):
        def execute(self, batch: PreparedBatch) -> Tensor:
            assert int(batch.input_ids.min()) >= 0
            assert int(batch.input_ids.max()) < self.vocab_size
            return super().execute(batch)

    params = SamplingParams(max_tokens=6, temperature=temperature, seed=1)
    prompts = [[1, 2, 3], [13, 2, 3], [3]]
    good = toy_engine().generate(prompts, params)
    outputs = async_engine(Checked()).generate(prompts, params)
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
    assert [outputs[i].token_ids for i in (0, 2)] == [good[i].token_ids for i in (0, 2)]
    assert outputs[1].token_ids == good[1].token_ids[:2]


class Flaky(ToyRunner):
    fails_at: frozenset[int] = frozenset()

    def execute(self, batch: PreparedBatch) -> Tensor:
        logits = super().execute(batch)
        if self.num_steps in self.fails_at:
            raise RuntimeError(f"step {self.num_steps} failed")
        return logits


def test_a_failed_step_is_repeated_with_the_tokens_that_the_device_holds() -> None:
    runner = Flaky(num_blocks=17)
    runner.fails_at = frozenset({1, 2, 5, 6, 9, 20})
    engine, jobs, failures = async_engine(runner), random_jobs(2, 6), 0
    ids = [engine.add_request(job.prompt, job.params) for job in jobs]
    finished = {}
    while engine.has_unfinished():
        try:
            finished.update({output.request_id: output.output for output in engine.step()})
        except RuntimeError:
            failures += 1
        check_invariants(engine)
    assert failures == 6
    expected = [toy_engine().generate([job.prompt], job.params)[0].token_ids for job in jobs]
    assert [finished[i].token_ids for i in ids] == expected  # type: ignore[union-attr]


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_an_interrupt_while_tokens_are_waited_for_loses_none(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    tokens, calls = StartedStep.tokens, 0

    def interrupted(step: StartedStep) -> list[int]:
        nonlocal calls
        calls += 1
        if calls in (2, 3, 7):
            raise KeyboardInterrupt
        return tokens(step)

    monkeypatch.setattr(StartedStep, "tokens", interrupted)
    engine, jobs, interrupts = toy_engine(async_scheduling=ahead), random_jobs(4, 5), 0
    ids = [engine.add_request(job.prompt, job.params) for job in jobs]
    finished = {}
    while engine.has_unfinished():
        try:
            finished.update({output.request_id: output.output for output in engine.step()})
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 3
    monkeypatch.undo()
    expected = [toy_engine().generate([job.prompt], job.params)[0].token_ids for job in jobs]
    assert [finished[i].token_ids for i in ids] == expected  # type: ignore[union-attr]


def test_abort_of_a_request_whose_token_is_on_its_way() -> None:
    engine = async_engine()
    first, second = engine.add_request([1, 2], GREEDY), engine.add_request([3], GREEDY)
    for _ in range(3):
        engine.step()
    output = engine.abort(first)
    assert (output.finish_reason, output.token_ids) == ("abort", greedy_reference([1, 2], 2))
    check_invariants(engine)
    third = engine.add_request([1, 2], GREEDY, first)
    steps: list[StepOutput] = []
    while engine.has_unfinished():
        steps += engine.step()
    finished = {step.request_id: step.output.token_ids for step in steps if step.output}
    assert finished == {second: greedy_reference([3], 6), third: greedy_reference([1, 2], 6)}


def test_a_device_that_is_no_cpu_works_ahead_and_a_cpu_does_not() -> None:
    assert not toy_engine().is_async
    runner = ToyRunner()
    runner.device = torch.device("meta")
    assert EngineCore(runner).is_async


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_a_step_that_fails_behind_its_graph_is_repeated_with_the_tokens_before_it(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph has written its tokens over those of the step before, which the step is to read again."""
    with registry_scope():
        register_backend("HONEST")(HonestBackend)
        runner = build_runner(
            make_model("llama"), num_blocks=30, max_num_seqs=3, max_num_batched_tokens=24, compile=False,
            backend="HONEST", graphs=GraphOptions(library=lambda device: RecordedGraphs()),
        )  # fmt: skip
        prompts = [[3, 4, 5], [6, 7]]
        expected = [o.token_ids for o in graph_engine(runner, ahead).generate(prompts, GREEDY)]
        replay, calls = _RecordedGraph.replay, 0

        def failing(graph: _RecordedGraph) -> None:
            nonlocal calls
            calls += 1
            replay(graph)
            if calls in (2, 4, 5, 8):
                raise RuntimeError("behind the graph")

        monkeypatch.setattr(_RecordedGraph, "replay", failing)
        engine = graph_engine(runner, ahead)
        ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
        finished, failures = {}, 0
        while engine.has_unfinished():
            try:
                finished.update({o.request_id: o.output.token_ids for o in engine.step() if o.output})
            except RuntimeError:
                failures += 1
    assert failures == 4
    assert [finished[i] for i in ids] == expected
    assert runner.graphs is not None
    assert runner.graphs.stats()["decode"] == 5


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_steps_are_started_again_until_blocks_or_requests_are_new(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the graph made of its batch, and what the host makes of it then, is one and the same."""
    prompts, repeats = [[3, 4, 5], [6, 7], [9] * 5], 0
    params = [SamplingParams(max_tokens=most, ignore_eos=True) for most in (70, 63, 44)]
    repeat = EngineCore._repeat

    def counted(engine: EngineCore, repeatable: Any) -> StartedStep | None:
        nonlocal repeats
        repeats += 1
        return repeat(engine, repeatable)

    with registry_scope():
        register_backend("HONEST")(HonestBackend)
        graphs = GraphOptions(library=lambda device: RecordedGraphs())
        runners = [
            build_runner(
                make_model("llama"), num_blocks=90, max_num_seqs=3, max_num_batched_tokens=24, compile=False,
                backend="HONEST", **options,
            )
            for options in ({}, {"graphs": graphs})
        ]  # fmt: skip
        expected = [o.token_ids for o in graph_engine(runners[0], False).generate(prompts, params)]
        monkeypatch.setattr(EngineCore, "_repeat", counted)
        engine, finished = graph_engine(runners[1], ahead), {}
        for step in range(100):
            if step in (0, 1, 9):
                number = (0, 1, 9).index(step)
                engine.add_request(prompts[number], params[number], str(number))
            finished.update({o.request_id: o.output.token_ids for o in engine.step() if o.output})
            assert not engine.scheduler.waiting
    assert [finished[str(i)] for i in range(3)] == expected
    assert repeats > 45


def graph_engine(runner: Any, ahead: bool) -> EngineCore:
    return EngineCore(
        runner, max_num_seqs=3, max_num_batched_tokens=24, eos_token_ids=(), async_scheduling=ahead
    )


@pytest.mark.parametrize(
    ("family", "backend", "is_shared"),
    [
        ("llama", None, True),
        ("gemma3_text", None, True),
        ("llama", "HONEST", True),
        ("llama", "HONEST", False),
    ],
    ids=str,
)
def test_models_give_the_same_tokens_either_way(
    family: str, backend: str | None, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two on the automatic choice, and one on graphs, which read the tokens where the device wrote them: in
    memory that is the host's, or its own as on a GPU, where only what changed is copied."""

    def tokens(ahead: bool) -> list[list[int]]:
        graphs = GraphOptions(library=None if backend is None else lambda device: RecordedGraphs())
        runner = build_runner(
            make_model(family), num_blocks=30, max_num_seqs=5, max_num_batched_tokens=24, compile=False,
            backend=backend, graphs=graphs,
        )  # fmt: skip
        engine = EngineCore(
            runner, max_num_seqs=5, max_num_batched_tokens=24, eos_token_ids=(7, 11), async_scheduling=ahead
        )
        params = [
            SamplingParams(max_tokens=20, **({"temperature": 1.0, "seed": i, "top_p": 0.9} if i % 2 else {}))
            for i in range(8)
        ]
        prompts = [[3 + (5 * i + j) % 80 for j in range(1 + 4 * i)] for i in range(8)]
        return [output.token_ids for output in engine.generate(prompts, params)]

    with registry_scope():
        register_backend("HONEST")(HonestBackend)
        expected = tokens(ahead=False)
        if not is_shared:
            monkeypatch.setattr(batch_buffers, "device_twin", lambda host, _: torch.zeros_like(host))
            assert tokens(ahead=False) == expected
        assert tokens(ahead=True) == expected
