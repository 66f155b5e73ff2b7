"""What no pass may change: which writes each cache gets, and which of them each reader sees.

A write counts by the version of the cache that it makes. Plain calls make versions by their order in the
graph, functionalised ones by the chain of their results; both give the same account, so a pass that turns
one form into the other is held to it too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from attnbackend._torch_compat import FUNCTIONALIZED
from attnbackend.fx_passes.memory import Memory
from attnbackend.fx_passes.nodes import OpNode, find_ops, written_by

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
    if wrong:
        listed = "".join(f"\n  {line}" for line in sorted(wrong))
        raise CacheOrderError(
            f"pass {pass_name!r} changed what is written to a KV cache or what is read of it; leave the pass "
            f"out, it is at fault:{listed}"
        )


def cache_history(graph_module: GraphModule) -> CacheHistory:
    """The history of every cache that an op of attnbackend takes as ``kv_cache``."""
    memory = Memory(graph_module)
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
    node: Node, op: OpNode | None, memory: Memory, caches: set[str], history: CacheHistory
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


def _is_epilogue(node: Node, memory: Memory) -> bool:
    """Functionalised graphs end with a copy of the last version to the input: no write of its own."""
    if node.target is not torch.ops.aten.copy_.default:
        return False
    target, source = node.args[0], node.args[1]
    return isinstance(source, Node) and memory.key(target) == memory.key(source)
