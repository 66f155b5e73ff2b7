"""`python -m benchmarks.mixed_steps`: steps of decodes that prompts join, from whole graphs and in pieces.

A Llama-8B-shaped random model of 16 layers on a GPU, bfloat16. 32 requests of 2,048 tokens decode; prompts of
64, of 448 and seven of 64 tokens join them, and at last one of 4,096 in chunks that fill steps of 512 tokens.
Prints, and writes, the median time of a step, for caches in bfloat16 and in float8.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from attnbackend import Engine, SamplingParams
from benchmarks.environment import describe_environment
from benchmarks.random_llama import random_llama

_LAYERS, _DECODES, _CONTEXT, _TOKENS, _TIMES = 16, 32, 2048, 512, 20
_PROMPTS = {"none": [], "64": [64], "448": [448], "7 x 64": [64] * 7, "4096 in chunks": [4096]}
_MODES = ("FULL", "FULL_AND_PIECEWISE")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes; see ``--help``."""
    parser = argparse.ArgumentParser("python -m benchmarks.mixed_steps", description=__doc__)
    parser.add_argument("--backend", help="default: the automatic choice")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/mixed_steps.json"))
    options = parser.parse_args(arguments)
    model, found = random_llama(_LAYERS), list[dict[str, Any]]()
    for cache in ("auto", "fp8"):
        for mode in _MODES:
            found.append(_measure(model, options.backend, cache, mode))
            print(json.dumps(found[-1]), flush=True)
            result = {"environment": describe_environment(), "milliseconds": found}
            options.output.write_text(json.dumps(result, indent=1) + "\n")
            gc.collect()
    print(f"written: {options.output}")


def _measure(model: Any, backend: str | None, cache: str, mode: str) -> dict[str, Any]:
    engine = Engine(
        model, backend=backend, kv_cache_dtype=cache, cudagraph_mode=mode, async_scheduling=False,
        max_num_seqs=_TOKENS // 2, max_num_batched_tokens=_TOKENS, max_model_len=2 * 4096, num_blocks=10_000,
    )  # fmt: skip
    for _ in range(_DECODES):
        engine.add_request(_prompt(_CONTEXT), SamplingParams(max_tokens=1000, ignore_eos=True))
    started: set[str] = set()
    while len(started) < _DECODES:
        started |= {output.request_id for output in engine.step()}
    steps = {name: _steps(engine, lengths) for name, lengths in _PROMPTS.items()}
    groups = engine.runner.groups  # type: ignore[attr-defined]
    return {"backend": groups[0].backend.get_name(), "cache": cache, "mode": mode, "new_tokens": steps}


def _steps(engine: Engine, lengths: list[int]) -> float:
    """The median of steps with such prompts; of one prompt that takes many, of its own steps."""
    taken: list[float] = []
    for _ in range(1 if sum(lengths) > _TOKENS else _TIMES):
        params = SamplingParams(max_tokens=1)
        waiting = {engine.add_request(_prompt(length), params) for length in lengths}
        while True:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            outputs = engine.step()
            torch.cuda.synchronize()
            taken.append(1e3 * (time.perf_counter() - begin))
            waiting -= {output.request_id for output in outputs}
            if not waiting:
                break
    return round(median(taken), 2)


def _prompt(length: int) -> list[int]:
    tokens: list[int] = torch.randint(3, 1000, (length,), device="cpu").tolist()
    return tokens


if __name__ == "__main__":
    main()
