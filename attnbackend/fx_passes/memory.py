"""Which nodes of a graph stand for one memory, and which version of its contents each of them is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from attnbackend._torch_compat import FUNCTIONALIZED, StorageRef
from attnbackend.fx_passes.forms import has_layout_of, name_of
from attnbackend.fx_passes.nodes import named_arguments, schemas_of, tensor_of, wrapped_op, written_by

__all__ = ["Memory", "share_memory"]


class Memory:
    """Which memory each node stands for, and how many writes its value has seen."""

    def __init__(self, graph: Graph) -> None:
        self.plain_writes: Counter[str] = Counter()
        self._keys: dict[Node, str] = {}
        self._versions: dict[Node, int] = {}
        self._handing_on: set[Node] = set()
        storages: dict[StorageRef, str] = {}
        for node in graph.nodes:
            self._place(node, storages)

    def key(self, node: Any) -> str:
        return self._keys.get(node, "")

    def version(self, node: Any) -> int:
        return self._versions.get(node, 0) + self.plain_writes[self.key(node)]

    def first_write(self, first: Node, last: Node, values: Iterable[Node]) -> Node | None:
        """A call from ``first`` to ``last``, itself left out, that writes what a value stands for."""
        keys = {self.key(value) for value in values}
        node = first
        while node is not last:
            if any(self.key(written) in keys for written in written_by(node)):
                return node
            node = node.next
        return None

    def hands_on(self, node: Node) -> bool:
        """Whether the node does no more than to pass memory on: a view, an element of a tuple."""
        return node in self._handing_on

    def _place(self, node: Node, storages: dict[StorageRef, str]) -> None:
        self._versions[node] = 0
        if (base := _written_base(node)) is not None:
            self._keys[node], self._versions[node] = self._keys[base], self._versions[base] + 1
            self._handing_on.add(node)
            return
        storage = _storage(node)
        source = next((a for a in node.all_input_nodes if self._shares(a, node, storage)), None)
        if source is not None and node.op != "output":
            self._keys[node], self._versions[node] = self._keys[source], self._versions[source]
            if not written_by(node):
                self._handing_on.add(node)
        else:
            self._keys[node] = storages.get(storage, node.name) if storage else node.name
        if storage is not None:
            storages.setdefault(storage, self._keys[node])

    def _shares(self, source: Node, node: Node, storage: StorageRef | None) -> bool:
        if source in node.args[:1] and _is_view(node) and not _copies(node, source):
            return True  # Whatever its fake tensor says: that may be of a form that the graph had before.
        other = _storage(source)
        return storage is not None and other is not None and storage == other


def _written_base(node: Node) -> Node | None:
    """The value whose next version ``node`` is, where it is a result of a functionalised call."""
    call = node.args[0] if node.op == "call_function" and len(node.args) == 2 else None
    if not (isinstance(call, Node) and call.target in FUNCTIONALIZED) or not isinstance(node.args[1], int):
        return None
    op = wrapped_op(call)
    assert op is not None
    place = node.args[1] - max(1, len(op._schema.returns))
    return written_by(call)[place] if place >= 0 else None


def share_memory(a: Any, b: Any) -> bool:
    """Whether two values, without data, are of one storage; of tuples the first element counts."""
    one = _storage_of(a)
    return one is not None and one == _storage_of(b)


def _storage(node: Node) -> StorageRef | None:
    return _storage_of(node.meta.get("val", node.meta.get("example_value")))


def _storage_of(value: Any) -> StorageRef | None:
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return StorageRef(value.untyped_storage())
    except NotImplementedError:  # inside a transform such as vmap
        return None


def _is_view(node: Node) -> bool:
    """Whether a call hands on the memory of its first argument, by its schema."""
    schemas = schemas_of(node.target)
    if not schemas:
        return getattr(node.target, "__name__", "") == "getitem" and not _picks_elements(node.args[1])
    return all(any(r.alias_info and not r.alias_info.is_write for r in s.returns) for s in schemas)


def _copies(node: Node, source: Node) -> bool:
    """Whether a call that gives its argument itself, where that will do, gives a copy instead."""
    if name_of(node) not in ("to", "contiguous"):
        return False
    a, b = tensor_of(source), tensor_of(node)
    is_told = any(named_arguments(node, schema).get("copy") is True for schema in schemas_of(node.target))
    return is_told or a.dtype != b.dtype or a.device != b.device or not has_layout_of(a, b)


def _picks_elements(index: Any) -> bool:
    """Whether an index has tensors or lists in it, for which elements are copied."""
    if isinstance(index, Node):
        return isinstance(index.meta.get("val", index.meta.get("example_value")), torch.Tensor)
    if isinstance(index, tuple):
        return any(isinstance(part, (list, bool)) or _picks_elements(part) for part in index)
    return isinstance(index, (list, bool))
