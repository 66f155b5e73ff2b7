"""Fusions that begin at a cache write: what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Graph, GraphModule, Node

from attnbackend.backend import AttentionBackend
from attnbackend.backends.standard import StandardCacheBackend
from attnbackend.backends.two_phase import TwoPhaseBackend
from attnbackend.fx_passes.base import Change, NearMiss, PassReport
from attnbackend.fx_passes.edits import first_write_between
from attnbackend.fx_passes.forms import NoMatch
from attnbackend.fx_passes.memory import Memory
from attnbackend.fx_passes.nodes import OpNode, find_ops
from attnbackend.ops.library import OpRole, role_of

__all__ = ["caches_in", "check_no_write_between", "fuse_cache_writes", "has_standard_cache", "next_reader"]


def fuse_cache_writes(
    graph_module: GraphModule, name: str, what: str, role: OpRole, fuse: Callable[[Graph, OpNode], Change]
) -> PassReport:
    """Calls `fuse` for every write of a role; where it raises NoMatch, there is no `what`."""
    graph, changes, misses = graph_module.graph, [], []
    for write in [op for op in find_ops(graph) if role_of(op.op) is role]:
        try:
            if write.is_wrapped:
                raise NoMatch(
                    "the write is inside functionalisation's wrapper; run UndoFunctionalization first"
                )
            changes.append(fuse(graph, write))
        except NoMatch as no:
            misses.append(NearMiss(write.node.name, what, (str(no),)))
    if changes:
        graph_module.recompile()
    return PassReport(name, tuple(changes), tuple(misses))


def has_standard_cache(backend: type[AttentionBackend]) -> bool:
    """Whether a backend reads what the fused op writes."""
    if issubclass(backend, TwoPhaseBackend):
        return all(map(has_standard_cache, backend.parts))
    return issubclass(backend, StandardCacheBackend)


def caches_in(graph: Graph) -> frozenset[Node]:
    """The nodes that stand for memory which an op takes as its cache."""
    memory = Memory(graph)
    keys = {memory.key(op.arguments().get("kv_cache")) for op in find_ops(graph)} - {""}
    return frozenset(node for node in graph.nodes if memory.key(node) in keys)


def next_reader(graph: Graph, write: OpNode, *roles: OpRole) -> OpNode:
    """The first attention after the write that reads its cache, before the next write of it."""
    cache = write.arguments()["kv_cache"]
    for op in find_ops(graph):
        if op.node > write.node and op.arguments().get("kv_cache") is cache:
            if role_of(op.op) in roles:
                return op
            break
    raise NoMatch("no attention reads the cache after this write")


def check_no_write_between(inner: set[Node], inputs: Iterable[Node], write: Node) -> None:
    """Raises NoMatch where the calls ``inner``, made at ``write`` instead, could read other values.

    They may come before the write, where whatever may write memory counts, and after it, as rotations of
    queries do, where it counts if it writes theirs.
    """
    between, last = first_write_between(inner, write), max(inner, default=write)
    if between is None and last > write:
        between = Memory(write.graph).first_write(write.next, last, [*inner, *inputs])
    if between is not None:
        raise NoMatch(f"{between} may write memory between the rotation and the cache write")
