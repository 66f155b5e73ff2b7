"""A claim that a backend may make, and what a case must change to probe it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnbackend.backend import AttentionBackend
from attnbackend.types import AttentionType

__all__ = ["Feature"]


@dataclass(frozen=True)
class Feature:
    """Changes of an `AttentionCase` that probe one claim."""

    name: str
    claim: str
    """Row of the report's matrix."""
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    needs: tuple[str, ...] = ()
    """Boolean claims without which the case makes no sense."""
    times: int = 1
    """Heads, in multiples of the usual number: what is given for each head must be read for each."""

    def is_claimed_by(self, backend: type[AttentionBackend]) -> bool:
        kind = self.changes.get("attn_type", AttentionType.DECODER)
        return backend.supports_attn_type(kind) and all(getattr(backend, claim) for claim in self.needs)
