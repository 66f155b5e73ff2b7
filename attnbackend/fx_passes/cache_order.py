"""What no pass may change: which writes each cache gets, in which order, and which of them each reader sees.

A write counts by the version of the cache that it makes; caches that share memory are one. Plain calls make
versions by their order in the graph, functionalised ones by the chain of their results; both give the same
account, so a pass that turns one form into the other is held to it too. Writes of the same slots, and
readers, are told apart by what they are given (`call_marks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from attnbackend._torch_compat import FUNCTIONALIZED
from attnbackend.fx_passes.call_marks import Marker, Marks, moved
from attnbackend.fx_passes.forms import SAME_ELEMENTS, first, name_of
from attnbackend.fx_passes.memory import Memory
from attnbackend.fx_passes.nodes import OpNode, find_ops, tensor_of, written_by

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
    """Writes that are in each cache when the graph ends, where somebody sees it then: 0 where nobody does."""
    calls: dict[tuple[str, str], dict[int, list[Node]]] = field(default_factory=dict)
    """(cache, what) -> version -> the calls."""
    marks: dict[tuple[str, str, str], dict[int, list[Marks]]] = field(default_factory=dict)
    """The same, where there are several versions: what tells their calls apart, as a whole ("") and
    argument by argument."""


def check_cache_history(pass_name: str, before: CacheHistory, after: CacheHistory) -> None:
    """Raises CacheOrderError where ``after`` differs from ``before`` in what matters.

    Caches that the pass brought into the graph are its own.
    """
    wrong = [f"lost: {e.cache}: {e}" for e in (before.events - after.events).elements()]
    new = [*(after.events - before.events).elements(), *(after.others - before.others).elements()]
    wrong += [f"new: {e.cache}: {e}" for e in new if e.cache in before.final]
    for cache in before.final:
        ends = before.final[cache], after.final.get(cache, 0)
        if ends[0] != ends[1]:
            wrong.append(f"{cache} ends with {ends[1]} writes in it instead of {ends[0]}")
    for key, marks in before.marks.items():
        for place, other in moved(marks, after.marks.get(key, {})):
            what = f"{key[2]} of {key[1]}" if key[2] else key[1]
            wrong.append(f"moved: {key[0]}: {what} after {other} writes came after {place}")
    if wrong:
        listed = "".join(f"\n  {line}" for line in sorted(set(wrong)))
        raise CacheOrderError(
            f"pass {pass_name!r} changed what is written to a KV cache or what is read of it; leave the pass "
            f"out, it is at fault:{listed}"
        )


def cache_history(graph_module: GraphModule) -> CacheHistory:
    """The history of every cache that an op of attnbackend takes as ``kv_cache``."""
    memory = Memory(graph_module.graph)
    given = {memory.key(node) for node in graph_module.graph.nodes if node.op in ("placeholder", "get_attr")}
    caches = {
        (key := memory.key(cache)): key in given
        for op in find_ops(graph_module.graph)
        if isinstance(cache := op.arguments().get("kv_cache"), Node)
    }
    history = CacheHistory(final=dict.fromkeys(caches, 0))
    own = {op.node: op for op in find_ops(graph_module.graph)}
    for node in graph_module.graph.nodes:
        _note(node, own.get(node), memory, caches, history)
    if any(len(versions) > 1 for versions in history.calls.values()):
        _mark(graph_module.graph, own, memory, history)
    return history


def _mark(graph: Graph, ops: Mapping[Node, OpNode], memory: Memory, history: CacheHistory) -> None:
    marker = Marker(graph)
    for (cache, what), versions in history.calls.items():
        own = {node for node in graph.nodes if memory.key(node) == cache} if len(versions) > 1 else set()
        for version, call in ((v, c) for v, calls in versions.items() for c in calls if own):
            found = {"": marker.of(call, own)}
            arguments = ops[call].arguments() if call in ops else {}
            found |= {name: marker.of_value(value, own) for name, value in arguments.items()}
            for name, marks in found.items():
                history.marks.setdefault((cache, what, name), {}).setdefault(version, []).append(marks)


def _note(
    node: Node, op: OpNode | None, memory: Memory, caches: Mapping[str, bool], history: CacheHistory
) -> None:
    """Adds what a node does to the caches; those that are told to be so outlive the graph."""
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
        history.calls.setdefault((key, event.what), {}).setdefault(event.version, []).append(node)
        if writes and node.target not in FUNCTIONALIZED:
            memory.plain_writes[key] += 1
    for key in filter(caches.__getitem__, touched):
        history.final[key] = max(history.final[key], memory.plain_writes[key])
    if _is_epilogue(node, memory) and (key := memory.key(node.args[0])) in caches:
        history.final[key] = max(history.final[key], memory.version(node.args[1]))


def _what(node: Node, op: OpNode | None, writes: bool) -> str:
    if op is None:
        return f"{'write' if writes else 'read'} by {node.target}"
    return f"write of the slots {_unchanged(op.arguments().get('slot_mapping'))}" if writes else "read"


def _unchanged(slots: Any) -> Any:
    """What the slots were before copies and changes of shape; a part of them is another thing."""
    while name_of(slots) in SAME_ELEMENTS and _elements(slots) == _elements(first(slots)):
        slots = first(slots)
    return slots


def _elements(node: Any) -> tuple[torch.dtype, Any]:
    value = tensor_of(node)
    return value.dtype, value.numel()


def _is_epilogue(node: Node, memory: Memory) -> bool:
    """Functionalised graphs end with a copy of the last version to the input: no write of its own."""
    if node.target is not torch.ops.aten.copy_.default:
        return False
    target, source = node.args[0], node.args[1]
    return isinstance(source, Node) and memory.key(target) == memory.key(source)
