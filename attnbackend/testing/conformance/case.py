"""One thing that one check looks at."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from attnbackend.testing.cases import AttentionCase

__all__ = ["ConformanceCase", "RefusalCase"]


@dataclass(frozen=True, kw_only=True)
class ConformanceCase:
    """A named batch; the id is unique within a check and does not depend on the seed."""

    id: str
    feature: str
    """The claim that it probes: a row of the report's matrix."""
    attention: AttentionCase
    in_every_way: bool = False
    """Whether the call is made with a plan and without an LSE too, which kernels serve by other paths."""


@dataclass(frozen=True, kw_only=True)
class RefusalCase(ConformanceCase):
    """A call that asks for something that the backend does not claim."""

    field: str
    """Field of `AttentionSelectorConfig` that the refusal must name."""
    extras: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Further keyword arguments of the op; a number stands for a float32 tensor of one element."""
