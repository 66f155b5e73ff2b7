"""Traces: which requests come when, made from numbers or read from a file."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Lengths", "TraceRequest", "read_trace", "synthetic_trace"]


@dataclass(frozen=True)
class TraceRequest:
    """One request.

    Attributes:
        arrival_s: seconds after the start.
        prompt: text, or token ids.
        max_tokens: tokens to generate.
    """

    arrival_s: float
    prompt: str | Sequence[int]
    max_tokens: int


class Lengths(NamedTuple):
    """Numbers of tokens, drawn evenly from `low` to `high`."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, what: str) -> Lengths:
        """From ``128`` or ``16-256``.

        Raises:
            ValueError: another form, a number below 1, or a range from high to low.
        """
        first, dash, last = text.partition("-")
        if first.isdecimal() and (last.isdecimal() if dash else True):
            lengths = cls(int(first), int(last) if dash else int(first))
            if 1 <= lengths.low <= lengths.high:
                return lengths
        raise ValueError(
            f"{what} {text!r} is neither a number of tokens, such as 128, nor a range, such as 16-256"
        )

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def synthetic_trace(
    count: int, prompt_lens: Lengths, output_lens: Lengths, *, rate: float, vocab_size: int, seed: int = 0
) -> list[TraceRequest]:
    """Random prompts that arrive as a Poisson process.

    Args:
        count: requests.
        prompt_lens, output_lens: tokens of each prompt and output.
        rate: requests a second on average; infinity lets all come at once.
        vocab_size: prompts are of random ids below it.
        seed: the same trace each time.

    Raises:
        ValueError: count below 1, or a rate that is not above 0.
    """
    if count < 1:
        raise ValueError(f"requests={count} must be at least 1")
    if not rate > 0:
        raise ValueError(f"rate={rate} must be above 0 requests a second; inf lets all come at once")
    rng, now, trace = random.Random(seed), 0.0, []
    for _ in range(count):
        prompt = random_prompt(rng, prompt_lens.draw(rng), vocab_size)
        trace.append(TraceRequest(now, prompt, output_lens.draw(rng)))
        now += 0.0 if math.isinf(rate) else rng.expovariate(rate)
    return trace


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(vocab_size) for _ in range(length)]


_FIELDS = {
    "arrival_s": "arrival_s", "timestamp": "arrival_s", "prompt": "prompt", "prompt_token_ids": "prompt",
    "prompt_len": "prompt_len", "input_length": "prompt_len", "max_tokens": "max_tokens",
    "output_length": "max_tokens",
}  # fmt: skip
_IGNORED = ("hash_ids",)
"""Of the public traces of Mooncake: which blocks prompts share. Every prompt is its own here."""


def read_trace(file: Path, *, vocab_size: int, seed: int = 0) -> list[TraceRequest]:
    """Requests of a JSONL file, in order of arrival.

    Each line is an object with ``max_tokens``, one of ``prompt`` (text), ``prompt_token_ids`` and
    ``prompt_len`` (random ids), and ``arrival_s``, seconds after the start; left out, 0. ``timestamp``
    (milliseconds), ``input_length`` and ``output_length`` are taken as well, as public traces have them.

    Raises:
        ValueError: a line that is no such object; the message names it.
        FileNotFoundError: there is no such file.
    """
    rng, trace = random.Random(seed), []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.strip():
            try:
                trace.append(_request_of(json.loads(line), rng, vocab_size))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}, line {number}: {error}") from error
    if not trace:
        raise ValueError(f"{file} has no requests")
    return sorted(trace, key=lambda request: request.arrival_s)


def _request_of(line: Any, rng: random.Random, vocab_size: int) -> TraceRequest:
    if not isinstance(line, dict):
        raise ValueError(f"{line!r} is no object")
    unknown = sorted(line.keys() - _FIELDS.keys() - set(_IGNORED))
    if unknown:
        raise ValueError(f"unknown fields {unknown}; allowed: {sorted(_FIELDS)}")
    names = [_FIELDS[name] for name in line if name in _FIELDS]
    prompts = [name for name in names if name in ("prompt", "prompt_len")]
    if len(names) != len(set(names)) or len(prompts) != 1 or "max_tokens" not in names:
        raise ValueError(
            f"{sorted(line)} must have max_tokens and one of prompt, prompt_token_ids, prompt_len"
        )
    values = {_FIELDS[name]: value for name, value in line.items() if name in _FIELDS}
    arrival = _number(values.get("arrival_s", 0.0), "arrival_s") * (1e-3 if "timestamp" in line else 1)
    prompt = values.get("prompt")
    if prompt is None:
        prompt = random_prompt(rng, _count(values["prompt_len"], "prompt_len"), vocab_size)
    return TraceRequest(arrival, prompt, _count(values["max_tokens"], "max_tokens"))


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{what}={value!r} must be a number, at least 0")
    return float(value)


def _count(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what}={value!r} must be a whole number, at least 1")
    return value
