from __future__ import annotations

import pytest
import torch
from runtime_toys import (
    ByteTokenizer,
    Job,
    ScriptedRunner,
    ToyRunner,
    check_invariants,
    greedy_reference,
    oldest,
    poison_step_buffers,
    poison_unowned,
    random_jobs,
    toy_engine,
)
from torch import Tensor

from attnbackend.runtime import EngineCore, PreparedBatch, RequestOutput, SamplingParams, StepOutput
from attnbackend.runtime.request import Request
from attnbackend.runtime.sampler import Draw, sample_tokens

GREEDY = SamplingParams(max_tokens=6)


def one_at_a_time(job: Job) -> list[int]:
    (output,) = toy_engine().generate([job.prompt], job.params)
    return output.token_ids


def computed(engine: EngineCore, request: Request) -> int:
    engine.scheduler.settle()
    return request.num_computed


def run_staggered(
    runner: ToyRunner, jobs: list[Job], max_num_seqs: int, budget: int
) -> tuple[list[RequestOutput], int]:
    """Serve jobs as they arrive, over poisoned memory, checking the invariants at every step."""
    engine = toy_engine(runner, max_num_seqs=max_num_seqs, budget=budget)
    preempted, finished, now, serve = 0, {}, 0, engine.scheduler.schedule

    def counted() -> object:
        nonlocal preempted
        step = serve()
        preempted += len(step.preempted)
        return step

    engine.scheduler.schedule = counted  # type: ignore[method-assign,assignment]
    while now < 13 or engine.has_unfinished():
        for index, job in enumerate(jobs):
            if job.arrives_at == now:
                engine.add_request(job.prompt, job.params, f"job-{index}")
        check_invariants(engine)
        poison_unowned(engine, runner)
        poison_step_buffers(engine)
        # Seldom, since what requests in lockstep share is settled for it.
        leader = oldest(engine) if engine.has_unfinished() and now % 3 == 0 else None
        before = computed(engine, leader) if leader else 0
        for output in engine.step():
            if output.output:
                finished[output.request_id] = output.output
        assert leader is None or computed(engine, leader) > before, "the oldest made no progress"
        check_invariants(engine)
        now += 1
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_usable
    return [finished[f"job-{index}"] for index in range(len(jobs))], preempted


def test_greedy_tokens_are_those_of_the_model_without_an_engine() -> None:
    prompts = [[1, 2, 3], [7], list(range(30))]
    outputs = toy_engine().generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [greedy_reference(p, 6) for p in prompts]
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert {o.finish_reason for o in outputs} == {"length"}


@pytest.mark.parametrize("seed", range(5))
def test_scarce_blocks_and_staggered_arrivals_change_no_token(seed: int) -> None:
    jobs = random_jobs(seed, count=10)
    expected = [one_at_a_time(job) for job in jobs]
    runner = ToyRunner(num_blocks=17)
    outputs, preempted = run_staggered(runner, jobs, max_num_seqs=5, budget=12)
    assert [o.token_ids for o in outputs] == expected
    assert preempted > 0, "this case is meant to preempt"


