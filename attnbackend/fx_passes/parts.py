"""Parts of a graph as graphs of their own, and the graph that calls them one after the other."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from attnbackend.fx_passes.nodes import tensor_of

__all__ = ["Part", "SplitGraph", "build_parts"]


@dataclass(frozen=True)
class Part:
    """A piece, or the calls between two pieces."""

    name: str
    graph_module: GraphModule
    is_between: bool
    """Attention and cache writes, which run between graphs."""

    def example_inputs(self) -> list[Any]:
        return [tensor_of(node) for node in self.graph_module.graph.nodes if node.op == "placeholder"]

    def signature(self) -> Hashable:
        """Equal for parts that one compilation serves: the same calls on inputs of the same kinds."""
        nodes = list(self.graph_module.graph.nodes)
        place = {node: i for i, node in enumerate(nodes)}
        storages: dict[Any, int] = {}
        return tuple(
            (node.op, _kind(tensor_of(node), storages))
            if node.op == "placeholder"
            else (node.op, self._target(node), _text(node.args, place), _text(node.kwargs, place))
            for node in nodes
        )

    def _target(self, node: Node) -> Hashable:
        """What a node calls; an attribute counts as itself."""
        if node.op == "get_attr":
            return id(operator.attrgetter(str(node.target))(self.graph_module))
        return node.target


def _text(arguments: Any, place: Mapping[Node, int]) -> str:
    return repr(map_aggregate(arguments, lambda a: _Place(place[a]) if isinstance(a, Node) else a))


class _Place(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"


def _kind(value: Any, storages: dict[Any, int]) -> Hashable:
    """What compiled code depends on: of tensors, which share memory too."""
    if not isinstance(value, Tensor):
        return type(value), str(value)
    memory = storages.setdefault(value.untyped_storage()._cdata, len(storages))
    shape = tuple(map(str, value.shape)), tuple(map(str, value.stride())), str(value.storage_offset())
    return type(value), value.dtype, value.device, shape, value.requires_grad, memory


@dataclass(frozen=True)
class SplitGraph:
    """A graph in parts."""

    graph_module: GraphModule
    """Calls the parts, its submodules by their names, in order."""
    parts: tuple[Part, ...]


def build_parts(graph_module: GraphModule, part_of: Mapping[Node, int]) -> SplitGraph:
    """Makes a graph of each part, and one that calls them.

    Args:
        graph_module: left as it is.
        part_of: the part of each node, inputs and output excepted; no node needs one of a later part.
    """
    outer = Graph()
    values: dict[Node, Node] = {}
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            values[node] = outer.node_copy(node)
    root: dict[str, Any] = {str(n.target): _attribute(graph_module, n) for n in values if n.op == "get_attr"}
    parts = []
    for number in sorted(set(part_of.values())):
        part, inputs, outputs = _build_part(graph_module, part_of, number)
        call = outer.call_module(part.name, tuple(values[node] for node in inputs))
        values.update({n: outer.call_function(operator.getitem, (call, i)) for i, n in enumerate(outputs)})
        root[part.name] = part.graph_module
        parts.append(part)
    (result,) = (node for node in graph_module.graph.nodes if node.op == "output")
    outer.output(map_arg(result.args[0], values.__getitem__))
    return SplitGraph(GraphModule(root, outer), tuple(parts))


def _attribute(graph_module: GraphModule, node: Node) -> Any:
    return operator.attrgetter(str(node.target))(graph_module)


def _build_part(
    graph_module: GraphModule, part_of: Mapping[Node, int], number: int
) -> tuple[Part, list[Node], list[Node]]:
    """The part, what it takes and what it returns, as nodes of the whole graph."""
    nodes = [node for node in graph_module.graph.nodes if part_of.get(node) == number]
    inputs = _inputs(nodes, part_of, number)
    outputs = [node for node in nodes if any(part_of.get(user) != number for user in node.users)]
    graph, values = Graph(), {}
    for node in inputs:
        values[node] = graph.placeholder(node.name)
        values[node].meta = dict(node.meta)
    for node in nodes:
        for constant in node.all_input_nodes:
            if constant.op == "get_attr" and constant not in values:
                values[constant] = graph.node_copy(constant)
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[node] for node in outputs))
    name = f"between_{number // 2}" if number % 2 else f"piece_{number // 2}"
    return Part(name, GraphModule(graph_module, graph), bool(number % 2)), inputs, outputs


def _inputs(nodes: Sequence[Node], part_of: Mapping[Node, int], number: int) -> list[Node]:
    """Values from outside in the order of their first use, and before them the symbols of their sizes."""
    taken: dict[Node, None] = {}
    for node in nodes:
        for value in node.all_input_nodes:
            if part_of.get(value) != number and value.op != "get_attr":
                taken.setdefault(value)
    symbols = _symbols_of(taken, nodes[0].graph)
    return [*(n for n in symbols if n not in taken), *taken]


def _symbols_of(values: Mapping[Node, None], graph: Graph) -> list[Node]:
    wanted: set[Any] = set()
    for value in values:
        x = value.meta.get("example_value")
        if isinstance(x, Tensor):
            for size in (*x.shape, *x.stride()):
                if isinstance(size, torch.SymInt):
                    wanted |= size.node.expr.free_symbols
    placeholders = (n for n in graph.nodes if n.op == "placeholder")
    return [
        n for n in placeholders
        if isinstance(s := n.meta.get("example_value"), torch.SymInt) and s.node.expr in wanted
    ]  # fmt: skip
