"""Who decides which backend a node gets: a name, a function, an order of preference, measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch.fx import Node

from attnbackend.fx_passes.shape_range import ShapeRange
from attnbackend.registry import resolve_backend
from attnbackend.selector import AttentionSelectorConfig, Selection, backend_reasons, select_backend

__all__ = ["BackendChoice", "BackendPriorities", "Measured", "MeasuredTable", "Site", "choose_backend"]


@dataclass(frozen=True)
class Site:
    """Where in a model, and for which steps, a backend is wanted."""

    layer: str | None
    """Path of the innermost module, as tracing noted it."""
    tokens: ShapeRange
    """Numbers of tokens for which the graph is compiled."""

    @classmethod
    def of(cls, node: Node, tokens: ShapeRange) -> Site:
        stack = node.meta.get("nn_module_stack")
        return cls(next(reversed(stack.values()))[0] if stack else None, tokens)


@runtime_checkable
class BackendPriorities(Protocol):
    """Decides by an order of preference."""

    def rank(self, config: AttentionSelectorConfig, site: Site) -> Sequence[str]:
        """Names, the best first: the first that can serve is taken. None at all: the automatic choice."""
        ...


BackendChoice = str | Callable[[AttentionSelectorConfig], str | None] | BackendPriorities | None
"""A name for every node; a function that names one for each node, or None for the automatic choice; an order
of preference for each node; None: the automatic choice."""


def choose_backend(choice: BackendChoice, config: AttentionSelectorConfig, site: Site) -> Selection:
    """The backend for a node.

    Raises:
        ValueError: what is chosen cannot serve; reasons carry values.
    """
    if isinstance(choice, BackendPriorities):
        return _first_of(choice.rank(config, site), config)
    return select_backend(config, backend=choice(config) if callable(choice) else choice)


def _first_of(names: Sequence[str], config: AttentionSelectorConfig) -> Selection:
    if not names:
        return select_backend(config)
    refused: dict[str, str] = {}
    for name in names:
        reasons = backend_reasons(name, config)
        if not reasons:
            behind = f"; {', '.join(refused)} cannot serve" if refused else ""
            return Selection(name, resolve_backend(name), f"first of the given order{behind}")
        refused[name] = "; ".join(map(str, reasons))
    tried = "".join(f"\n  {name}: {why}" for name, why in refused.items())
    raise ValueError(f"no backend of the given order can serve {config}. Tried:{tried}")


@dataclass(frozen=True)
class Measured:
    """What backends took for layers and steps of one kind."""

    times_us: Mapping[str, float]
    """Backend name -> microseconds."""
    where: Mapping[str, Any]
    """Fields of `AttentionSelectorConfig` and the values that they must have; others may be anything."""
    min_tokens: int = 0
    max_tokens: int | None = None

    def fits(self, config: AttentionSelectorConfig, tokens: ShapeRange) -> bool:
        """Whether every size of ``tokens`` is within what was measured."""
        if tokens.min_tokens < self.min_tokens:
            return False
        if self.max_tokens is not None and (tokens.max_tokens or self.max_tokens + 1) > self.max_tokens:
            return False
        return all(_text(getattr(config, field)) == _text(value) for field, value in self.where.items())


def _text(value: Any) -> str:
    """Types and enums by their names, as a file has them."""
    return str(value).removeprefix("torch.")


@dataclass(frozen=True)
class MeasuredTable:
    """Prefers what was measured to be fastest; the first entry that fits decides."""

    entries: tuple[Measured, ...]

    def rank(self, config: AttentionSelectorConfig, site: Site) -> Sequence[str]:
        """Backends of the first entry that fits, the fastest first; empty where none fits."""
        for entry in self.entries:
            if entry.fits(config, site.tokens):
                return sorted(entry.times_us, key=entry.times_us.__getitem__)
        return ()

    @classmethod
    def from_json(cls, path: str | Path) -> MeasuredTable:
        """From a list of objects with the fields of `Measured`.

        Raises:
            ValueError: a field of the configuration that does not exist.
            TypeError: a field that `Measured` does not have.
        """
        known = AttentionSelectorConfig.__dataclass_fields__
        entries = tuple(Measured(**entry) for entry in json.loads(Path(path).read_text()))
        for entry in entries:
            for name in entry.where:
                if name not in known:
                    raise ValueError(
                        f"{path}: where={name!r} is no field; expected one of {', '.join(known)}"
                    )
        return cls(entries)
