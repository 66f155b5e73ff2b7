"""`python -m benchmarks.token_agreement`: the same greedy tokens from every backend, where no tie decides.

A Llama-8B-shaped random model in bfloat16, 64 prompts, 64 tokens each. Where a request's tokens first differ
from the first backend's, both continue one prefix with different tokens: that is a tie if their logits, in
float32, differ by no more than twice what rounding to bfloat16 changes in the logits of this very position.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attnbackend import Engine, SamplingParams
from benchmarks.environment import describe_environment
from benchmarks.random_llama import random_llama

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASH_ATTN+TRITON_ATTN", "FLASHINFER", "TORCH_SDPA")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares, prints and writes; exits with 1 where a difference is no tie."""
    parser = argparse.ArgumentParser("python -m benchmarks.token_agreement", description=__doc__)
    parser.add_argument("--backend", action="append", help=f"may be repeated; default {', '.join(BACKENDS)}")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    model = random_llama(options.layers)
    prompts = random_prompts(options.requests)
    names = options.backend or list(BACKENDS)
    tokens = {name: greedy(model, name, prompts, options.tokens) for name in names}
    exact = copy.deepcopy(model).float()
    found = {name: differences(model, exact, prompts, tokens[names[0]], tokens[name]) for name in names[1:]}
    for name, rows in found.items():
        others = [row for row in rows if not row["is_tie"]]
        print(
            f"{name}: {len(rows)} of {len(prompts)} requests leave {names[0]}'s tokens, "
            f"{len(others)} of them not at a tie"
        )
    if options.output:
        record = {"environment": describe_environment(), "first": names[0], "differences": found}
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    if any(not row["is_tie"] for rows in found.values() for row in rows):
        raise SystemExit(1)


def random_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 513, (count,), generator=generator).tolist()
    return [torch.randint(0, 128256, (n,), generator=generator).tolist() for n in lengths]


def greedy(model: Any, backend: str, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    engine = Engine(
        model, backend=backend, compile=False, cudagraph_mode="NONE", max_num_seqs=len(prompts),
        max_model_len=1024, num_blocks=len(prompts) * 40 + 1, max_num_batched_tokens=8192,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [list(output.token_ids) for output in engine.generate(prompts, sampling)]


def differences(
    model: Any, exact: Any, prompts: list[list[int]], first: list[list[int]], second: list[list[int]]
) -> list[dict[str, Any]]:
    """Of each request whose tokens differ: where, and how near the two tokens' logits lie."""
    rows = []
    for request, (prompt, a, b) in enumerate(zip(prompts, first, second, strict=True)):
        if a == b:
            continue
        place = next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
        prefix = torch.tensor([prompt + a[:place]], device="cuda")
        with torch.inference_mode():
            rounded, real = (m(prefix).logits[0, -1].float() for m in (model, exact))
        gap = float((real[a[place]] - real[b[place]]).abs())
        noise = float((rounded - real).abs().max())
        rows.append(
            {"request": request, "token": place, "gap": gap, "noise": noise, "is_tie": gap <= 2 * noise}
        )
    return rows


if __name__ == "__main__":
    main()
