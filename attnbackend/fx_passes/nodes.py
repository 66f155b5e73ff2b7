"""Finding attnbackend's ops in a graph, as plain calls and inside functionalisation's wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from attnbackend._torch_compat import FUNCTIONALIZED

__all__ = ["OpNode", "find_ops", "tensor_of"]


class OpNode(NamedTuple):
    """A call of an op, whichever form it has in the graph."""

    node: Node
    op: torch._ops.OpOverload

    @property
    def is_wrapped(self) -> bool:
        return self.node.target in FUNCTIONALIZED

    def arguments(self) -> dict[str, Any]:
        """Schema name -> argument (a Node or a constant), defaults left out.

        Of a wrapped op's written arguments the base is given, which may be larger than the argument.
        """
        given = dict(self.node.kwargs)
        names = [argument.name for argument in self.op._schema.arguments]
        if not self.is_wrapped:
            return {**dict(zip(names, self.node.args, strict=False)), **given}
        bases: Any = given.get("_all_bases", ())
        for name in names:
            index = given.get(f"_{name}_base_index")
            if index is not None:
                given[name] = bases[index]
        return {name: given[name] for name in names if name in given}

    def set_op(self, op: torch._ops.OpOverload) -> None:
        """Calls ``op`` instead; it must have the same schema."""
        if self.is_wrapped:
            self.node.args = (op, *self.node.args[1:])
        else:
            self.node.target = op


def find_ops(graph: Graph) -> Iterator[OpNode]:
    """Every call of an op in attnbackend's namespace, in the graph's order."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        target = node.args[0] if node.target in FUNCTIONALIZED else node.target
        if isinstance(target, torch._ops.OpOverloadPacket):
            target = target.default
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "attnbackend":
            yield OpNode(node, target)


def tensor_of(argument: Any) -> Any:
    """The fake tensor that a node stands for; constants as they are."""
    if not isinstance(argument, Node):
        return argument
    for key in ("val", "example_value"):
        if key in argument.meta:
            return argument.meta[key]
    raise ValueError(
        f"node {argument.name!r} carries neither 'val' nor 'example_value' in its meta; run the pass on a "
        "graph traced by torch.compile or torch.export, or propagate fake tensors through it first"
    )