@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "block_size"),
    [(1, 1, 1), (4, 3, 2), (10, 2, 16), (10, 64, 4)],
)
def test_limits_change_no_token(max_num_seqs: int, budget: int, block_size: int) -> None:
    jobs = random_jobs(11, count=6, max_len=24)
    expected = [one_at_a_time(job) for job in jobs]
    runner = ToyRunner(num_blocks=1 + 48 // block_size, block_size=block_size)
    outputs, _ = run_staggered(runner, jobs, max_num_seqs, budget)
    assert [o.token_ids for o in outputs] == expected


def test_a_request_that_fills_the_cache_exactly_is_served() -> None:
    runner = ToyRunner(num_blocks=5, block_size=4)
    (output,) = toy_engine(runner).generate([[1] * 7], SamplingParams(max_tokens=10))
    assert output.token_ids == greedy_reference([1] * 7, 10)


def test_seeded_tokens_repeat_and_unseeded_ones_differ() -> None:
    seeded = SamplingParams(max_tokens=12, temperature=1.5, seed=5)
    unseeded = SamplingParams(max_tokens=12, temperature=1.5)
    outputs = toy_engine().generate([[1, 2]] * 4, [seeded, seeded, unseeded, unseeded])
    tokens = [tuple(o.token_ids) for o in outputs]
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 3


class FlatRunner(ToyRunner):
    def _logits(self, batch: PreparedBatch, row: int, back: int = 0) -> Tensor:
        return torch.zeros(self.vocab_size)


def test_each_token_of_a_request_has_its_own_draw() -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
    (output,) = toy_engine(FlatRunner(vocab_size=1000)).generate([[1]], params)
    assert len(set(output.token_ids)) > 25
    expected = [sample_tokens(torch.zeros(1, 1000), [Draw(params, 3, i)])[0] for i in range(30)]
    assert output.token_ids == expected


def test_results_come_in_the_order_of_the_prompts() -> None:
    params = [SamplingParams(max_tokens=n) for n in (9, 1, 4)]
    outputs = toy_engine().generate([[1], [2], [3]], params)
    assert [(o.prompt_token_ids, len(o.token_ids)) for o in outputs] == [
        ([1], 9),
        ([2], 1),
        ([3], 4),
    ]


def test_no_prompts_give_no_results() -> None:
    assert toy_engine().generate([], GREEDY) == []


def test_streamed_tokens_and_text_join_to_the_final_output() -> None:
    engine = toy_engine(ToyRunner(vocab_size=300), ByteTokenizer())
    ids = [engine.add_request(p, SamplingParams(max_tokens=20, ignore_eos=True)) for p in ("ab", "c")]
    steps: list[StepOutput] = []
    while engine.has_unfinished():
        steps += engine.step()
    for request_id in ids:
        own = [s for s in steps if s.request_id == request_id]
        final = own[-1].output
        assert final is not None
        assert [s.finished for s in own] == [False] * (len(own) - 1) + [True]
        assert [t for s in own for t in s.token_ids] == final.token_ids
        assert "".join(s.text for s in own) == final.text
        kept = [t for t in final.token_ids if t < 256]
        assert final.text == bytes(kept).decode(errors="replace")


def scripted(script: list[int], params: SamplingParams, prompt: str = "Q:") -> RequestOutput:
    engine = toy_engine(ScriptedRunner(script, len(prompt)), ByteTokenizer())
    return engine.generate([prompt], params)[0]


def test_the_end_of_sequence_token_ends_and_is_not_text() -> None:
    output = scripted([*b"ok", 256, *b"more"], GREEDY)
    assert (output.token_ids, output.text, output.finish_reason) == ([*b"ok", 256], "ok", "stop")
    assert output.prompt == "Q:"


def test_ignore_eos_goes_on_to_the_limit() -> None:
    output = scripted([*b"ok", 256, *b"abc"], SamplingParams(max_tokens=6, ignore_eos=True))
    assert (output.text, output.finish_reason) == ("okabc", "length")


def test_stop_token_ids_end_even_when_eos_is_ignored() -> None:
    params = SamplingParams(max_tokens=6, stop_token_ids=[ord("b")], ignore_eos=True)
    output = scripted([*b"a", 256, *b"bcd"], params)
    assert (output.token_ids, output.text) == ([ord("a"), 256, ord("b")], "a")


def test_a_stop_string_spanning_tokens_ends_and_cuts_the_text() -> None:
    output = scripted([*"né END!".encode()], SamplingParams(max_tokens=20, stop=["END"]))
    assert (output.text, output.finish_reason) == ("né ", "stop")
    assert bytes(output.token_ids).decode() == "né END"


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(max_tokens=2, stop="b"), "stop"),
        (SamplingParams(max_tokens=2, stop_token_ids=[ord("b")]), "stop"),
        (SamplingParams(max_tokens=2, stop="bc"), "length"),
    ],
    ids=["stop string", "stop token", "half a stop string"],
)
def test_at_the_last_token_stop_wins_over_length(params: SamplingParams, reason: str) -> None:
    output = scripted([*b"abc"], params)
    assert output.finish_reason == reason
    assert output.text == ("ab" if reason == "length" else "a")


def test_half_a_character_at_the_limit_is_shown_as_a_replacement() -> None:
    assert scripted([*"a€".encode()], SamplingParams(max_tokens=3)).text == "a\ufffd"


class FaultyRunner(ToyRunner):
    """Spoils the logits of the request whose first token is 13, from its third token on."""

    def _logits(self, batch: PreparedBatch, row: int, back: int = 0) -> Tensor:
        logits = super()._logits(batch, row, back)
        first = self.tokens[int(batch.block_table[row, 0]) * self.block_size]
        return logits * torch.nan if first == 13 and int(batch.seq_lens[row]) >= 5 else logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_end_one_request_and_the_others_go_on(temperature: float) -> None:
    params = SamplingParams(max_tokens=6, temperature=temperature, seed=1)
    prompts = [[1, 2, 3], [13, 2, 3], [3]]
    good = toy_engine().generate(prompts, params)
    outputs = toy_engine(FaultyRunner()).generate(prompts, params)
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
    assert [outputs[i].token_ids for i in (0, 2)] == [good[i].token_ids for i in (0, 2)]
    assert outputs[1].token_ids == good[1].token_ids[:2]
    assert outputs[1].error is not None
    assert "output token 2" in outputs[1].error


