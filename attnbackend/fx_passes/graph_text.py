"""A compact text of a graph: our own, so that snapshots do not move with torch's printer."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from attnbackend.fx_passes.nodes import schemas_of

__all__ = ["graph_text"]


def graph_text(graph_module: GraphModule) -> str:
    """One line a node: name, target, arguments; written arguments of attnbackend's ops are marked ``!``."""
    return "\n".join(_line(node) for node in graph_module.graph.nodes)


def _line(node: Node) -> str:
    if node.op == "placeholder":
        return f"{node.name}: input"
    if node.op == "output":
        return f"return {_value(node.args[0])}"
    written = _written(node.target)
    arguments = [("!" if i in written else "") + _value(a) for i, a in enumerate(node.args)]
    arguments += [f"{k}={'!' if k in written else ''}{_value(v)}" for k, v in node.kwargs.items()]
    return f"{node.name} = {_target(node.target)}({', '.join(arguments)})"


def _written(target: Any) -> set[Any]:
    arguments = [(i, a) for schema in schemas_of(target) for i, a in enumerate(schema.arguments)]
    return {key for i, a in arguments if a.alias_info and a.alias_info.is_write for key in (i, a.name)}


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target.name()
    return getattr(target, "__name__", str(target))


def _value(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    return _target(value) if callable(value) else repr(value)
