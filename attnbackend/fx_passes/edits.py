"""Putting nodes into a graph: each gets the fake tensor that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from attnbackend._torch_compat import fake_mode_of, makes_sizes, same_size, trace_fake
from attnbackend.fx_passes.forms import ASSERTION, NoMatch, Viewed, has_layout_of, name_of, shape_of
from attnbackend.fx_passes.memory import Memory, share_memory
from attnbackend.fx_passes.nodes import may_write, tensor_of, written_by

__all__ = [
    "emit",
    "emit_again",
    "emit_view",
    "first_write_between",
    "insert_traced",
    "made_contiguous",
    "nodes_between",
    "remove_unused",
    "restrided",
    "result_of",
    "set_values",
    "traced_calls",
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
    try:
        with fake_mode_of(fake_args, fake_kwargs):
            node.meta[key] = target(*fake_args, **fake_kwargs)
    except BaseException:
        graph.erase_node(node)
        raise
    return node


def emit_again(graph: Graph, node: Node, others: Mapping[Node, Node]) -> Node:
    """The call that ``node`` is, of ``others`` in the places of some of its arguments."""
    copy = graph.node_copy(node, lambda n: others.get(n, n))
    key = "val" if "val" in node.meta else "example_value"
    args: Any = map_arg(copy.args, lambda n: n.meta[key])
    kwargs: Any = map_arg(copy.kwargs, lambda n: n.meta[key])
    target: Any = getattr(type(args[0]), str(node.target)) if node.op == "call_method" else node.target
    with fake_mode_of(args, kwargs):
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


def traced_calls(function: Callable[..., torch.Tensor], nodes: Sequence[Node]) -> GraphModule:
    """The calls that ``function`` makes, given what ``nodes`` stand for."""
    with torch.no_grad():
        return trace_fake(function, [tensor_of(node) for node in nodes])


def result_of(traced: GraphModule) -> Any:
    """What `traced_calls` give, without data."""
    return tensor_of(_result_node(traced.graph.output_node()))


def _result_node(output: Node) -> Node:
    result: Any = output.args[0]
    return result if isinstance(result, Node) else result[0]


def insert_traced(graph: Graph, traced: GraphModule, nodes: Sequence[Node], *, like: Node) -> Node:
    """Puts `traced_calls`, given ``nodes``, at the graph's insertion point.

    Returns:
        The node of their result.
    """
    key = "val" if "val" in like.meta else "example_value"
    copies: dict[Node, Node] = {}
    inputs = iter(nodes)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(inputs)
        elif node.op == "output":
            return copies[_result_node(node)]
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


_TAKE_LAYOUT = {
    "as_strided", "as_strided_", "as_strided_scatter", "data_ptr", "is_contiguous", "is_set_to", "resize_",
    "resize_as_", "set_", "squeeze_", "storage_offset", "stride", "swapaxes_", "swapdims_", "t_",
    "transpose_", "unsqueeze_", "untyped_storage",
}  # fmt: skip
"""Calls that tell, or depend on, where in memory the elements of a tensor lie, or that change it."""


def restrided(graph: Graph, changed: Mapping[Node, Any]) -> dict[Node, Any]:
    """What nodes stand for once those of ``changed`` have other strides; the graph is left as it is.

    Args:
        graph: the graph.
        changed: what some of its nodes will stand for; shapes and types are those of before.

    Returns:
        ``changed``, and each value whose strides follow from them.

    Raises:
        NoMatch: somebody could tell; says who.
    """
    new = dict(changed)
    for node, value in new.items():
        _check_same(node, tensor_of(node), value)
    for node in graph.nodes:
        if node in new or new.keys().isdisjoint(node.all_input_nodes):
            continue
        _check_layout_is_free(node, next(n for n in node.all_input_nodes if n in new))
        before = node.meta.get("val", node.meta.get("example_value"))
        if not _has_tensors(before) or makes_sizes(before, [tensor_of(n) for n in node.all_input_nodes]):
            continue  # Elements that it picks lie anew, wherever they lay.
        value = _evaluated(node, new)
        _check_same(node, before, value)
        _check_aliases(node, value, new)
        if not has_layout_of(value, before):
            new[node] = value
    return new


def _check_layout_is_free(node: Node, source: Node) -> None:
    if node.op == "output":
        raise NoMatch(f"{source} is returned, and would have other strides")
    if name_of(node) in _TAKE_LAYOUT or node.op == "call_module" or not _is_plain_call(node):
        raise NoMatch(
            f"{node} is {name_of(node) or node.target}, and may take strides of {source} for granted"
        )


def _is_plain_call(node: Node) -> bool:
    """False: a function that holds graphs or kernels, with constants that were found while tracing."""
    return not isinstance(node.target, torch._ops.HigherOrderOperator)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor)


def _evaluated(node: Node, new: Mapping[Node, Any]) -> Any:
    def value(n: Node) -> Any:
        return new[n] if n in new else tensor_of(n)

    args: Any = map_arg(node.args, value)
    kwargs: Any = map_arg(node.kwargs, value)
    target: Any = getattr(type(args[0]), str(node.target)) if node.op == "call_method" else node.target
    try:
        with fake_mode_of(args, kwargs):
            return target(*args, **kwargs)
    except Exception as error:  # whatever it is: the caller reports it, and leaves the graph alone
        raise NoMatch(f"{node} does not take other strides: {str(error).partition(chr(10))[0]}") from error


def _check_aliases(node: Node, value: Any, new: Mapping[Node, Any]) -> None:
    """Whether a call that gave its argument's own memory gives a copy now, or the other way round."""
    for source in node.all_input_nodes:
        was_alias = share_memory(tensor_of(source), tensor_of(node))
        if source not in new or was_alias == share_memory(new[source], value):
            continue
        if (user := _first_to_tell(node, source)) is not None:
            would_be = "a copy of" if was_alias else "the memory of"
            raise NoMatch(f"{node} would be {would_be} {source}, which {user} could tell")