class BrokenTokenizer(ByteTokenizer):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        if token_ids[0] == ord("!") and len(token_ids) > 2:
            raise KeyError("no such piece")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_a_tokenizer_that_raises_ends_one_request_and_the_others_go_on() -> None:
    engine = toy_engine(ToyRunner(vocab_size=300), BrokenTokenizer())
    bad, good = engine.generate(["!", "a"], SamplingParams(max_tokens=5, ignore_eos=True))
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert bad.error is not None
    assert "no such piece" in bad.error
    assert len(bad.token_ids) == 2
    check_invariants(engine)
    assert not engine.has_unfinished()


class FlakyRunner(ToyRunner):
    fails_at: frozenset[int] = frozenset()

    def execute(self, batch: PreparedBatch) -> Tensor:
        logits = super().execute(batch)
        if self.num_steps in self.fails_at:
            raise RuntimeError(f"step {self.num_steps} failed")
        return logits


def test_a_failed_step_can_be_repeated_without_changing_a_token() -> None:
    runner = FlakyRunner(num_blocks=17)
    runner.fails_at = frozenset({1, 2, 5, 9, 20})
    engine, jobs, finished, failures = toy_engine(runner), random_jobs(2, 6), {}, 0
    ids = [engine.add_request(job.prompt, job.params) for job in jobs]
    while engine.has_unfinished():
        try:
            for output in engine.step():
                finished[output.request_id] = output.output
        except RuntimeError:
            failures += 1
        check_invariants(engine)
    assert failures == 5
    tokens = [finished[i].token_ids for i in ids]  # type: ignore[union-attr]
    assert tokens == [one_at_a_time(job) for job in jobs]


def test_after_a_failed_step_requests_can_be_aborted_and_blocks_come_back() -> None:
    runner = FlakyRunner()
    runner.fails_at = frozenset({2})
    engine = toy_engine(runner)
    first, second = engine.add_request([1, 2], GREEDY), engine.add_request([3], GREEDY)
    engine.step()
    with pytest.raises(RuntimeError, match="step 2 failed"):
        engine.step()
    output = engine.abort(first)
    assert (output.finish_reason, len(output.token_ids)) == ("abort", 1)
    check_invariants(engine)
    engine.abort(second)
    assert not engine.has_unfinished()
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_usable


def test_generate_that_fails_leaves_nothing_of_its_own_behind() -> None:
    runner = FlakyRunner()
    runner.fails_at = frozenset({3})
    engine = toy_engine(runner)
    other = engine.add_request([9, 9], SamplingParams(max_tokens=4))
    with pytest.raises(RuntimeError, match="step 3 failed"):
        engine.generate([[1], [2]], GREEDY)
    check_invariants(engine)
    tokens, outputs = [], []
    while engine.has_unfinished():
        outputs += engine.step()
    assert {o.request_id for o in outputs} == {other}
    tokens = [t for o in outputs for t in o.token_ids]
    assert tokens == greedy_reference([9, 9], 4)


def test_outputs_of_others_during_generate_are_delivered_afterwards() -> None:
    engine = toy_engine()
    other = engine.add_request([9, 9], SamplingParams(max_tokens=3))
    engine.generate([[1]], SamplingParams(max_tokens=8))
    assert engine.has_unfinished()
    outputs = engine.step()
    assert [o.request_id for o in outputs] == [other] * 3
    assert outputs[-1].output is not None
    assert outputs[-1].output.token_ids == greedy_reference([9, 9], 3)
    assert not engine.has_unfinished()
    assert engine.step() == []


def test_abort_of_a_running_and_a_waiting_request_frees_all() -> None:
    engine = toy_engine(max_num_seqs=1)
    running, waiting = engine.add_request([1, 2], GREEDY), engine.add_request([3], GREEDY)
    engine.step()
    engine.step()
    assert engine.abort(running).token_ids == greedy_reference([1, 2], 2)
    assert engine.abort(waiting).token_ids == []
    assert not engine.has_unfinished()
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_usable


class WrongShapeRunner(ToyRunner):
    def execute(self, batch: PreparedBatch) -> Tensor:
        return super().execute(batch)[:, :-1]


def test_logits_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"shape \(1, 49\); expected \(1, 50\)"):
        toy_engine(WrongShapeRunner()).generate([[1]], GREEDY)
