"""One engine on one model, told on stdin what to run: `cpu_engine_worker.py SIDE MODEL DTYPE MODE`.

It imports nothing but what its side needs, so that each side runs in its own environment. A line in is
``[batch, context, new tokens]``; a line out, after RESULT, has for each step the seconds by the wall and of
the processor. The first step computes the prompts. Sides: attnbackend, vllm, transformers; modes: compiled,
eager.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

Steps = list[tuple[float, float]]
"""Seconds by the wall, seconds of the process's processor time."""
_MAX_LEN, _MAX_SEQS, _MOST_TOKENS = 4096, 8, 16384 + 8


def _prompts(batch: int, context: int, generator: torch.Generator) -> list[list[int]]:
    return torch.randint(3, 2048, (batch, context), generator=generator).tolist()


def _timed(step: Callable[[], object], unfinished: Callable[[], bool]) -> Steps:
    times = [_now()]
    while unfinished():
        step()
        times.append(_now())
    return _differences(times)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _differences(times: list[tuple[float, float]]) -> Steps:
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(times)]


def attnbackend_side(model: str, dtype: str, eager: bool) -> Callable[[list[list[int]], int], Steps]:
    """The project's engine, compiled."""
    from transformers import AutoModelForCausalLM

    from attnbackend import Engine, SamplingParams

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    blocks = 1 + _MAX_SEQS * (_MAX_LEN // 16)
    engine = Engine(
        loaded, num_blocks=blocks, max_num_seqs=_MAX_SEQS, max_num_batched_tokens=_MOST_TOKENS,
        max_model_len=_MAX_LEN, compile=not eager,
    )  # fmt: skip

    def run(prompts: list[list[int]], new_tokens: int) -> Steps:
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        return _timed(engine.step, engine.has_unfinished)

    return run


def vllm_side(model: str, dtype: str, eager: bool) -> Callable[[list[list[int]], int], Steps]:
    """vLLM's engine, compiled, stepped in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``)."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, dtype=dtype, skip_tokenizer_init=True, max_model_len=_MAX_LEN, max_num_seqs=_MAX_SEQS,
        max_num_batched_tokens=_MOST_TOKENS, enable_prefix_caching=False, seed=0,
        enforce_eager=eager,
    )  # fmt: skip
    engine, count = llm.llm_engine, 0

    def run(prompts: list[list[int]], new_tokens: int) -> Steps:
        nonlocal count
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            engine.add_request(str(count), {"prompt_token_ids": prompt}, params)
            count += 1
        return _timed(engine.step, engine.has_unfinished_requests)

    return run


def transformers_side(model: str, dtype: str, eager: bool) -> Callable[[list[list[int]], int], Steps]:
    """``generate`` with sdpa and a static cache, which compiles the decode step by itself."""
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):  # is handed the prompt first, then each step's tokens
        def __init__(self) -> None:
            self.times: list[tuple[float, float]] = []

        def put(self, value: Any) -> None:
            self.times.append(_now())

        def end(self) -> None:
            pass

    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    loaded.generation_config.eos_token_id = None

    def run(prompts: list[list[int]], new_tokens: int) -> Steps:
        clock, ids = Clock(), torch.tensor(prompts)
        loaded.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
            pad_token_id=0, cache_implementation="dynamic" if eager else "static", streamer=clock,
        )  # fmt: skip
        return _differences(clock.times)

    return run


_SIDES = {"attnbackend": attnbackend_side, "vllm": vllm_side, "transformers": transformers_side}


def main() -> None:
    side, model, dtype, mode = sys.argv[1:5]
    start = time.perf_counter()
    run, generator = _SIDES[side](model, dtype, mode == "eager"), torch.Generator().manual_seed(1)
    print("RESULT", json.dumps({"load_s": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        batch, context, new_tokens = json.loads(line)
        steps = run(_prompts(batch, context, generator), new_tokens)
        print("RESULT", json.dumps({"steps": steps}), flush=True)


if __name__ == "__main__":
    main()
