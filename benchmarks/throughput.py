"""Tokens per second of the engine and of transformers' own `generate`, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from attnbackend.runtime import Engine, SamplingParams
from benchmarks.subjects import Subject, share_weights
from benchmarks.timing import Spread, take_turns

__all__ = ["Comparison", "ThroughputSettings", "compare"]

Generate = Callable[[], list[list[int]]]


@dataclass(frozen=True, kw_only=True)
class ThroughputSettings:
    """How long and how often.

    Attributes:
        batches: requests at a time.
        new_tokens: tokens generated for each request.
        rounds: timed runs of each side.
        warmups: runs of each side before, compilation included.
        compile: measure compiled sides too.
        freeze: transformers' compiled side with Inductor's ``freezing``, which repacks weights.
    """

    batches: tuple[int, ...] = (1, 8)
    new_tokens: int = 64
    rounds: int = 7
    warmups: int = 2
    compile: bool = True
    freeze: bool = False


class Comparison(NamedTuple):
    """One batch size, eager or compiled.

    Attributes:
        engine, transformers: generated tokens a second, prompts included in the time.
        ratio: engine over transformers, round by round.
        leading_tokens_equal: for each request, how many tokens both begin with.
    """

    batch: int
    mode: str
    engine: Spread
    transformers: Spread
    ratio: Spread
    leading_tokens_equal: list[int]

    def as_dict(self) -> dict[str, Any]:
        spreads = {k: asdict(v) for k, v in self._asdict().items() if isinstance(v, Spread)}
        return self._asdict() | spreads


def compare(subject: Subject, settings: ThroughputSettings) -> list[Comparison]:
    """Every batch size; eager and compiled sides of a batch size take turns in the same rounds."""
    modes = ("eager", "compiled") if settings.compile else ("eager",)
    found = []
    for batch in settings.batches:
        found += _compare_batch(subject, settings, modes, batch)
    return found


def _compare_batch(
    subject: Subject, settings: ThroughputSettings, modes: tuple[str, ...], batch: int
) -> list[Comparison]:
    # A fresh start for each batch size: transformers' graphs are then compiled for its very shapes.
    torch._dynamo.reset()
    sides: dict[str, Generate] = {}
    for mode in modes:
        sides[f"engine {mode}"] = _engine_side(subject, settings, batch, mode)
        sides[f"transformers {mode}"] = _transformers_side(subject, settings, batch, mode)
    tokens = {name: side() for name, side in sides.items()}
    for _ in range(settings.warmups - 1):
        take_turns(sides, 1)
    seconds = take_turns(sides, settings.rounds)
    total = batch * settings.new_tokens
    rates = {name: [total / s for s in times] for name, times in seconds.items()}
    return [_judge(batch, mode, rates, tokens) for mode in modes]


def _judge(
    batch: int, mode: str, rates: dict[str, list[float]], tokens: dict[str, list[list[int]]]
) -> Comparison:
    own, other = f"engine {mode}", f"transformers {mode}"
    ratios = [a / b for a, b in zip(rates[own], rates[other], strict=True)]
    equal = [_common_prefix(a, b) for a, b in zip(tokens[own], tokens[other], strict=True)]
    spreads = (Spread.of(rates[own]), Spread.of(rates[other]), Spread.of(ratios))
    return Comparison(batch, mode, *spreads, equal)


def _common_prefix(a: list[int], b: list[int]) -> int:
    assert len(a) == len(b), f"{len(a)} and {len(b)} tokens: the sides did unequal work"
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _engine_side(subject: Subject, settings: ThroughputSettings, batch: int, mode: str) -> Generate:
    blocks = _blocks(subject, settings, batch)
    model = share_weights(subject.model)
    engine = Engine(model, compile=mode == "compiled", num_blocks=blocks)
    params = SamplingParams(max_tokens=settings.new_tokens, ignore_eos=True)
    prompts = subject.take(batch)
    return lambda: [output.token_ids for output in engine.generate(prompts, params)]


def _blocks(subject: Subject, settings: ThroughputSettings, batch: int) -> int:
    longest = max(map(len, subject.prompts)) + settings.new_tokens
    return 1 + batch * (1 + -(-longest // 16))


def _transformers_side(subject: Subject, settings: ThroughputSettings, batch: int, mode: str) -> Generate:
    """`generate` as its documentation advises: sdpa, and for speed a static cache and a compiled forward."""
    model = share_weights(subject.model)
    model.set_attn_implementation("sdpa")
    # No token ends a request: min_new_tokens would forbid the end's token, which the engine does not.
    model.generation_config.eos_token_id = None
    if mode == "compiled":
        model.generation_config.cache_implementation = "static"
        options: dict[str, Any] | None = {"freezing": True} if settings.freeze else None
        # dynamic=False: each shape gets the graph that suits it best.
        model.forward = torch.compile(model.forward, fullgraph=True, dynamic=False, options=options)
    ids, mask = _left_padded(subject.take(batch), subject.pad_token_id)

    def generate() -> list[list[int]]:
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, pad_token_id=subject.pad_token_id,
            max_new_tokens=settings.new_tokens,
        )  # fmt: skip
        new: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return new

    return generate


def _left_padded(prompts: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    rows = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows), torch.tensor(mask)
