"""A broken backend, and the check that must see it."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

from attnbackend.backend import AttentionBackend
from attnbackend.testing.conformance.honest import HonestBackend, HonestBuilder, HonestImpl

__all__ = ["Mutant"]


@dataclass(frozen=True)
class Mutant:
    """The honest backend with one fault."""

    name: str
    fault: str
    """What is wrong, as a phrase."""
    caught_by: str
    """Name of the check that must reject it, whatever other checks do."""
    impl: type[HonestImpl] = HonestImpl
    builder: type[HonestBuilder] = HonestBuilder
    shown_by: str | None = None
    """The case of a quick run that shows it, or a pattern of cases of a full run; None: a quick run does."""
    claims: dict[str, Any] = field(default_factory=dict, hash=False)
    """Class attributes over those of the honest backend."""

    def backend(self) -> type[AttentionBackend]:
        """The class, not registered."""
        body = {
            "get_name": staticmethod(lambda: f"MUTANT_{self.name.upper()}"),
            "get_impl_cls": staticmethod(lambda: self.impl),
            "get_builder_cls": staticmethod(lambda: self.builder),
            **self.claims,
            "__module__": __name__,
            "__doc__": self.fault,
        }
        return types.new_class(f"Mutant_{self.name}", (HonestBackend,), {}, lambda ns: ns.update(body))
