"""What no pass may change: which writes each cache gets, and which of them each reader sees.

A write counts by the version of the cache that it makes. Plain calls make versions by their order in the
graph, functionalised ones by the chain of their results; both give the same account, so a pass that turns
one form into the other is held to it too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attnbackend._torch_compat import FUNCTIONALIZED, StorageRef
from attnbackend.fx_passes.nodes import OpNode, find_ops, wrapped_op, written_by

__all__ = ["CacheEvent", "CacheHistory", "CacheOrderError", "cache_history", "check_cache_history"]


class CacheOrderError(RuntimeError):
    """A pass dropped, duplicated or moved a write of a cache, or a reader of it."""


@dataclass(frozen=True, order=True)
class CacheEvent:
    """A call that writes or reads a cache."""

    cache: str
    version: int
    """How many writes came before."""
    what: str

    def __str__(self) -> str:
        return f"{self.what} after {self.version} writes"


@dataclass
class CacheHistory:
    """Of every cache in a graph."""

    events: Counter[CacheEvent] = field(default_factory=Counter)
    others: Counter[CacheEvent] = field(default_factory=Counter)
    """Reads by ops that are not attnbackend's: a pass may remove these, not move them."""
    final: dict[str, int] = field(default_factory=dict)
    """Writes that are in each cache when the graph ends."""


def check_cache_history(pass_name: str, before: CacheHistory, after: CacheHistory) -> None:
    """Raises CacheOrderError where ``after`` differs from ``before`` in what matters."""
    wrong = [f"lost: {e.cache}: {e}" for e in (before.events - after.events).elements()]
    wrong += [f"new: {e.cache}: {e}" for e in (after.events - before.events).elements()]
    wrong += [f"new: {e.cache}: {e}" for e in (after.others - before.others).elements()]
    for cache in before.final.keys() | after.final.keys():
        ends = before.final.get(cache, 0), after.final.get(cache, 0)
        if ends[0] != ends[1]:
            wrong.append(f"{cache} ends with {ends[1]} writes in it instead of {ends[0]}")
    if wrong:
        listed = "".join(f"\n  {line}" for line in sorted(wrong))
        raise CacheOrderError(
            f"pass {pass_name!r} changed what is written to a KV cache or what is read of it; leave the pass "
            f"out, it is at fault:{listed}"
        )


def cache_history(graph_module: GraphModule) -> CacheHistory:
    """The history of every cache that an op of attnbackend takes as ``kv_cache``."""
    memory = _Memory(graph_module)
    caches = {
        memory.key(cache)
        for op in find_ops(graph_module.graph)
        if isinstance(cache := op.arguments().get("kv_cache"), Node)
    }
    history = CacheHistory(final=dict.fromkeys(caches, 0))
    own = {op.node: op for op in find_ops(graph_module.graph)}
    for node in graph_module.graph.nodes:
        _note(node, own.get(node), memory, caches, history)
    return history


def _note(
    node: Node, op: OpNode | None, memory: _Memory, caches: set[str], history: CacheHistory
) -> None:  # fmt: skip
    if node.op == "output":
        for value in node.all_input_nodes:
            if (key := memory.key(value)) in caches:
                history.final[key] = max(history.final[key], memory.version(value))
        return
    written = written_by(node)
    touched = {memory.key(value): value for value in node.all_input_nodes if memory.key(value) in caches}
    for key, value in touched.items():
        if memory.hands_on(node) or _is_epilogue(node, memory):
            continue
        writes = any(memory.key(w) == key for w in written)
        event = CacheEvent(key, memory.version(value), _what(node, op, writes))
        (history.events if op is not None or writes else history.others)[event] += 1
        if writes and node.target not in FUNCTIONALIZED:
            memory.plain_writes[key] += 1
    for key in touched:
        history.final[key] = max(history.final[key], memory.plain_writes[key])
    if _is_epilogue(node, memory) and (key := memory.key(node.args[0])) in caches:
        history.final[key] = max(history.final[key], memory.version(node.args[1]))


def _what(node: Node, op: OpNode | None, writes: bool) -> str:
    if op is None:
        return f"{'write' if writes else 'read'} by {node.target}"
    slots = op.arguments().get("slot_mapping")
    return f"write of the slots {slots}" if writes else "read"


def _is_epilogue(node: Node, memory: _Memory) -> bool:
    """Functionalised graphs end with a copy of the last version to the input: no write of its own."""
    if node.target is not torch.ops.aten.copy_.default:
        return False
    target, source = node.args[0], node.args[1]
    return isinstance(source, Node) and memory.key(target) == memory.key(source)


class _Memory:
    """Which memory each node stands for, and how many writes its value has seen."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.plain_writes: Counter[str] = Counter()
        self._keys: dict[Node, str] = {}
        self._versions: dict[Node, int] = {}
        self._handing_on: set[Node] = set()
        storages: dict[StorageRef, str] = {}
        for node in graph_module.graph.nodes:
            self._place(node, storages)

    def key(self, node: Any) -> str:
        return self._keys.get(node, "")

    def version(self, node: Any) -> int:
        return self._versions.get(node, 0) + self.plain_writes[self.key(node)]

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
        if storage is None:
            return source is node.args[0] and _is_view(node)
        other = _storage(source)
        return other is not None and storage == other


def _written_base(node: Node) -> Node | None:
    """The value whose next version ``node`` is, where it is a result of a functionalised call."""
    call = node.args[0] if node.op == "call_function" and len(node.args) == 2 else None
    if not (isinstance(call, Node) and call.target in FUNCTIONALIZED) or not isinstance(node.args[1], int):
        return None
    op = wrapped_op(call)
    assert op is not None
    place = node.args[1] - max(1, len(op._schema.returns))
    return written_by(call)[place] if place >= 0 else None


def _storage(node: Node) -> StorageRef | None:
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return StorageRef(value.untyped_storage())


def _is_view(node: Node) -> bool:
    """By the schema, for nodes without a fake tensor."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", "") == "getitem"
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
