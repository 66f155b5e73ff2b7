"""Putting nodes into a graph: each gets the fake tensor that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from attnbackend._torch_compat import fake_mode_of, trace_fake
from attnbackend.fx_passes.forms import ASSERTION, Viewed, name_of, shape_of
from attnbackend.fx_passes.nodes import may_write, tensor_of

__all__ = [
    "emit",
    "emit_again",
    "emit_view",
    "first_write_between",
    "insert_traced",
    "nodes_between",
    "refresh_strides",
    "remove_unused",
]

aten = torch.ops.aten


def emit(graph: Graph, target: Any, *args: Any, like: Node, **kwargs: Any) -> Node:
    """A call at the graph's insertion point, with the meta that tracing would have given it.

    Args:
        graph: where to.
        target: the function.
        args, kwargs: its arguments.
        like: a node whose place in the model the new one has.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta.update({k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace")})
    key = "val" if "val" in like.meta else "example_value"

    def value(x: Node) -> Any:
        return x.meta.get("val", x.meta.get("example_value"))

    fake_args, fake_kwargs = map_arg(args, value), map_arg(kwargs, value)
    with fake_mode_of(fake_args, fake_kwargs):
        node.meta[key] = target(*fake_args, **fake_kwargs)
    return node


def emit_again(graph: Graph, node: Node, source: Node) -> Node:
    """The call that ``node`` is, of ``source`` instead of its first argument."""
    copy = graph.node_copy(node, lambda n: n)
    copy.args = (source, *node.args[1:])
    key = "val" if "val" in node.meta else "example_value"
    args: Any = map_arg(copy.args, lambda n: n.meta[key])
    kwargs: Any = map_arg(copy.kwargs, lambda n: n.meta[key])
    target: Any = getattr(type(args[0]), str(node.target)) if node.op == "call_method" else node.target
    with fake_mode_of(args):
        copy.meta = {**node.meta, key: target(*args, **kwargs)}
    return copy


def emit_view(graph: Graph, view: Viewed, like: Node) -> Node:
    """``view`` as nodes: dimensions of its source in its order, those of size 1 that it lacks taken away."""
    node, axes = view.source, list(view.axes)
    rank = len(shape_of(node))
    kept = [axis for axis in axes if axis is not None]
    dropped = [axis for axis in range(rank) if axis not in kept]
    order = [*dropped, *kept]
    if order != list(range(rank)):
        node = emit(graph, aten.permute.default, node, order, like=like)
    for _ in dropped:
        node = emit(graph, aten.select.int, node, 0, 0, like=like)
    for place, axis in enumerate(axes):
        if axis is None:
            node = emit(graph, aten.unsqueeze.default, node, place, like=like)
    return node


def insert_traced(
    graph: Graph, function: Callable[..., torch.Tensor], nodes: Sequence[Node], *, like: Node
) -> Node:
    """The calls that ``function`` makes, given what ``nodes`` stand for, at the graph's insertion point.

    Returns:
        The node of its result.
    """
    key = "val" if "val" in like.meta else "example_value"
    with torch.no_grad():
        traced = trace_fake(function, [node.meta[key] for node in nodes])
    copies: dict[Node, Node] = {}
    inputs = iter(nodes)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(inputs)
        elif node.op == "output":
            (result,) = node.args if isinstance(node.args[0], Node) else node.args[0]
            return copies[result]
        else:
            assert node.op == "call_function", (
                f"{node.format_node()}: functions that are inserted hold no data"
            )
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta = {key: node.meta["val"]} if "val" in node.meta else {}
    raise AssertionError("a traced graph has an output")


def first_write_between(nodes: Iterable[Node], last: Node) -> Node | None:
    """A call from the first of ``nodes`` to ``last``, itself left out, that may write memory."""
    inside = set(nodes)
    started = False
    for node in last.graph.nodes:
        started = started or node in inside
        if node is last:
            return None
        if started and may_write(node):
            return node
    return None


def nodes_between(outputs: Iterable[Node], inputs: Iterable[Node]) -> set[Node]:
    """The calls that make ``outputs``, these included, of ``inputs``, with the assertions about them."""
    ends = set(inputs)
    found: set[Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node not in found and node not in ends:
            found.add(node)
            stack += [n for n in node.all_input_nodes if n.op in ("call_function", "call_method")]
    return found | {user for node in found for user in node.users if name_of(user) == ASSERTION}


def refresh_strides(graph: Graph, changed: Iterable[Node]) -> None:
    """Gives what reads ``changed``, whose strides are others now, the strides that follow from them."""
    stale = set(changed)
    for node in graph.nodes:
        if node in stale or stale.isdisjoint(node.all_input_nodes) or may_write(node):
            continue
        key = next((key for key in ("val", "example_value") if key in node.meta), None)
        if key is None or node.op not in ("call_function", "call_method"):
            continue
        args: Any = map_arg(node.args, tensor_of)
        kwargs: Any = map_arg(node.kwargs, tensor_of)
        target: Any = getattr(type(args[0]), str(node.target)) if node.op == "call_method" else node.target
        with fake_mode_of(args, kwargs):
            value = target(*args, **kwargs)
        if _strides(value) != _strides(node.meta[key]):
            node.meta[key] = value
            stale.add(node)


def _strides(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_strides(part) for part in value]
    return (value.stride(), value.storage_offset()) if isinstance(value, torch.Tensor) else None


def remove_unused(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erases those of ``nodes`` that nobody uses, users before what they use; writes stay."""
    for node in sorted(set(nodes), reverse=True):
        if not node.users and not may_write(node):
            graph.erase_node(node)
