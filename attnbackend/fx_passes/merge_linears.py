"""`MergeLinears`: linear layers that read one input become one `merged_linear`."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from attnbackend.fx_passes.base import Change, GraphPass, PassReport
from attnbackend.fx_passes.edits import emit, refresh_strides
from attnbackend.fx_passes.nodes import may_write, tensor_of
from attnbackend.ops.merged_linear import merged_linear

__all__ = ["MergeLinears"]


class MergeLinears(GraphPass):
    """Joins calls of ``F.linear`` on one input, of one dtype, all with a bias or all without.

    Weights and biases must be inputs of the graph, not computed in it.
    It runs on Dynamo's graph, for models whose weights `layers.merge_linears` laid together; where they do
    not lie so the answer is the same, at the cost of a copy. Calls with a write of any memory between them
    are left alone: it may be of their input.
    """

    name = "merge_linears"

    def run(self, graph_module: GraphModule) -> PassReport:
        graph = graph_module.graph
        changes = tuple(_merge(graph, nodes) for nodes in _siblings(graph))
        if changes:
            graph_module.recompile()
        return PassReport(self.name, changes)


def _siblings(graph: Graph) -> list[list[Node]]:
    groups: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is F.linear:
            x, weight, bias = _arguments(node)
            if _is_given(weight) and (bias is None or _is_given(bias)):
                groups.setdefault((x, tensor_of(weight).dtype, bias is None), []).append(node)
    return [nodes for nodes in groups.values() if len(nodes) > 1 and not _has_writes_between(nodes)]


def _is_given(value: Any) -> bool:
    return isinstance(value, Node) and value.op in ("placeholder", "get_attr")


def _has_writes_between(nodes: list[Node]) -> bool:
    node = nodes[0]
    while node is not nodes[-1]:
        node = node.next
        if may_write(node):
            return True
    return False


def _arguments(node: Node) -> tuple[Any, Any, Any]:
    named = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return named["input"], named["weight"], named.get("bias")


def _merge(graph: Graph, nodes: list[Node]) -> Change:
    """The joint product where the first of them is; each layer's share of it in its place."""
    found = [_arguments(node) for node in nodes]
    x, weights = found[0][0], [weight for _, weight, _ in found]
    biases = [] if found[0][2] is None else [bias for *_, bias in found]
    names = [node.name for node in nodes]
    sizes = [tensor_of(weight).shape[0] for weight in weights]
    with graph.inserting_before(nodes[0]):
        whole = emit(graph, merged_linear, x, weights, biases, like=nodes[0])
        parts = emit(graph, torch.split, whole, sizes, -1, like=nodes[0])
        shares = [emit(graph, operator.getitem, parts, place, like=node) for place, node in enumerate(nodes)]
    for node, share in zip(nodes, shares, strict=True):
        node.replace_all_uses_with(share)
        graph.erase_node(node)
    refresh_strides(graph, shares)
    return Change(", ".join(names), f"{len(nodes)} x linear", merged_linear.name(), f"all read {x.name}")
