"""A graph of Dynamo's cut at attention and cache writes, so that these can run between CUDA graphs."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from attnbackend.fx_passes.nodes import find_ops, tensor_of, written_by
from attnbackend.fx_passes.parts import SplitGraph, build_parts
from attnbackend.ops.library import role_of

__all__ = ["split_at_attention"]

PartOf = dict[Node, int]
"""Even: a piece. Odd: attention and cache writes."""

_ALLOCATIONS = {"new_empty", "new_zeros", "new_full", "empty", "zeros", "full", "empty_like", "zeros_like"}
"""They write only memory that they make, so they may move up past a write of other memory."""


def split_at_attention(graph_module: GraphModule) -> SplitGraph | str:
    """Cuts a graph in pieces and, between them, attention with its cache writes.

    Args:
        graph_module: with "example_value" in its nodes' meta, as Dynamo leaves it. It is made ready in place,
            without a change of meaning: sizes and floats become numbers, allocations move to before the calls
            that they are for.

    Returns:
        The parts, or why the graph is to be left whole.
    """
    graph = graph_module.graph
    calls = {found.node for found in find_ops(graph) if role_of(found.op) is not None}
    if not calls:
        return "there is no attention in the graph"
    _spell_out_sizes(graph)
    if reason := _write_out_floats(graph):
        return reason
    part_of = _assign(graph, calls)
    reason = _open_region(graph, part_of) or _written_alias(graph, part_of)
    return build_parts(graph_module, part_of) if reason is None else reason


def _spell_out_sizes(graph: Graph) -> None:
    """``x.size()`` as a tuple of numbers, since a part returns tensors and numbers, not tuples."""
    known = {str(value): n for n in graph.nodes if (value := _symbol(n)) is not None}
    for node in list(graph.nodes):
        if _is_size(node):
            x: Any = node.args[0]
            sizes = enumerate(tensor_of(x).shape)
            _replace(graph, node, tuple(_number(graph, x, dim, size, known) for dim, size in sizes))


def _symbol(node: Node) -> torch.SymInt | None:
    value = node.meta.get("example_value")
    return value if node.op == "placeholder" and isinstance(value, torch.SymInt) else None


def _is_size(node: Node) -> bool:
    by_method = node.op == "call_method" and node.target == "size" and len(node.args) == 1
    return (by_method and not node.kwargs) or (node.target is getattr and node.args[1] == "shape")


def _number(graph: Graph, x: Node, dim: int, size: int | torch.SymInt, known: dict[str, Node]) -> int | Node:
    if isinstance(size, int):
        return size
    if str(size) not in known:
        place = x if x.op != "placeholder" else [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(place):
            known[str(size)] = graph.call_function(torch.ops.aten.sym_size.int, (x, dim))
        known[str(size)].meta["example_value"] = size
    return known[str(size)]


def _replace(graph: Graph, node: Node, value: Any) -> None:
    for user in list(node.users):
        if isinstance(value, tuple) and _is_constant_item(user):
            _replace(graph, user, value[user.args[1]])  # type: ignore[index]
            continue
        user.args, user.kwargs = map_aggregate((user.args, user.kwargs), lambda a: value if a is node else a)
    graph.erase_node(node)


def _is_constant_item(node: Node) -> bool:
    if node.target is not operator.getitem:
        return False
    index = node.args[1]
    edges = (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)
    return all(edge is None or isinstance(edge, int) for edge in edges)


def _write_out_floats(graph: Graph) -> str | None:
    """Floats that come from outside, such as an epsilon, as numbers: compiled code is guarded on them.

    As values of the graph they would go from part to part, which no part can return.
    """
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if node.op != "placeholder" and isinstance(value, torch.SymFloat):
            try:
                _replace(graph, node, float(value))
            except RuntimeError:  # No value is known while tracing: it is read from a tensor on the device.
                return f"{node.name} is a number that is known only when the graph runs"
    return None


def _assign(graph: Graph, calls: set[Node]) -> PartOf:
    part_of: PartOf = {}
    part, first_call = 0, None
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node in calls:
            first_call = node if part % 2 == 0 else first_call
            part += part % 2 == 0
        elif part % 2 and first_call is not None and _moves_up(node):
            first_call.prepend(node)
            part_of[node] = part - 1
            continue
        else:
            part += part % 2
        part_of[node] = part
    return part_of


def _moves_up(node: Node) -> bool:
    """Whether a node may run before the cache writes in front of it."""
    name = getattr(node.target, "__name__", node.target)
    return name in _ALLOCATIONS or (isinstance(node.meta.get("example_value"), torch.SymInt))


def _open_region(graph: Graph, part_of: PartOf) -> str | None:
    """Autocast or a change of grad mode that begins in one part and ends in another."""
    open_in: list[int] = []
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            return "grad mode changes in it"
        if name == "_enter_autocast":
            open_in.append(part_of[node])
        if name == "_exit_autocast" and open_in.pop() != part_of[node]:
            return "autocast goes on across attention"
    return None


def _written_alias(graph: Graph, part_of: PartOf) -> str | None:
    """Memory written in one part and read in it or later under another name, both of an earlier part's.

    Compiled by themselves, parts keep what they return in memory that they choose.
    """
    for node, value in _writes(graph, part_of):
        for other in part_of:
            if (
                other is not value and part_of[other] < part_of[node] and _same_memory(other, value)
                and any(part_of.get(user, part_of[node]) >= part_of[node] for user in other.users)
            ):  # fmt: skip
                return f"{node.name} writes {value.name}, and {other.name} is the same memory"
    return None


def _writes(graph: Graph, part_of: PartOf) -> Iterator[tuple[Node, Node]]:
    for node in graph.nodes:
        for value in written_by(node):
            if isinstance(value, Node) and value in part_of and part_of[value] != part_of[node]:
                yield node, value


def _same_memory(a: Node, b: Node) -> bool:
    x, y = a.meta.get("example_value"), b.meta.get("example_value")
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return False
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata
