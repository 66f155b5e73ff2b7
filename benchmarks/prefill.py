"""`python -m benchmarks.prefill`: tokens a second of prompts, in the model of `benchmarks.random_llama`.

All prompts are there at the beginning and each asks for one token, so nothing but prompts is computed. The
first round warms up; prints and, where asked, writes the others' median.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnbackend import Engine, SamplingParams
from benchmarks.environment import describe_environment
from benchmarks.random_llama import random_llama
from benchmarks.timing import Spread


@dataclass(frozen=True)
class PrefillSettings:
    """``prompts`` of ``tokens`` each, timed ``rounds`` times."""

    prompts: int = 8
    tokens: int = 8192
    max_num_batched_tokens: int = 16384
    rounds: int = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes; see ``--help``."""
    parser = argparse.ArgumentParser("python -m benchmarks.prefill", description=__doc__)
    parser.add_argument("--backend", action="append", help="may be repeated; default: the automatic choice")
    for name, default in vars(PrefillSettings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--output", type=Path, help="JSON file; default: none")
    options = parser.parse_args(arguments)
    settings = PrefillSettings(**{name: getattr(options, name) for name in vars(PrefillSettings())})
    model = random_llama(options.layers)
    result: dict[str, Any] = {"environment": describe_environment(), "tokens_per_s": {}}
    for backend in options.backend or [None]:
        spread = measure(model, backend, settings)
        result["tokens_per_s"][backend or "automatic"] = spread.median
        print(f"{backend or 'automatic'}: {settings}: {spread} tokens/s", flush=True)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def measure(model: Any, backend: str | None, settings: PrefillSettings | None = None) -> Spread:
    """Tokens a second, round by round."""
    settings = PrefillSettings() if settings is None else settings
    blocks = -(-(settings.tokens + 1) // 16)
    engine = Engine(
        model, backend=backend, max_num_seqs=settings.prompts, max_model_len=settings.tokens + 1,
        max_num_batched_tokens=settings.max_num_batched_tokens, num_blocks=settings.prompts * blocks + 1,
        cudagraph_mode="NONE",
    )  # fmt: skip
    return Spread.of([_round(engine, settings, seed) for seed in range(settings.rounds + 1)][1:])


def _round(engine: Engine, settings: PrefillSettings, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    shape = (settings.prompts, settings.tokens)
    prompts = torch.randint(0, engine.runner.vocab_size, shape, generator=generator).tolist()
    started = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_tokens=1))
    return settings.prompts * settings.tokens / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
