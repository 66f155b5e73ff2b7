"""`JoinCPULinears`: a CPU's linear layers of one input become one op, which stages the input once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

from torch.fx import Graph, GraphModule, Node

from attnbackend.fx_passes.base import Change, GraphPass, PassReport
from attnbackend.fx_passes.edits import emit
from attnbackend.fx_passes.forms import NoMatch, name_of
from attnbackend.fx_passes.merge_linears import (
    check_siblings,
    check_weight,
    join_all,
    linear_arguments,
    siblings,
)
from attnbackend.fx_passes.nodes import tensor_of
from attnbackend.ops.cpu_linear import MULTIPLE, cpu_gated_linear, cpu_linear, cpu_linears

__all__ = ["JoinCPULinears"]

_MOST = 3
"""Layers of one op."""


class JoinCPULinears(GraphPass):
    """Joins calls of the op `cpu_linear` on one input.

    ``silu(gate) * up`` of two of them becomes `cpu_gated_linear`, others `cpu_linears`; every output keeps
    its strides. Layers are left alone, with the reason, where a weight or bias is computed in the graph, or
    where a write of any memory, or a change of mode such as autocast, comes between them.
    """

    name = "join_cpu_linears"

    def run(self, graph_module: GraphModule) -> PassReport:
        ways = ((_gates, _join_gate), (_groups, _join))
        found = ((nodes, join) for find, join in ways for nodes in find(graph_module.graph))
        return join_all(self.name, graph_module, found)


def _gates(graph: Graph) -> Iterator[list[Node]]:
    """Of ``silu(gate) * up``: gate, up, SiLU and product, of which others read the product alone."""
    for node in list(graph.nodes):
        if name_of(node) != "mul" or len(node.args) != 2 or node.kwargs:
            continue
        for silu, up in (node.args, node.args[::-1]):
            if name_of(silu) != "silu" or not _is_linear(up) or not _is_linear(gate := silu.args[0]):
                continue
            if all(len(x.users) == 1 for x in (silu, up, gate)) and gate.args[0] is up.args[0]:
                yield [gate, up, silu, node]
                break


def _groups(graph: Graph) -> Iterator[list[Node]]:
    """Others of one input, at most as many as an op takes."""
    for nodes in list(siblings(graph, cpu_linear)):
        for first in range(0, len(nodes), _MOST):
            yield nodes[first : first + _MOST]


def _is_linear(node: object) -> bool:
    return isinstance(node, Node) and node.target is cpu_linear


def _check(nodes: Iterable[Node]) -> None:
    for node in nodes:
        check_weight(node)
        _, weight, _ = linear_arguments(node)
        if tensor_of(weight).shape[1] % MULTIPLE:
            raise NoMatch(f"{weight} has {tensor_of(weight).shape[1]} inputs, no multiple of {MULTIPLE}")


def _join_gate(graph: Graph, nodes: list[Node], names: str) -> Change:
    gate, up, _, product = nodes
    _check((gate, up))
    check_siblings(nodes)
    (x, gate_weight, gate_bias), (_, up_weight, up_bias) = map(linear_arguments, (gate, up))
    if tensor_of(gate_weight).shape != tensor_of(up_weight).shape:
        raise NoMatch(f"{gate_weight} and {up_weight} are of different shapes")
    with graph.inserting_before(product):
        joint = emit(graph, cpu_gated_linear, x, gate_weight, up_weight, gate_bias, up_bias, like=gate)
    product.replace_all_uses_with(joint)
    for node in sorted(nodes, reverse=True):
        graph.erase_node(node)
    return Change(names, "silu(linear) * linear", cpu_gated_linear.name(), f"both read {x.name}")


def _join(graph: Graph, nodes: list[Node], names: str) -> Change:
    _check(nodes)
    check_siblings(nodes)
    found = [linear_arguments(node) for node in nodes]
    weights, biases = ([x[i] for x in found] + [None] * (_MOST - len(found)) for i in (1, 2))
    for given in (*weights, *biases):
        if given is not None and given.op == "get_attr":
            nodes[0].prepend(given)
    with graph.inserting_before(nodes[0]):
        whole = emit(graph, cpu_linears, found[0][0], *weights, *biases, like=nodes[0])
        parts = [emit(graph, operator.getitem, whole, place, like=node) for place, node in enumerate(nodes)]
    for node, part in zip(nodes, parts, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    return Change(names, f"{len(nodes)} x linear", cpu_linears.name(), f"all read {found[0][0].name}")
