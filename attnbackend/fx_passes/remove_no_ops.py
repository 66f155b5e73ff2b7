"""`RemoveNoOps`: views and copies that change nothing, and splits that were made before, go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attnbackend._torch_compat import same_size
from attnbackend.fx_passes.base import Change, GraphPass, NearMiss, PassReport, Stage
from attnbackend.fx_passes.forms import first, name_of
from attnbackend.fx_passes.memory import Memory
from attnbackend.fx_passes.nodes import may_write, written_by

__all__ = ["RemoveNoOps"]

_VIEWS = {
    "view", "reshape", "_unsafe_view", "expand", "alias", "slice", "permute", "transpose", "contiguous",
    "to", "detach", "flatten", "unflatten",
}  # fmt: skip
"""Calls that return their first argument itself, or a view of it, where they change nothing."""
_COPIES = {"clone", "_to_copy"}
_SPLITS = {"split", "split_with_sizes", "chunk", "unbind"}


class RemoveNoOps(GraphPass):
    """Uses of a view with its source's very shape, strides and type become uses of the source.

    A copy goes only where neither it nor what it was copied from is written anywhere in the graph, and
    neither it nor a view of it is returned. Of splits of one value into the same parts the first serves all.
    """

    name = "remove_no_ops"
    stage = Stage.CLEAN

    def run(self, graph_module: GraphModule) -> PassReport:
        graph, changes, misses = graph_module.graph, [], []
        memory = Memory(graph_module.graph)
        written = {memory.key(value) for node in graph.nodes for value in written_by(node)}
        returned = {memory.key(value) for value in graph.output_node().all_input_nodes}
        for node in list(graph.nodes):
            reason = _reason_to_keep(node, memory, written, returned)
            if reason is None:
                source = first(node)
                changes.append(Change(node.name, name_of(node), source.name, "it changes nothing"))
                node.replace_all_uses_with(source)
                graph.erase_node(node)
            elif reason:
                misses.append(NearMiss(node.name, "removal", (reason,)))
        changes += list(_join_splits(graph_module))
        if changes:
            graph_module.recompile()
        return PassReport(self.name, tuple(changes), tuple(misses))


def _reason_to_keep(node: Node, memory: Memory, written: set[str], returned: set[str]) -> str | None:
    """None: the node can go. "": it is nothing of the kind."""
    name = name_of(node)
    source = first(node)
    if name not in _VIEWS | _COPIES or not isinstance(source, Node) or not _is_same(node, source):
        return ""
    if any(user.op == "output" for user in node.users):
        return f"{name} of {source} is returned"
    if memory.key(node) == memory.key(source):
        return None
    if memory.key(node) in returned:
        return f"a view of {name} of {source} is returned"
    if {memory.key(node), memory.key(source)} & written:
        return f"{name} keeps {source} apart from a write"
    return None


def _is_same(node: Node, source: Node) -> bool:
    a, b = (x.meta.get("val", x.meta.get("example_value")) for x in (node, source))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if a.requires_grad != b.requires_grad or a.dtype != b.dtype or a.device != b.device or a.dim() != b.dim():
        return False
    sizes = (*zip(a.shape, b.shape, strict=True), *zip(a.stride(), b.stride(), strict=True))
    return same_size(a.storage_offset(), b.storage_offset()) and all(same_size(x, y) for x, y in sizes)


def _join_splits(graph_module: GraphModule) -> Iterator[Change]:
    cuts: dict[Any, Node] = {}
    for node in list(graph_module.graph.nodes):
        if may_write(node):
            cuts.clear()
        if name_of(node) not in _SPLITS or not isinstance(first(node), Node):
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))
        if key in cuts:
            yield Change(node.name, name_of(node), cuts[key].name, "the same parts of the same value")
            node.replace_all_uses_with(cuts[key])
            graph_module.graph.erase_node(node)
        else:
            cuts[key] = node
