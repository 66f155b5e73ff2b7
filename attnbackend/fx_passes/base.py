"""What a pass is, and the account that it gives of itself."""

from __future__ import annotations

import enum
import inspect
import sys
import types
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch.fx

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

    def fingerprint(self) -> str:
        """What compiled code depends on: by default the pass's source file and the instance's fields."""
        try:
            source = inspect.getsource(sys.modules[type(self).__module__])
        except (OSError, TypeError):  # typed at a prompt
            source = f"{type(self).__qualname__} of process {_PROCESS}"
        fields = sorted((name, _stable(value)) for name, value in vars(self).items())
        return f"{source}{fields}"


_PROCESS = uuid.uuid4().hex


def _stable(value: Any, seen: frozenset[int] = frozenset()) -> str:
    """A text that is the same in another process exactly when the value means the same."""
    if isinstance(value, types.FunctionType):
        return _stable_function(value, seen)
    text = repr(value) + _source_of(type(value))
    return f"{text} of process {_PROCESS}" if " at 0x" in text else text


def _stable_function(function: types.FunctionType, seen: frozenset[int]) -> str:
    """Its source, and what it reads: closure, defaults, plain values and functions of its module."""
    if id(function) in seen:
        return function.__qualname__
    seen |= {id(function)}
    reads = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    closure = [_stable(cell.cell_contents, seen) for cell in function.__closure__ or ()]
    known = [(name, _stable(value, seen)) for name, value in reads.items() if _is_read(value, function)]
    try:
        source = inspect.getsource(function)
    except OSError:  # typed at a prompt
        return f"{function.__qualname__} of process {_PROCESS}"
    return f"{source}{closure}{_stable(function.__defaults__)}{known}"


_PLAIN = (str, bytes, int, float, tuple, list, set, frozenset, dict)


def _is_read(value: Any, function: types.FunctionType) -> bool:
    if isinstance(value, types.FunctionType):
        return value.__module__ == function.__module__
    return isinstance(value, _PLAIN)


def _source_of(cls: type) -> str:
    """Of a class written in Python elsewhere; its repr says nothing of its methods."""
    if cls.__module__.partition(".")[0] in ("builtins", "torch"):
        return ""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return f" of process {_PROCESS}" if cls.__module__ == "__main__" else ""
