"""What a request asks of the sampler and of the stop rules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_MIN_SEED = -(2**63)
_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        max_tokens: most tokens to generate, at least 1. Default 16.
        temperature: divides the logits, at least 0. The default 0 is greedy: the token of the
            largest logit, the lowest id among equals.
        top_k: keep the k largest logits; 0 (default) or -1 keeps all. Tokens tied with the k-th
            are all kept, so the kept set never depends on an order among equals.
        top_p: nucleus, in (0, 1]: after top_k, keep a token when the tokens strictly more likely
            than it weigh less than top_p together (Holtzman et al. 2020, arXiv:1904.09751). Ties
            are kept together and the likeliest token always stays. Default 1 keeps all.
        seed: integer in [-2**63, 2**64). Token i of a request depends on (seed, i) and its own
            logits alone, never on what else is in the batch. None (default): a fresh random seed.
        stop: a string or several. Generation ends where the first of them is complete, and
            the text ends before it. Needs a tokenizer.
        stop_token_ids: ids that end the request like an end-of-sequence token: the id is the
            last of `token_ids` and not part of `text`.
        ignore_eos: go on after the model's own end-of-sequence tokens.

    Raises:
        ValueError: a value out of range, or top_k or top_p with temperature 0, where greedy
            choice leaves them without effect.
        TypeError: a value of another type.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop, "strings")
        object.__setattr__(self, "stop", stop)
        stop_ids = _tuple("stop_token_ids", self.stop_token_ids, "token ids")
        object.__setattr__(self, "stop_token_ids", stop_ids)
        self._check_types()
        self._check_ranges()
        self._check_stops()
        self._check_no_effect()

    @property
    def is_greedy(self) -> bool:
        """True when no random draw is made."""
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever form it was given in."""
        return tuple(self.stop)

    def _check_types(self) -> None:
        for name in ("max_tokens", "top_k"):
            _require_int(name, getattr(self, name))
        if self.seed is not None:
            _require_int("seed", self.seed)
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"SamplingParams: {name}={value!r} is not a number")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"SamplingParams: ignore_eos={self.ignore_eos!r} is not a bool")

    def _check_ranges(self) -> None:
        seed = 0 if self.seed is None else self.seed
        rules = (
            (self.max_tokens >= 1, "max_tokens", "at least 1"),
            (0 <= self.temperature < math.inf, "temperature", "finite and at least 0 (0: greedy)"),
            (self.top_k >= -1, "top_k", "at least 1, or 0 or -1 to keep all tokens"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (1: keep all tokens)"),
            (_MIN_SEED <= seed <= _MAX_SEED, "seed", "in [-2**63, 2**64)"),
        )
        for holds, name, allowed in rules:
            if not holds:
                value = getattr(self, name)
                raise ValueError(f"SamplingParams: {name}={value} is not allowed; it must be {allowed}")

    def _check_stops(self) -> None:
        for index, text in enumerate(self.stop):
            if not isinstance(text, str):
                raise TypeError(f"SamplingParams: stop[{index}]={text!r} is not a string")
            if not text:
                raise ValueError(
                    f"SamplingParams: stop[{index}] is empty, which would stop at once; remove it"
                )
        for index, token_id in enumerate(self.stop_token_ids):
            _require_int(f"stop_token_ids[{index}]", token_id)

    def _check_no_effect(self) -> None:
        if not self.is_greedy:
            return
        given = {"top_k": (self.top_k, self.top_k > 0), "top_p": (self.top_p, self.top_p < 1)}
        for name, (value, is_set) in given.items():
            if is_set:
                raise ValueError(
                    f"SamplingParams: {name}={value} has no effect at temperature=0, which is "
                    f"greedy; set temperature above 0 (1.0 samples the model's own distribution) "
                    f"or leave {name} out"
                )


def _tuple(name: str, values: Iterable[Any], what: str) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise TypeError(f"SamplingParams: {name}={values!r} must be a list of {what}; leave it out for none")
    return tuple(values)


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"SamplingParams: {name}={value!r} is not an integer")
