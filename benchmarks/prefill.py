"""`python -m benchmarks.prefill`: tokens a second of prompts, in the model of `benchmarks.decode_step`.

All prompts are there at the beginning and each asks for one token, so nothing but prompts is computed. The
first round warms up; prints and, where asked, writes the others' median.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attnbackend import Engine, SamplingParams
from benchmarks.decode_step import random_llama
from benchmarks.environment import describe_environment
from benchmarks.timing import Spread


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes; see ``--help``."""
    parser = argparse.ArgumentParser("python -m benchmarks.prefill", description=__doc__)
    parser.add_argument("--backend", action="append", help="may be repeated; default: the automatic choice")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="of each prompt")
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file; default: none")
    options = parser.parse_args(arguments)
    model = random_llama(options.layers)
    result: dict[str, Any] = {"environment": describe_environment(), "tokens_per_s": {}}
    for backend in options.backend or [None]:
        spread = measure(model, backend, options)
        result["tokens_per_s"][backend or "automatic"] = spread.median
        print(
            f"{backend or 'automatic'}: {options.prompts} x {options.tokens}: {spread} tokens/s", flush=True
        )
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def measure(model: Any, backend: str | None, options: Any) -> Spread:
    """Tokens a second, round by round."""
    blocks = -(-(options.tokens + 1) // 16)
    engine = Engine(
        model, backend=backend, max_num_seqs=options.prompts, max_model_len=options.tokens + 1,
        max_num_batched_tokens=options.max_num_batched_tokens, num_blocks=options.prompts * blocks + 1,
        cudagraph_mode="NONE",
    )  # fmt: skip
    return Spread.of([_round(engine, options, seed) for seed in range(options.rounds + 1)][1:])


def _round(engine: Engine, options: Any, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    shape = (options.prompts, options.tokens)
    prompts = torch.randint(0, engine.runner.vocab_size, shape, generator=generator).tolist()
    started = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_tokens=1))
    return options.prompts * options.tokens / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
