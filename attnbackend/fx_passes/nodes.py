"""Finding attnbackend's ops in a graph, as plain calls and inside functionalisation's wrappers."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from attnbackend._torch_compat import FUNCTIONALIZED

__all__ = ["OpNode", "find_ops", "may_write", "tensor_of", "wrapped_op", "written_by"]


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


def wrapped_op(node: Node) -> torch._ops.OpOverload | None:
    """The op inside a functionalised call; None where ``node`` is none."""
    if node.target not in FUNCTIONALIZED:
        return None
    op = node.args[0]
    assert isinstance(op, torch._ops.OpOverload)
    return op


def written_by(node: Node) -> list[Any]:
    """What a call writes, as far as its schema or, without one, its name tells.

    Of a functionalised call: the values whose next versions it returns, in that order.
    """
    if node.op not in ("call_function", "call_method"):
        return []
    if (op := wrapped_op(node)) is not None:
        if "_all_bases" in node.kwargs:
            return list(node.kwargs["_all_bases"])  # type: ignore[arg-type]
        return [node.kwargs.get(a.name) for a in _written_arguments(op)]
    if isinstance(node.target, torch._ops.OpOverload):
        named = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False))
        named.update(node.kwargs)
        return _nodes_in([named.get(a.name) for a in _written_arguments(node.target)])
    if getattr(node.target, "__name__", "") == _TRITON_CALL:
        return list(node.all_input_nodes)
    if not may_write(node):
        return []
    return _nodes_in(node.kwargs.get("out", node.args[:1] or node.kwargs.get("input")))


_TRITON_CALL = "triton_kernel_wrapper_mutation"
"""A user's own Triton kernel in Dynamo's graph: it may write whatever it is given."""


def _nodes_in(value: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(value, found.append)
    return found


def _written_arguments(op: torch._ops.OpOverload) -> list[Any]:
    return [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def may_write(node: Node) -> bool:
    """Whether a call may write memory that was there before, judged by its schema or else by its name.

    A mode in which other calls run, such as autocast, counts as memory.
    """
    name = getattr(node.target, "__name__", str(node.target))
    if node.op == "call_function" and name.startswith(_MODES):
        return True
    if node.target in _WRITING_OPERATORS or "out" in node.kwargs or node.kwargs.get("inplace") is True:
        return True
    if node.op == "call_method" and (name.startswith("__i") or name == "__setitem__"):
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return schema.is_mutable
    return name == _TRITON_CALL or (name.endswith("_") and not name.endswith("__"))


_MODES = (
    "_enter_", "_exit_", "_set_", "set_", "_vmap_", "_grad_", "_jvp_", "_func_", "_saved_tensors_hooks_",
)  # fmt: skip
"""How names of functions begin that change the mode."""
_WRITING_OPERATORS = {
    operator.setitem, operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift, operator.imatmul,
    operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift, operator.isub,
    operator.itruediv, operator.ixor,
}  # fmt: skip


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
