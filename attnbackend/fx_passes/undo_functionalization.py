"""`UndoFunctionalization`: functionalised calls become plain ones again, where nobody needs the old value."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from attnbackend._torch_compat import FUNCTIONALIZED
from attnbackend.fx_passes.base import Change, GraphPass, NearMiss, PassReport, Stage
from attnbackend.fx_passes.edits import emit
from attnbackend.fx_passes.forms import NoMatch
from attnbackend.fx_passes.memory import Memory
from attnbackend.fx_passes.nodes import wrapped_op, written_by
from attnbackend.ops.library import NAMESPACE

__all__ = ["UndoFunctionalization"]

aten = torch.ops.aten


class UndoFunctionalization(GraphPass):
    """Turns ``auto_functionalized(op, ...)`` into ``op(...)`` that writes its arguments in place.

    A call is left as it is where something after it reads the old value of what it writes, or a view of it;
    where it writes an input that the graph does not hand back as written; a constant; or two arguments that
    are the same memory.

    Args:
        table: op -> names of the arguments that it writes, of the ops to undo besides attnbackend's own.

    Raises:
        ValueError: the table contradicts an op's schema.
    """

    name = "undo_functionalization"
    stage = Stage.PREPARE

    def __init__(self, table: Mapping[torch._ops.OpOverload, Iterable[str]] | None = None) -> None:
        self.table = {op: tuple(names) for op, names in (table or {}).items()}
        for op, names in self.table.items():
            if set(names) != set(_written_names(op)):
                raise ValueError(
                    f"{op.name()} writes {_written_names(op)} by its schema, and the table says {names}"
                )

    def run(self, graph_module: GraphModule) -> PassReport:
        graph, changes, misses = graph_module.graph, [], []
        for node in [n for n in graph.nodes if n.target in FUNCTIONALIZED]:
            op = wrapped_op(node)
            assert op is not None
            if op.namespace != NAMESPACE and op not in self.table:
                misses.append(NearMiss(node.name, "undoing", (f"{op.name()} is not in the table",)))
                continue
            try:
                _check(graph_module, node)
            except NoMatch as no:
                misses.append(NearMiss(node.name, f"undoing of {op.name()}", (str(no),)))
                continue
            changes.append(_undo(graph, node, op))
        _remove_self_copies(graph)
        if changes:
            graph_module.recompile()
        return PassReport(self.name, tuple(changes), tuple(misses))

    def settings(self) -> dict[str, Any]:
        return {"table": sorted((op.name(), names) for op, names in self.table.items())}


def _written_names(op: torch._ops.OpOverload) -> list[str]:
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _check(graph_module: GraphModule, call: Node) -> None:
    """Raises NoMatch where writing in place could be told from writing to copies."""
    memory = Memory(graph_module.graph)
    bases = [base for base in written_by(call) if isinstance(base, Node)]
    keys = [memory.key(base) for base in bases]
    if len(set(keys)) < len(keys):
        raise NoMatch("two of the arguments that it writes are the same memory")
    for base, key in zip(bases, keys, strict=True):
        _check_origin(graph_module, call, base, key, memory)
        for node in _after(call):
            for value in node.all_input_nodes:
                is_old = memory.key(value) == key and memory.version(value) <= memory.version(base)
                if is_old and not _is_handed_back(node, value):
                    raise NoMatch(f"{node} needs {value} as it was before")


def _after(call: Node) -> Iterable[Node]:
    node = call.next
    while node.op != "root":
        yield node
        node = node.next


def _is_handed_back(node: Node, value: Node) -> bool:
    """Whether a node overwrites ``value`` instead of reading it."""
    return node.target is aten.copy_.default and node.args[0] is value and node.args[1] is not value


def _check_origin(
    graph_module: GraphModule, call: Node, base: Node, key: str, memory: Memory
) -> None:  # fmt: skip
    origins = [n for n in graph_module.graph.nodes if memory.key(n) == key and n.op != "call_function"]
    for origin in origins:
        if origin.op == "get_attr":
            raise NoMatch(f"{origin} is a constant")
        if origin.op == "placeholder" and not _returns_written(graph_module, origin, key, memory):
            raise NoMatch(f"{origin} is an input, and nothing says that it is written")


def _returns_written(graph_module: GraphModule, origin: Node, key: str, memory: Memory) -> bool:
    """Whether the last version of an input is copied back to it, or given to whoever will."""
    for node in graph_module.graph.nodes:
        if node.target is aten.copy_.default and node.args[0] is origin:
            return memory.key(node.args[1]) == key
    written: Mapping[str, int] = graph_module.meta.get("written_inputs", {})
    place = written.get(origin.name)
    outputs: Any = graph_module.graph.output_node().args[0]
    return place is not None and memory.key(outputs[place]) == key


def _undo(graph: Graph, call: Node, op: torch._ops.OpOverload) -> Change:
    bases = written_by(call)
    places = [a.name for a in op._schema.arguments if not a.kwarg_only]
    names = [a.name for a in op._schema.arguments if _is_given(call, a.name)]
    with graph.inserting_before(call):
        given = {name: _argument(graph, call, name, bases) for name in names}
        args = [given.pop(name) for name in takewhile(lambda name: name in given, places)]
        plain = emit(graph, op, *args, like=call, **given)
    num_results = len(op._schema.returns)
    for user in list(call.users):
        assert user.target is operator.getitem, "what a functionalised call returns is a tuple"
        place: Any = user.args[1]
        if place >= max(1, num_results):
            user.replace_all_uses_with(bases[place - max(1, num_results)])
        elif num_results == 1:
            user.replace_all_uses_with(plain)
        else:
            user.args = (plain, place)
            continue
        graph.erase_node(user)
    graph.erase_node(call)
    return Change(plain.name, f"functionalised {op.name()}", op.name(), "nobody reads what it overwrites")


def _is_given(call: Node, name: str) -> bool:
    return name in call.kwargs or f"_{name}_base_index" in call.kwargs


def _argument(graph: Graph, call: Node, name: str, bases: list[Any]) -> Any:
    """An argument as the op takes it: of one that is written, the part of its base that it is."""
    given: Any = call.kwargs
    if f"_{name}_base_index" not in given:
        return given[name]
    place = given[f"_{name}_base_index"]
    if place is None:
        return None
    base = bases[place]
    if f"_{name}_slice_dim" in given:
        edges = [given[f"_{name}_slice_{edge}"] for edge in ("dim", "start", "end")]
        return emit(graph, aten.slice.Tensor, base, *edges, like=call)
    if f"_{name}_storage_offset" in given:
        layout = [given[f"_{name}_{part}"] for part in ("size", "stride", "storage_offset")]
        return emit(graph, aten.as_strided.default, base, *layout, like=call)
    return base


def _remove_self_copies(graph: Graph) -> None:
    """The last version of an input is in it already."""
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0] is node.args[1] and len(node.users) <= 1:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
