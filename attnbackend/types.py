"""The small vocabulary that every other module speaks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

__all__ = [
    "AttentionCGSupport",
    "AttentionType",
    "KVCacheLayout",
    "LSEBase",
    "MultipleOf",
    "Reason",
    "Unavailable",
    "describe",
]


class AttentionType(enum.StrEnum):
    """What the keys are to the query; a string, so that graphs hold it as a constant."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"attn_type={value!r} is unknown; allowed: {', '.join(cls)}")

    @property
    def keeps_no_cache(self) -> bool:
        """Whether the keys are those of the call itself, in ``key`` and ``value``."""
        return self in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class AttentionCGSupport(enum.IntEnum):
    """How much of a backend's work a CUDA graph can hold; a larger value includes the smaller."""

    NEVER = 0
    """Attention runs between graphs."""
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Batches in which every request brings one token."""
    UNIFORM_BATCH = 2
    """Batches in which every request brings the same number of tokens."""
    ALWAYS = 3
    """Any batch, mixed prefill and decode included."""


class KVCacheLayout(enum.StrEnum):
    """Physical order within a page. The logical shape of a cache is the same in both."""

    NHD = "NHD"
    """Token, head, element."""
    HND = "HND"
    """Head, token, element."""


class LSEBase(enum.StrEnum):
    """Logarithm that a kernel's softmax LSE is in; what leaves an op is always natural."""

    E = "e"
    TWO = "2"


@dataclass(frozen=True)
class MultipleOf:
    """Any positive multiple of ``base``, optionally within ``[low, high]``.

    Raises:
        ValueError: ``base`` is not positive, or no multiple lies between the limits.
    """

    base: int
    low: int | None = None
    high: int | None = None

    def __post_init__(self) -> None:
        if self.base < 1:
            raise ValueError(f"base={self.base} has no multiples; it must be at least 1")
        if self.high is not None and self.at_least(1) > self.high:
            raise ValueError(f"no multiple of {self.base} lies in {self.low or 1}..{self.high}")

    def __contains__(self, value: object) -> bool:
        return (
            isinstance(value, int)
            and value > 0
            and value % self.base == 0
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
        )

    def at_least(self, value: int) -> int:
        """The smallest multiple from ``value`` and ``low`` on; it may exceed ``high``."""
        floor = max(value, self.low or 1, 1)
        return -(-floor // self.base) * self.base

    def at_most(self, value: int) -> int:
        """The largest multiple up to ``value`` and ``high``; it may fall below ``low``."""
        ceiling = value if self.high is None else min(value, self.high)
        return ceiling // self.base * self.base

    def __str__(self) -> str:
        text = f"multiples of {self.base}"
        if self.low is not None:
            text += f" from {self.low}"
        if self.high is not None:
            text += f" to {self.high}"
        return text


def describe(value: object) -> str:
    """A configuration's value as messages show it: ``bfloat16`` rather than ``torch.bfloat16``."""
    return str(value).removeprefix("torch.")


@dataclass(frozen=True)
class Reason:
    """Why a backend cannot serve a configuration, in a form that people and programs can read."""

    field: str
    """Name of the configuration's field at fault."""
    value: Any
    """What was asked for."""
    allowed: str
    """What would have been accepted."""

    def __str__(self) -> str:
        return f"{self.field}={describe(self.value)} (allowed: {self.allowed})"


@dataclass(frozen=True)
class Unavailable(Reason):
    """Why a backend cannot run here whatever the configuration: its field is "probe".

    ``value`` is what importing or probing it found.
    """

    field: str = "probe"
    value: Any = "no cause given"
    allowed: str = "a working installation"

    def __str__(self) -> str:
        return f"unavailable: {self.value}"
