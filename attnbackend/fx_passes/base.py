"""What a pass is, and the account that it gives of itself."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch.fx

from attnbackend.fx_passes.fingerprints import pass_text
from attnbackend.fx_passes.nodes import find_ops, tensor_of
from attnbackend.fx_passes.shape_range import ShapeRange

__all__ = ["Change", "GraphPass", "NearMiss", "PassConfig", "PassReport", "Stage"]


class Stage(enum.IntEnum):
    """When a pass runs; within a stage, passes run in the order in which they are given."""

    PREPARE = 0
    """Functionalised calls become plain ones."""
    RECOGNISE = 1
    """Attention in other words becomes the agnostic ops."""
    SELECT = 2
    """Agnostic ops become those of the backend that serves each node."""
    FUSE = 3
    """Several nodes become one."""
    CLEAN = 4
    """What nobody needs goes."""


@dataclass(frozen=True)
class PassConfig:
    """What is so of a whole graph, and what a pass may decide by before it looks at any node."""

    device_type: str | None
    """Of the graph's ops; None: the graph has none of attnbackend's."""

    @classmethod
    def of(cls, graph_module: torch.fx.GraphModule) -> PassConfig:
        for op in find_ops(graph_module.graph):
            cache = op.arguments().get("kv_cache")
            if cache is not None:
                return cls(tensor_of(cache).device.type)
        return cls(None)


@dataclass(frozen=True)
class Change:
    """One node that a pass rewrote."""

    node: str
    """Name of the node."""
    before: str
    after: str
    because: str

    def __str__(self) -> str:
        return f"{self.node}: {self.before} -> {self.after} ({self.because})"


@dataclass(frozen=True)
class NearMiss:
    """A place where a pass found the beginning of what it looks for, and left it as it was."""

    node: str
    what: str
    """What the place nearly is."""
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.node}: no {self.what}: {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class PassReport:
    """What a pass did to a graph."""

    pass_name: str
    changes: tuple[Change, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    not_applied: tuple[str, ...] = ()
    """Why the pass was not run on the graph at all."""

    def __str__(self) -> str:
        if self.not_applied:
            return f"{self.pass_name}: not applied: {'; '.join(self.not_applied)}"
        lines = [f"{self.pass_name}: {len(self.changes)} changes", *map(str, self.changes)]
        return "\n  ".join([*lines, *map(str, self.near_misses)])


class GraphPass(ABC):
    """Rewrites a graph in place. The same pass serves Dynamo's, export's and Inductor's graphs."""

    name: str
    stage: Stage = Stage.FUSE

    def applies(self, config: PassConfig, shape_range: ShapeRange) -> list[str]:
        """Why the pass is of no use for such graphs; empty: it is run."""
        return []

    @abstractmethod
    def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
        """Rewrites ``graph_module.graph`` and says what it did."""

    def settings(self) -> dict[str, Any]:
        """What of the instance compiled code depends on: by default all of its fields."""
        return vars(self)

    def fingerprint(self) -> str:
        """What compiled code depends on: the settings, the sources of the pass's class, of the classes that
        it is derived from, and of the modules of these with what they import; torch's and ours are known."""
        return f"{self.name}{pass_text(type(self), self.settings())}"
