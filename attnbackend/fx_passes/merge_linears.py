"""`MergeLinears`: linear layers that read one input become one `merged_linear`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from attnbackend._torch_compat import FakeTensor, fake_mode_of
from attnbackend.fx_passes.base import Change, GraphPass, NearMiss, PassReport
from attnbackend.fx_passes.edits import emit, restrided, set_values
from attnbackend.fx_passes.forms import NoMatch
from attnbackend.fx_passes.nodes import may_write, tensor_of
from attnbackend.ops.merged_linear import merged_linear

__all__ = ["MergeLinears", "check_siblings", "check_weight", "join_all", "linear_arguments", "siblings"]


class MergeLinears(GraphPass):
    """Joins calls of ``F.linear`` on one input, of one dtype, all with a bias or all without.

    It runs on Dynamo's graph, for models whose weights `layers.merge_linears` laid together; where they do
    not lie so the answer is the same, at the cost of a copy.

    Each layer's output is then a part of the joint one, with the strides of that. Layers are left alone, with
    the reason, where somebody could tell: an output is returned, or goes where strides are taken for granted;
    where a weight or bias is computed in the graph; where a write of any memory, or a change of mode such as
    autocast, comes between them; where anything needs a gradient, which the op does not give.
    """

    name = "merge_linears"

    def run(self, graph_module: GraphModule) -> PassReport:
        found = siblings(graph_module.graph, F.linear)
        return join_all(self.name, graph_module, ((nodes, _merge) for nodes in found))


def join_all(
    name: str, graph_module: GraphModule,
    found: Iterable[tuple[list[Node], Callable[[Graph, list[Node], str], Change]]],
) -> PassReport:  # fmt: skip
    """The report of pass ``name``: groups of layers, each joined by its function, or why it was not."""
    changes, misses = [], []
    for nodes, join in found:
        names = ", ".join(node.name for node in nodes)
        try:
            changes.append(join(graph_module.graph, nodes, names))
        except NoMatch as no:
            misses.append(NearMiss(names, "joint product", (str(no),)))
    if changes:
        graph_module.recompile()
    return PassReport(name, tuple(changes), tuple(misses))


def siblings(graph: Graph, linear: Any) -> Iterator[list[Node]]:
    """Calls of ``linear`` on one input: those that may be joined together; those that may not, each alone."""
    by_input: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is linear:
            by_input.setdefault(linear_arguments(node)[0], []).append(node)
    for nodes in by_input.values():
        groups: dict[Any, list[Node]] = {}
        for node in nodes if len(nodes) > 1 else ():
            _, weight, bias = linear_arguments(node)
            given = all(_is_given(x) for x in (weight, bias) if x is not None)
            groups.setdefault((given or node, tensor_of(weight).dtype, bias is None), []).append(node)
        yield from groups.values()


def _is_given(value: Any) -> bool:
    """Whether the graph is given it, rather than computes it."""
    return isinstance(value, Node) and value.op in ("placeholder", "get_attr")


def linear_arguments(node: Node) -> tuple[Any, Any, Any]:
    """Input, weight, and bias or None."""
    named = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return named["input"], named["weight"], named.get("bias")


def check_weight(node: Node) -> None:
    """Raises NoMatch where a layer's weight or bias is computed, or the weight is no plain matrix."""
    _, weight, bias = linear_arguments(node)
    if computed := [x for x in (weight, bias) if x is not None and not _is_given(x)]:
        raise NoMatch(f"{computed[0]} is computed in the graph")
    if type(tensor_of(weight)) is not FakeTensor or tensor_of(weight).dim() != 2:
        raise NoMatch(f"{weight} is no plain matrix, but {tensor_of(weight)}")


def check_siblings(nodes: Sequence[Node]) -> None:
    """Raises NoMatch where there is one alone, or memory may be written between them."""
    if len(nodes) == 1:
        raise NoMatch(f"its dtype or its bias sets it apart from others on {linear_arguments(nodes[0])[0]}")
    first, *_, last = sorted(nodes)
    if (between := _write_between((first, last))) is not None:
        raise NoMatch(f"{between} may write memory, or change a mode, between them")


def _check(nodes: list[Node]) -> None:
    for node in nodes:
        check_weight(node)
        if tensor_of(node).requires_grad:
            raise NoMatch(f"{node} needs a gradient, which {merged_linear.name()} does not give")
    check_siblings(nodes)


def _write_between(nodes: Sequence[Node]) -> Node | None:
    """What may write memory behind the first, up to the last."""
    node = nodes[0]
    while node is not nodes[-1]:
        node = node.next
        if may_write(node):
            return node
    return None


def _merge(graph: Graph, nodes: list[Node], names: str) -> Change:
    """The joint product where the first of them is; each layer's share of it in its place."""
    _check(nodes)
    found = [linear_arguments(node) for node in nodes]
    x, weights = found[0][0], [weight for _, weight, _ in found]
    biases = [] if found[0][2] is None else [bias for *_, bias in found]
    sizes = [tensor_of(weight).shape[0] for weight in weights]
    restrided(graph, dict(zip(nodes, _shares(x, weights, biases, sizes), strict=True)))
    for given in (*weights, *biases):
        if given.op == "get_attr":
            nodes[0].prepend(given)
    with graph.inserting_before(nodes[0]):
        whole = emit(graph, merged_linear, x, weights, biases, like=nodes[0])
        parts = emit(graph, torch.split, whole, sizes, -1, like=nodes[0])
        shares = [emit(graph, operator.getitem, parts, place, like=node) for place, node in enumerate(nodes)]
    for node, share in zip(nodes, shares, strict=True):
        node.replace_all_uses_with(share)
        graph.erase_node(node)
    set_values(restrided(graph, {share: tensor_of(share) for share in shares}))
    return Change(names, f"{len(nodes)} x linear", merged_linear.name(), f"all read {x.name}")


def _shares(x: Node, weights: Sequence[Node], biases: Sequence[Node], sizes: list[int]) -> Sequence[Any]:
    """What the layers' outputs would be: parts of the joint one."""
    given: Any = [tensor_of(x), *([tensor_of(y) for y in ys] for ys in (weights, biases))]
    with fake_mode_of(given):
        return torch.split(merged_linear(*given), sizes, -1)