def _first_to_tell(node: Node, source: Node) -> Node | None:
    """Who, after ``node``, writes it or ``source``, or returns both, or either where it is an input's."""
    memory = Memory(node.graph)
    keys = {memory.key(source), memory.key(node)}
    own = [n for n in node.graph.nodes if memory.key(n) in keys]
    for user in node.graph.nodes:
        touched = [x for x in written_by(user) if x in own] if user > node else []
        if user.op == "output":
            found = [x for x in user.all_input_nodes if x in own]
            touched = found if len(found) > 1 or any(n.op == "placeholder" for n in own) else []
        if touched:
            return user
    return None


def _check_same(node: Node, before: Any, after: Any) -> None:
    """Whether values are equal but for where their elements lie."""
    if isinstance(before, (list, tuple)):
        for x, y in zip(before, after, strict=True):
            _check_same(node, x, y)
    elif isinstance(before, torch.Tensor):
        is_same = before.dtype == after.dtype and before.dim() == after.dim()
        if not is_same or not all(map(same_size, before.shape, after.shape)):
            raise NoMatch(f"{node} would be {after.dtype} {tuple(after.shape)}, not {before.dtype} as it is")


def made_contiguous(graph: Graph, nodes: Iterable[Node]) -> dict[Node, Any]:
    """What nodes stand for, if ``nodes`` are contiguous from now on, where that is another thing than before.

    Raises:
        NoMatch: somebody could tell; says who.
    """
    new = {}
    for node in nodes:
        value = tensor_of(node)
        with fake_mode_of(value):
            contiguous = value.new_empty(value.shape)
        if not has_layout_of(value, contiguous):
            new[node] = contiguous
    return {node: value for node, value in restrided(graph, new).items() if node not in new}


def set_values(values: Mapping[Node, Any]) -> None:
    """Writes down what nodes stand for."""
    for node, value in values.items():
        node.meta["val" if "val" in node.meta else "example_value"] = value


def remove_unused(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erases those of ``nodes`` that nobody uses, users before what they use; writes stay."""
    for node in sorted(set(nodes), reverse=True):
        if not node.users and not may_write(node):
            graph.erase_node(node)
