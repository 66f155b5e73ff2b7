"""Speculative decoding: several tokens a step, and the tokens of decoding one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
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
    poison_step_buffers,
    poison_unowned,
    random_jobs,
    toy_engine,
)
from torch import Tensor

from attnbackend import AttentionCGSupport, CUDAGraphMode, Engine, registry_scope
from attnbackend.cudagraph import RecordedGraphs
from attnbackend.registry import register_backend
from attnbackend.runtime import EngineCore, PreparedBatch, RequestOutput, SamplingParams, StepOutput
from attnbackend.runtime.model_runner import build_runner
from attnbackend.runtime.request import Request
from attnbackend.runtime.speculation import NgramProposer, drafts_of
from attnbackend.runtime.step_graphs import GraphOptions
from attnbackend.testing.conformance.honest import HonestBackend, HonestBuilder

VOCAB = 4
"""So few tokens that most runs of two have been there before."""


def proposals(tokens: Sequence[int], count: int = 3) -> list[int]:
    return NgramProposer(count).propose(Request("a", None, 1, list(tokens), SamplingParams(), 0))


def slow_proposals(tokens: list[int], count: int) -> list[int]:
    """What followed the last occurrence of the longest end of four to two tokens."""
    for length in (4, 3, 2):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                continued = list(tokens)
                while len(continued) < len(tokens) + count:
                    continued.append(continued[len(continued) - (len(tokens) - start - length)])
                return continued[len(tokens) :]
    return tokens[-1:] * count


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], [4, 8, 1]),
        ([7, 1, 2, 3, 4, 9, 2, 3, 4], [9, 2, 3]),
        ([5, 5, 5], [5, 5, 5]),
        ([1, 2, 1, 2, 1], [2, 1, 2]),
        ([1, 2, 3], [3, 3, 3]),
        ([4], [4, 4, 4]),
    ],
)
def test_what_followed_before_is_proposed(tokens: list[int], expected: list[int]) -> None:
    assert proposals(tokens) == expected
    assert slow_proposals(tokens, 3) == expected


def test_proposals_of_a_growing_request_equal_a_slow_search() -> None:
    rng, proposer = random.Random(0), NgramProposer(4)
    request = Request("a", None, 1, [0], SamplingParams(), 0)
    for _ in range(300):
        assert proposer.propose(request) == slow_proposals(request.token_ids, 4)
        request.token_ids += [rng.randrange(3) for _ in range(rng.randrange(1, 4))]


def jobs_for(seed: int) -> list[Job]:
    return random_jobs(seed, count=8, vocab_size=VOCAB)


def plain(job: Job) -> RequestOutput:
    return toy_engine(ToyRunner(vocab_size=VOCAB)).generate([job.prompt], job.params)[0]


def serve(engine: EngineCore, runner: ToyRunner, jobs: list[Job]) -> list[RequestOutput]:
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("drafts", "blocks", "seqs", "budget"), [(1, 17, 5, 12), (3, 18, 4, 9), (4, 33, 8, 64), (7, 19, 3, 8)]
)
def test_greedy_and_seeded_tokens_are_those_of_decoding_one_by_one(
    seed: int, drafts: int, blocks: int, seqs: int, budget: int
) -> None:
    """With scarce blocks, prompts in chunks and requests that end at the longest length."""
    jobs = jobs_for(seed)
    runner = ToyRunner(vocab_size=VOCAB, num_blocks=blocks)
    engine = toy_engine(
        runner, max_num_seqs=seqs, budget=budget, speculative="ngram", num_speculative_tokens=drafts
    )
    outputs, expected = serve(engine, runner, jobs), [plain(job) for job in jobs]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.finish_reason for o in outputs] == [o.finish_reason for o in expected]
    assert engine.proposer is not None
    stats = engine.proposer.stats
    assert 0 < stats.num_accepted < stats.num_proposed
    assert stats.tokens_per_decode > 1
    assert not engine.proposer._indices, "what was known of requests that ended is kept"


class Cycle(ToyRunner):
    """Goes round and round: what a proposer of runs always finds."""

    def _logits(self, batch: PreparedBatch, row: int, back: int = 0) -> Tensor:
        logits = torch.zeros(self.vocab_size)
        logits[(int(batch.seq_lens[row]) - back) % 5] = 1
        return logits


def test_a_predictable_text_takes_a_step_for_several_tokens_and_says_so() -> None:
    runner = Cycle()
    engine = toy_engine(runner, speculative="ngram", num_speculative_tokens=4)
    (output,) = engine.generate([[0, 1, 2, 3, 4] * 3], SamplingParams(max_tokens=31))
    assert output.token_ids == [i % 5 for i in range(15, 46)]
    assert runner.num_steps == 1 + 6
    assert engine.proposer is not None
    assert str(engine.proposer.stats) == "24 of 24 drafts accepted (100%), 5.00 tokens a decode"


def test_batches_of_decodes_are_uniform_whatever_is_proposed() -> None:
    shapes = []

    class Watched(ToyRunner):
        def execute(self, batch: PreparedBatch) -> Tensor:
            shapes.append(batch.shape)
            assert batch.num_sampled == (batch.num_tokens if batch.is_pure_decode else batch.num_reqs)
            return super().execute(batch)

    engine = toy_engine(Watched(), speculative="ngram", num_speculative_tokens=3)
    engine.generate([[1], [2, 3], [4] * 9], SamplingParams(max_tokens=5))
    assert not shapes[0].all_decode
    assert all(s.all_decode and s.max_query_len == 4 and s.num_tokens == 4 * s.num_reqs for s in shapes[1:])


def test_a_prompt_as_long_as_a_decode_is_not_taken_for_one() -> None:
    """vllm #49918: a prompt of K + 1 tokens, alone or beside a decode, replayed the graph of decodes."""
    shapes = []

    class Watched(ToyRunner):
        def execute(self, batch: PreparedBatch) -> Tensor:
            shapes.append(batch.shape)
            return super().execute(batch)

    prompts, params = [[1, 2, 3, 1], [2, 2, 2, 2]], SamplingParams(max_tokens=9)
    engine = toy_engine(Watched(vocab_size=VOCAB), speculative="ngram", num_speculative_tokens=3)
    first = engine.add_request(prompts[0], params)
    finished = {output.request_id: output.output for output in engine.step()}
    second = engine.add_request(prompts[1], params)
    while engine.has_unfinished():
        finished.update({output.request_id: output.output for output in engine.step()})
    assert [(s.num_tokens, s.max_query_len, s.all_decode) for s in shapes[:2]] == [
        (4, 4, False),
        (8, 4, False),
    ]
    expected = [plain(Job(prompt, params, 0)).token_ids for prompt in prompts]
    assert [finished[i].token_ids for i in (first, second)] == expected  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        (SamplingParams(max_tokens=40, stop="d"), "abc", "stop"),
        (SamplingParams(max_tokens=40, stop="cda"), "ab", "stop"),
        (SamplingParams(max_tokens=40, stop_token_ids=[ord("c")]), "ab", "stop"),
        (SamplingParams(max_tokens=6), "abcdab", "length"),
        (SamplingParams(max_tokens=40), "abcdabcdabcd", "stop"),
    ],
    ids=["stop string", "stop string over tokens", "stop token", "length", "end of sequence"],
)
def test_what_was_accepted_behind_the_end_is_dropped(params: SamplingParams, text: str, reason: str) -> None:
    def output(**options: Any) -> tuple[RequestOutput, list[StepOutput]]:
        class Script(ScriptedRunner):
            def execute(self, batch: PreparedBatch) -> Tensor:
                logits = torch.zeros(batch.num_sampled, self.vocab_size)
                for i, place in enumerate(batch.logits_indices[: batch.num_sampled].tolist()):
                    at = int(batch.positions[place]) + 1 - self.prompt_len
                    logits[i, self.script[at] if at < len(self.script) else 0] = 1
                return logits

        script = [*b"abcdabcdabcd", 256, *b"more than enough"]
        prompt = "abcdabcd"
        engine = toy_engine(Script(script, len(prompt)), ByteTokenizer(), **options)
        engine.add_request(prompt, params)
        steps = []
        while engine.has_unfinished():
            steps += engine.step()
            check_invariants(engine)
        assert steps[-1].output is not None
        return steps[-1].output, steps

    expected, _ = output()
    found, steps = output(speculative="ngram", num_speculative_tokens=5)
    assert (found.text, found.finish_reason) == (text, reason)
    assert found.token_ids == expected.token_ids
    assert [t for step in steps for t in step.token_ids] == found.token_ids
    assert "".join(step.text for step in steps) == found.text
    assert len(steps) <= 4


