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
]


class AttentionType(enum.StrEnum):
    """What the keys are to the query; a string, so that graphs hold it as a constant."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.IntEnum):
    """How much of a backend's work a CUDA graph can hold. Ordered: a larger value includes the smaller."""

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
    """Base of the logarithm that a kernel's softmax LSE is in; what leaves an op is always natural."""

    E = "e"
    TWO = "2"


@dataclass(frozen=True)
class MultipleOf:
    """Any positive multiple of ``base``, optionally within ``[low, high]``."""

    base: int
    low: int | None = None
    high: int | None = None

    def __contains__(self, value: object) -> bool:
        return (
            isinstance(value, int)
            and value > 0
            and value % self.base == 0
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
        )

    def __str__(self) -> str:
        text = f"multiples of {self.base}"
        if self.low is not None:
            text += f" from {self.low}"
        if self.high is not None:
            text += f" to {self.high}"
        return text


@dataclass(frozen=True)
class Reason:
    """Why a backend cannot serve a configuration, in a form that people and programs can read."""

    field: str
    """Name of the configuration's field at fault; "probe" where the backend itself is unavailable."""
    value: Any
    """What was asked for."""
    allowed: str
    """What would have been accepted."""

    def __str__(self) -> str:
        if self.field == "probe":
            return f"unavailable: {self.value}"
        return f"{self.field}={self.value} (allowed: {self.allowed})"
