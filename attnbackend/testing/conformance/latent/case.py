"""One thing that one check of latent attention looks at."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from attnbackend.testing.mla_cases import MLACase

__all__ = ["LatentCase", "LatentRefusal"]


@dataclass(frozen=True, kw_only=True)
class LatentCase:
    """A named batch; the id is unique within a check and does not depend on the seed."""

    id: str
    feature: str
    """The claim that it probes: a row of the report's matrix."""
    mla: MLACase


@dataclass(frozen=True, kw_only=True)
class LatentRefusal(LatentCase):
    """A layer that asks for something that the backend does not claim."""

    field: str
    """Field of `AttentionSelectorConfig` that the refusal must name."""
    asked: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Fields of the configuration."""
