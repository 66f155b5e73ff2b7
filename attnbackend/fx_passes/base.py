"""What a pass is, and the account that it gives of itself."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch.fx

__all__ = ["Change", "GraphPass", "PassReport"]


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
class PassReport:
    """What a pass did to a graph."""

    pass_name: str
    changes: tuple[Change, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.pass_name}: {len(self.changes)} changes", *map(str, self.changes)]
        return "\n  ".join(lines)


class GraphPass(ABC):
    """Rewrites a graph in place. The same pass serves Dynamo's, export's and Inductor's graphs."""

    name: str

    @abstractmethod
    def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
        """Rewrites ``graph_module.graph`` and says what it did."""

    def fingerprint(self) -> str:
        """What compiled code depends on: by default the pass's source file and the instance's fields."""
        source = inspect.getsource(sys.modules[type(self).__module__])
        fields = sorted((k, repr(v)) for k, v in vars(self).items())
        return f"{source}{fields}"
