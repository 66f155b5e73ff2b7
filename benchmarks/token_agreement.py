"""`python -m benchmarks.token_agreement`: the same greedy tokens from every backend, where no tie decides.

A Llama-8B-shaped model in bfloat16, 64 prompts, 64 tokens each. Its weights are random, but its attention
copies: scores are sharp, each layer adds what the values of the keys seen were made from, and the head names
the token of a fixed permutation for it. So tokens depend on which keys attention finds, and the best two
logits are mostly further apart than rounding moves them, which they are not in a plainly random model.

Every step of the first backend's tokens is judged by the same model in float32: its decision is a tie if the
two best logits there differ by no more than four standard deviations of what bfloat16 changes in a difference
of two logits at this very step. Where another backend's tokens first differ, the two tokens' logits are held
against the same bound.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnbackend import Engine, SamplingParams
from benchmarks.environment import describe_environment
from benchmarks.random_llama import random_llama

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASH_ATTN+TRITON_ATTN", "FLASHINFER", "TORCH_SDPA")
SHARPNESS, COPIED = 6.0, 6.0
"""Standard deviation of the scores, and the weight of what a layer's attention adds."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares, prints and writes; exits with 1 where a difference is no tie."""
    parser = argparse.ArgumentParser("python -m benchmarks.token_agreement", description=__doc__)
    parser.add_argument("--backend", action="append", help=f"may be repeated; default {', '.join(BACKENDS)}")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    with _timed("the model"):
        model = copying(random_llama(options.layers))
    prompts = random_prompts(options.requests, model.config.vocab_size)
    names, tokens = options.backend or list(BACKENDS), {}
    for name in names:
        with _timed(name):
            tokens[name] = greedy(model, name, prompts, options.tokens)
    with _timed("the steps anew, in both types"):
        judged = judge(model, prompts, tokens[names[0]])
    found = {name: compare(tokens[names[0]], tokens[name], judged) for name in names[1:]}
    ties = sum(int(steps.is_tie().sum()) for steps in judged) / (options.requests * options.tokens)
    kinds = len({token for request in tokens[names[0]] for token in request})
    print(f"{ties:.2%} of all steps are ties; {kinds} different tokens")
    for name, result in found.items():
        print(
            f"{name}: {result['equal_steps']:.1%} of {names[0]}'s steps before a request leaves its tokens; "
            f"{len(result['differences'])} of {len(prompts)} do, {result['not_ties']} of them not at a tie"
        )
    if options.output:
        record = {"environment": describe_environment(), "first": names[0], "tie_share": ties}
        record |= {"different_tokens": kinds, "compared": found}
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    if any(result["not_ties"] for result in found.values()):
        raise SystemExit(1)


@contextmanager
def _timed(what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - started:.1f} s", flush=True)


def copying(model: Any) -> Any:
    """The model with attention that copies; its weights are overwritten."""
    config = model.config
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    width = config.hidden_size
    embedding = nn.init.normal_(model.model.embed_tokens.weight)
    model.lm_head.weight.copy_(
        embedding[torch.randperm(len(embedding), device=embedding.device)] / width**0.5
    )
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj):
            nn.init.normal_(projection.weight, std=math.sqrt(SHARPNESS / width))
        value = nn.init.normal_(attention.v_proj.weight, std=width**-0.5)
        of_heads = value.view(kv_heads, 1, size, width).expand(-1, heads // kv_heads, -1, -1)
        share = COPIED * math.sqrt(width / (kv_heads * size))
        attention.o_proj.weight.copy_(of_heads.reshape(heads * size, width).t() * share)
    return model


def random_prompts(count: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 513, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def greedy(model: Any, backend: str, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    engine = Engine(
        model, backend=backend, compile=False, cudagraph_mode="NONE", max_num_seqs=len(prompts),
        max_model_len=1024, num_blocks=len(prompts) * 40 + 1, max_num_batched_tokens=8192,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    outputs = engine.generate(prompts, sampling)
    for place, output in enumerate(outputs):
        if output.finish_reason != "length":
            raise SystemExit(f"{backend}: request {place} ended by {output.finish_reason}: {output.error}")
    return [list(output.token_ids) for output in outputs]


class Steps(NamedTuple):
    """What decides each step of one request. Shape legend: N steps, V tokens of the vocabulary."""

    logits_NV: Tensor
    """In float32, on the CPU."""
    noise_N: Tensor
    """Standard deviation of what bfloat16 changes in a difference of two logits."""

    def is_tie(self) -> Tensor:
        best, second = self.logits_NV.topk(2).values.unbind(1)
        return best - second <= 4 * self.noise_N


def judge(model: Any, prompts: list[list[int]], tokens: list[list[int]]) -> list[Steps]:
    """The steps that gave `tokens`, computed anew in one pass a request, in both types."""
    exact = copy.deepcopy(model).float()
    judged = []
    for prompt, own in zip(prompts, tokens, strict=True):
        sequence = torch.tensor([prompt + own[:-1]], device=model.device)
        with torch.inference_mode():
            rounded, real = (m(sequence, logits_to_keep=len(own)).logits[0].float() for m in (model, exact))
        judged.append(Steps(real.cpu(), ((rounded - real).std(1) * 2**0.5).cpu()))
    return judged


def compare(first: list[list[int]], second: list[list[int]], judged: list[Steps]) -> dict[str, Any]:
    """Of each request whose tokens differ: where, and how near the two tokens' logits lie."""
    rows, equal = [], 0
    for request, (a, b, steps) in enumerate(zip(first, second, judged, strict=True)):
        place = next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
        equal += place
        if place < len(a):
            gap = float((steps.logits_NV[place, a[place]] - steps.logits_NV[place, b[place]]).abs())
            noise = float(steps.noise_N[place])
            rows.append({"request": request, "token": place, "gap": gap, "noise": noise})
    return {
        "equal_steps": equal / sum(map(len, first)),
        "not_ties": sum(row["gap"] > 4 * row["noise"] for row in rows),
        "differences": rows,
    }


if __name__ == "__main__":
    main()
