"""Finding attnbackend's ops in a graph, as plain calls and inside functionalisation's wrappers."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from attnbackend._torch_compat import FUNCTIONALIZED

__all__ = [
    "OpNode",
    "find_ops",
    "may_write",
    "named_arguments",
    "schemas_of",
    "tensor_of",
    "wrapped_op",
    "written_by",
]


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
        if not self.is_wrapped:
            return named_arguments(self.node, self.op._schema)
        given = dict(self.node.kwargs)
        names = [argument.name for argument in self.op._schema.arguments]
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
    if not node.op.startswith("call_"):
        return []
    if (op := wrapped_op(node)) is not None:
        if "_all_bases" in node.kwargs:
            return list(node.kwargs["_all_bases"])  # type: ignore[arg-type]
        return [node.kwargs.get(a.name) for a in _written_arguments(op._schema)]
    if schemas := schemas_of(node.target):
        return _nodes_in([value for schema in schemas for value in _written_values(node, schema)])
    if not may_write(node):
        return []
    is_simple = node.op == "call_method" or isinstance(node.target, _WITHOUT_GRAPHS)
    if is_simple and getattr(node.target, "__name__", "") not in _WRITES_ANY:
        return _nodes_in(node.kwargs.get("out", node.args[:1] or node.kwargs.get("input")))
    return list(node.all_input_nodes)


_WITHOUT_GRAPHS = (types.FunctionType, types.BuiltinFunctionType)
_WRITES_ANY = ("triton_kernel_wrapper_mutation", "batch_norm", "instance_norm")
"""Of what they are given: a user's own Triton kernel, and norms that keep statistics."""


def schemas_of(target: Any) -> list[Any]:
    """The schema of an op; of a name that stands for several ops, all of theirs; none for other functions."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name)._schema for name in target.overloads()]
    return [target._schema] if isinstance(target, torch._ops.OpOverload) else []


def _written_values(node: Node, schema: Any) -> list[Any]:
    named = named_arguments(node, schema)
    return [named.get(a.name) for a in _written_arguments(schema)]


def named_arguments(node: Node, schema: Any) -> dict[str, Any]:
    """What a call of an op is given, by the names in its schema; defaults left out."""
    return dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs


def _nodes_in(value: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(value, found.append)
    return found


def _written_arguments(schema: Any) -> list[Any]:
    return [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


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
    if schemas := schemas_of(node.target):
        return any(schema.is_mutable for schema in schemas)
    if name in _WRITES_ANY or (name.endswith("_") and not name.endswith("__")) or _is_told_in_place(node):
        return True
    return any(not isinstance(m, GraphModule) or any(map(may_write, m.graph.nodes)) for m in _inside(node))


def _is_told_in_place(node: Node) -> bool:
    """Whether ``inplace`` is among the arguments without names, as in ``relu(x, True)``."""
    code = getattr(node.target, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    return "inplace" in names and node.args[names.index("inplace") :][:1] == (True,)


def _inside(node: Node) -> list[Any]:
    """The modules that a node calls, or hands to a function that calls them."""
    owner = node.graph.owning_module
    names = [node.target] if node.op == "call_module" else []
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        names = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
    found = [operator.attrgetter(str(name))(owner) for name in names if owner is not None]
    return [value for value in found if isinstance(value, torch.nn.Module)]


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