class Faulty(ToyRunner):
    """Spoils what follows the eighth token of each request."""

    def _logits(self, batch: PreparedBatch, row: int, back: int = 0) -> Tensor:
        logits = super()._logits(batch, row, back)
        return logits * torch.nan if int(batch.seq_lens[row]) - back == 8 else logits


def test_nan_behind_a_draft_ends_the_request_where_it_is_reached() -> None:
    prompt, params = [1, 2, 1, 2], SamplingParams(max_tokens=12)
    (expected,) = toy_engine(Faulty(vocab_size=VOCAB)).generate([prompt], params)
    engine = toy_engine(Faulty(vocab_size=VOCAB), speculative="ngram", num_speculative_tokens=3)
    (found,) = engine.generate([prompt], params)
    assert found.finish_reason == "error"
    assert (found.token_ids, found.error) == (expected.token_ids, expected.error)


class Flaky(ToyRunner):
    def execute(self, batch: PreparedBatch) -> Tensor:
        logits = super().execute(batch)
        if self.num_steps % 3 == 0:
            raise RuntimeError("failed")
        return logits


def test_a_failed_step_is_repeated() -> None:
    jobs = jobs_for(5)
    engine = toy_engine(Flaky(vocab_size=VOCAB, num_blocks=18), speculative="ngram", num_speculative_tokens=3)
    ids = [engine.add_request(job.prompt, job.params) for job in jobs]
    finished = {}
    while engine.has_unfinished():
        try:
            finished.update({output.request_id: output.output for output in engine.step()})
        except RuntimeError:
            check_invariants(engine)
    assert [finished[i].token_ids for i in ids] == [plain(job).token_ids for job in jobs]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": "draft"}, "speculative='draft' is unknown; allowed: ngram"),
        (
            {"speculative": "ngram", "num_speculative_tokens": 0},
            "num_speculative_tokens=0 must be at least 1",
        ),
        ({"num_speculative_tokens": 2}, "num_speculative_tokens=2 needs a method; give speculative='ngram'"),
        ({"speculative": "ngram", "async_scheduling": True}, "async_scheduling=True with speculation is not"),
        (
            {"speculative": "ngram", "budget": 3},
            "max_num_batched_tokens=3 is less than one decode of 1 \\+ 3",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy_engine(**options)


@pytest.mark.parametrize("count", ["3", 1.5, True], ids=repr)
def test_a_number_of_another_type_is_refused(count: Any) -> None:
    with pytest.raises(TypeError, match=r"num_speculative_tokens=.* must be a whole number"):
        drafts_of("ngram", count)


def test_drafts_need_room_in_the_cache_and_admission_says_so() -> None:
    runner = ToyRunner(num_blocks=5, block_size=4)
    engine = toy_engine(runner, speculative="ngram", num_speculative_tokens=3)
    assert engine.generate([[1] * 7], SamplingParams(max_tokens=7))[0].finish_reason == "length"
    with pytest.raises(ValueError, match=r"max_tokens 8 - 1 \+ 3 speculative\) and the cache has 4"):
        engine.add_request([1] * 7, SamplingParams(max_tokens=8))


def test_drafts_behind_the_longest_length_have_no_position_of_their_own() -> None:
    class Checked(ToyRunner):
        def execute(self, batch: PreparedBatch) -> Tensor:
            assert int(batch.positions.max()) < self.max_model_len
            return super().execute(batch)

    job = Job([1, 2, 1, 2], SamplingParams(max_tokens=60), 0)
    engine = toy_engine(Checked(vocab_size=VOCAB), speculative="ngram", num_speculative_tokens=6)
    (found,) = engine.generate([job.prompt], job.params)
    assert found.token_ids == plain(job).token_ids
    assert len(found.token_ids) == 60


class UniformBuilder(HonestBuilder):
    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class UniformBackend(HonestBackend):
    @staticmethod
    def get_name() -> str:
        return "UNIFORM"

    @staticmethod
    def get_builder_cls() -> type[HonestBuilder]:
        return UniformBuilder


def model_tokens(family: str, graphs: GraphOptions | None, drafts: int) -> tuple[list[list[int]], EngineCore]:
    model, limits = make_model(family), {"max_num_seqs": 5, "max_num_batched_tokens": 24}
    speculation = {"speculative": "ngram", "num_speculative_tokens": drafts} if drafts else {}
    with registry_scope():
        register_backend("UNIFORM")(UniformBackend)
        runner = build_runner(
            model, backend="UNIFORM", num_blocks=30, compile=False, num_drafts=drafts, **limits,
            graphs=graphs or GraphOptions(mode=CUDAGraphMode.NONE),
        )  # fmt: skip
        engine = EngineCore(runner, eos_token_ids=(), **limits, **speculation)  # type: ignore[arg-type]
        prompts = [[3 + (5 * i + j) % 7 for j in range(1 + 4 * i)] for i in range(7)]
        outputs = engine.generate(prompts, SamplingParams(max_tokens=20))
    return [output.token_ids for output in outputs], engine


def test_decodes_with_drafts_run_from_graphs_of_uniform_batches() -> None:
    expected, _ = model_tokens("llama", None, 0)
    options = GraphOptions(library=lambda device: RecordedGraphs())
    found, engine = model_tokens("llama", options, 3)
    assert found == expected
    graphs = engine.runner.graphs  # type: ignore[attr-defined]
    assert graphs.stats()["decode"] > 5
    assert all(
        key.descriptor.num_tokens % 4 == 0 for key in graphs.steps.num_replays if key.descriptor.uniform
    )
    assert engine.proposer is not None
    assert engine.proposer.stats.num_accepted > 0


@pytest.mark.parametrize("family", ["gemma3_text", "qwen2_window"])
def test_models_with_windows_give_the_same_tokens(family: str) -> None:
    assert model_tokens(family, None, 4)[0] == model_tokens(family, None, 0)[0]


def test_a_runner_that_was_built_for_other_drafts_is_refused() -> None:
    runner = build_runner(make_model("llama"), num_blocks=9, compile=False, num_drafts=2)
    with pytest.raises(ValueError, match="speculates with 3 tokens and its runner was built for 2"):
        EngineCore(runner, speculative="ngram")


def test_the_engine_passes_its_drafts_to_the_runner() -> None:
    engine = Engine(make_model("llama"), num_blocks=9, compile=False, speculative="ngram")
    assert engine.runner.options.num_drafts == 3  # type: ignore[attr-defined]
    assert not engine.is_async
