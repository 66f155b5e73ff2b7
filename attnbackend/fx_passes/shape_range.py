"""For how many tokens a graph is compiled."""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import GraphModule

from attnbackend._torch_compat import size_bounds
from attnbackend.fx_passes.nodes import find_ops, tensor_of

__all__ = ["ShapeRange"]


class ShapeRange(NamedTuple):
    """Numbers of tokens, both ends included, for which a graph is meant."""

    min_tokens: int
    max_tokens: int | None
    """None: no bound is known."""

    @classmethod
    def of(cls, graph_module: GraphModule) -> ShapeRange:
        """From the queries, or else the keys, of the graph's ops; (0, None) where it has none."""
        for op in find_ops(graph_module.graph):
            given = op.arguments()
            rows = given.get("query", given.get("key"))
            if rows is not None:
                return cls(*size_bounds(tensor_of(rows).shape[0]))
        return cls(0, None)

    def __str__(self) -> str:
        if self.max_tokens is None:
            return f"{self.min_tokens} or more tokens"
        if self.min_tokens == self.max_tokens:
            return f"{self.min_tokens} tokens"
        return f"{self.min_tokens} to {self.max_tokens} tokens"
