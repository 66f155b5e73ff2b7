"""A real language model, SmolLM2-135M in float32, served in one continuous batch.

The reference is what transformers, with its own attention, takes for the likeliest next token. The engine
gets the prompts while others are being served, in a cache too small for all of them, so that requests lose
their blocks and are computed anew.
"""

from __future__ import annotations

from typing import Any

import pytest
from op_cases import require
from smollm import is_greedy, smollm

from attnbackend import Engine, SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Der schnellste Weg nach Berlin ist",
    "a",
    "SELECT name, age FROM users WHERE",
    "The three laws of thermodynamics are: first,",
    "<|im_start|>user\nName three colors.<|im_end|>\n<|im_start|>assistant\n",
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and "
    "arrows of outrageous fortune, or to take arms against a sea of troubles, and by opposing end them:",
    "import numpy as np\n\nx = np.linspace(0, 1, 100)\ny = np.sin(x)\n# Plot the result\n",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "Water boils at 100 degrees Celsius at sea level. On a mountain, where the pressure is lower,",
    "{\"name\": \"Ada\", \"born\": 1815, \"known for\":",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "\u65e5\u672c\u306e\u9996\u90fd\u306f",
    "Ingredients: two eggs, flour, milk, and a pinch of salt. Method: first,",
    "In 1969, Neil Armstrong",
    "# Chapter 1\n\nIt was a dark and stormy night;",
)  # fmt: skip
MAX_TOKENS = 48
ARRIVALS_A_STEP = 2
NUM_BLOCKS = 41
"""Blocks of 16 tokens for 20 requests that need 4 to 8 each."""


class Batch:
    """Serves prompts that arrive while others run, and counts what happens."""

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self.engine, self.params = engine, params
        self.preemptions = self.steps = self.largest = 0
        schedule = engine.scheduler.schedule

        def counted() -> Any:
            step = schedule()
            self.preemptions += len(step.preempted)
            self.largest = max(self.largest, len(step.scheduled))
            self.steps += 1
            return step

        engine.scheduler.schedule = counted  # type: ignore[method-assign]

    def run(self, prompts: tuple[str, ...]) -> list[list[int]]:
        waiting, finished, order = list(prompts), {}, []
        while waiting or self.engine.has_unfinished():
            order += [self.engine.add_request(prompt, self.params) for prompt in waiting[:ARRIVALS_A_STEP]]
            del waiting[:ARRIVALS_A_STEP]
            outputs = (step.output for step in self.engine.step())
            finished.update({output.request_id: output.token_ids for output in outputs if output})
        return [finished[request_id] for request_id in order]


def make_engine(**options: Any) -> Engine:
    limits = {
        "num_blocks": NUM_BLOCKS,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
    }
    return Engine(*smollm(), **(limits | options))


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_SDPA"])
def test_twenty_prompts_in_one_batch_give_the_tokens_of_transformers_generate(
    backend: str, compile: bool, fresh_compiler: None
) -> None:  # fmt: skip
    require(backend, device_type="cpu")
    engine = make_engine(backend=backend, compile=compile)
    batch = Batch(engine, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    actual = batch.run(PROMPTS)
    print(f"{batch.steps} steps of up to {batch.largest} requests, {batch.preemptions} preemptions")
    served = zip(PROMPTS, actual, strict=True)
    different = [prompt for prompt, tokens in served if not is_greedy(prompt, tokens, MAX_TOKENS)]
    assert not different
    assert batch.preemptions > 0
    assert batch.largest >= 6


def test_speculation_gives_the_tokens_of_transformers_generate() -> None:
    engine = make_engine(compile=False, num_blocks=20, speculative="ngram", num_speculative_tokens=3)
    batch = Batch(engine, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    served = zip(PROMPTS[:10], batch.run(PROMPTS[:10]), strict=True)
    assert all(is_greedy(prompt, tokens, MAX_TOKENS) for prompt, tokens in served)
    assert batch.preemptions > 0
    assert engine.proposer is not None
    print(engine.proposer.stats)
    assert engine.proposer.stats.tokens_per_decode > 1.2


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_interpreted_triton_gives_the_tokens_of_transformers_generate(
    compile: bool, fresh_compiler: None
) -> None:  # fmt: skip
    """Two prompts of 14 and 15 tokens in three blocks of 16: the second one loses its blocks to the first."""
    require("TRITON_ATTN", device_type="cpu")
    prompts, max_tokens = (PROMPTS[12], PROMPTS[3]), 6
    engine = make_engine(
        backend="TRITON_ATTN", compile=compile, max_num_seqs=2, num_blocks=4, max_model_len=48
    )  # fmt: skip
    batch = Batch(engine, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    served = zip(prompts, batch.run(prompts), strict=True)
    assert all(is_greedy(prompt, tokens, max_tokens) for prompt, tokens in served)
    assert batch.preemptions > 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_the_capital_of_france_is_paris(kv_cache_dtype: str) -> None:
    engine = make_engine(compile=False, kv_cache_dtype=kv_cache_dtype)
    (output,) = engine.generate("The capital of France is", SamplingParams(max_tokens=12))
    print(repr(output.text))
    assert output.text.startswith(" Paris.")
    assert {cache.dtype.itemsize for cache in engine.runner.kv_caches.values()} == {
        4 if kv_cache_dtype == "auto" else 1
    }  # type: ignore[attr-defined]


def test_an_fp8_cache_moves_the_logits_little_and_does_move_them() -> None:
    """Against the float32 cache: e4m3 keeps 3 bits of mantissa, so it must differ, and stay the same text."""
    logits = {}
    for kv_cache_dtype in ("auto", "fp8_e4m3"):
        engine = make_engine(compile=False, kv_cache_dtype=kv_cache_dtype)
        engine.add_request(PROMPTS[0], SamplingParams(max_tokens=1))
        execute = engine.runner.execute
        engine.runner.execute = lambda batch: logits.setdefault(kv_cache_dtype, execute(batch))  # type: ignore[method-assign]  # noqa: B023
        engine.step()
    exact, rough = logits["auto"].float(), logits["fp8_e4m3"].float()
    difference = float((rough - exact).std() / exact.std())
    print(f"relative difference of the logits: {difference:.4f}")
    assert 1e-4 < difference < 0.2
    assert exact.argmax() == rough.argmax()


def test_sampling_with_a_seed_gives_the_same_tokens_whether_preempted_or_not() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, top_k=40, top_p=0.95, seed=1234, ignore_eos=True)
    runs = {}
    for name, num_blocks in {"scarce": 13, "ample": 100}.items():
        batch = Batch(make_engine(backend="TORCH_SDPA", compile=False, num_blocks=num_blocks), params)
        runs[name] = batch.run(PROMPTS[:6])
        assert (batch.preemptions > 0) == (name == "scarce")
    assert runs["scarce"] == runs["ample"]
    assert len({tuple(tokens) for tokens in runs["ample"]}) == 6
