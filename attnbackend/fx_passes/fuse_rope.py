"""`FuseRopeCacheWrite`: head norms, rotary embedding and cache write in one op, layer by layer."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.fx import Graph, GraphModule, Node

from attnbackend.fx_passes.base import Change, GraphPass, PassReport, Stage
from attnbackend.fx_passes.cache_writes import (
    check_no_write_between,
    fuse_cache_writes,
    has_standard_cache,
    next_reader,
)
from attnbackend.fx_passes.edits import (
    emit,
    emit_view,
    made_contiguous,
    nodes_between,
    remove_unused,
    set_values,
)
from attnbackend.fx_passes.forms import NoMatch, Viewed, name_of
from attnbackend.fx_passes.nodes import OpNode, tensor_of
from attnbackend.fx_passes.rope_forms import RotatedHeads, match_rotated_heads
from attnbackend.ops.generate import backend_of_op
from attnbackend.ops.library import ATTENTION, KV_CACHE_UPDATE
from attnbackend.ops.rope_write import rope_kv_cache_update, rope_problem
from attnbackend.registry import resolve_backend

__all__ = ["FuseRopeCacheWrite"]

_WHAT = "rotation and cache write"
_SHAPE_ONLY = {"new_empty", "empty_like", "size", "sym_size", "stride", "dim"}
"""Calls that read no element of a tensor."""


class _Match(NamedTuple):
    write: OpNode
    reader: OpNode
    query: RotatedHeads
    key: RotatedHeads


class FuseRopeCacheWrite(GraphPass):
    """Rotation of queries and keys, norms of their heads before it, and the cache write become one op.

    It looks at each cache write: the keys that it writes, and the queries of the attention that reads what
    it wrote, must be rotated (halves turned, all or the first elements of a head) by angles of their tokens.
    What is split off one projection stays a view. Rows of slot -1 get their query too.
    """

    name = "fuse_rope_cache_write"
    stage = Stage.FUSE

    def run(self, graph_module: GraphModule) -> PassReport:
        return fuse_cache_writes(
            graph_module,
            self.name,
            _WHAT,
            KV_CACHE_UPDATE,
            lambda graph, write: _fuse(graph, _match(graph, write)),
        )


def _match(graph: Graph, write: OpNode) -> _Match:
    _check_support(write)
    given = write.arguments()
    reader = next_reader(graph, write, ATTENTION)
    match = _Match(
        write, reader, match_rotated_heads(reader.arguments()["query"]), match_rotated_heads(given["key"])
    )
    if not match.key.has_angles_of(match.query):
        raise NoMatch("queries and keys are rotated by different angles")
    _check_order(match)
    return match


def _check_support(write: OpNode) -> None:
    """Whether this layer's cache and types are what the fused kernel writes."""
    given = write.arguments()
    key, cache = tensor_of(given["key"]), tensor_of(given["kv_cache"])
    if reason := rope_problem(key.device.type):
        raise NoMatch(reason)
    named = backend_of_op(write.op)
    if named is not None and not has_standard_cache(resolve_backend(named[0])):
        raise NoMatch(f"{named[0]} has a cache of its own kind")
    if cache.dim() != 5 or cache.shape[1] != 2:
        raise NoMatch(f"the cache's shape is {tuple(cache.shape)}, not the standard one")
    if key.shape[-1] % 8 or not 16 <= key.shape[-1] <= 256:
        raise NoMatch(f"head size {key.shape[-1]}; the kernel takes multiples of 8 from 16 to 256")


def _check_order(match: _Match) -> None:
    write, inner = match.write.node, _inner_nodes(match)
    for node in inner:
        for user in node.users:
            if user in inner or user in (write, match.reader.node):
                continue
            if name_of(user) in _SHAPE_ONLY and user > write:
                continue
            raise NoMatch(f"{node} is used by {user} too")
    for value in (*match.query.inputs, *match.key.inputs):
        if not value < write:
            raise NoMatch(f"{value} comes after the write")
    check_no_write_between(inner, (*match.query.inputs, *match.key.inputs), write)


def _inner_nodes(match: _Match) -> set[Node]:
    """Everything between the inputs of the match and the rotated query and key, both included."""
    outputs = (match.reader.arguments()["query"], match.write.arguments()["key"])
    return nodes_between(outputs, (*match.query.inputs, *match.key.inputs))


def _fuse(graph: Graph, match: _Match) -> Change:
    given, write = match.write.arguments(), match.write.node
    inner = _inner_nodes(match)
    old = match.reader.arguments()["query"], given["key"]
    follows = made_contiguous(graph, old)
    with graph.inserting_before(write):
        both = _emit_op(graph, match, given)
        new = [emit(graph, operator.getitem, both, place, like=write) for place in range(2)]
    for before, after in zip(old, new, strict=True):
        before.replace_all_uses_with(after, delete_user_cb=lambda user: user > write)
    set_values(follows)
    before_name = match.write.op.name()
    graph.erase_node(write)
    remove_unused(graph, inner)
    norms = sum(x.norm is not None for x in (match.query, match.key))
    done = f"{norms} head norms, " if norms else ""
    return Change(write.name, f"{done}rotation, {before_name}", rope_kv_cache_update.name(), _because(match))


def _because(match: _Match) -> str:
    return f"{match.reader.node} reads the rotated {match.query.heads.source} and {match.key.heads.source}"


def _emit_op(graph: Graph, match: _Match, given: dict[str, Any]) -> Node:
    like = match.write.node

    def put(view: Viewed) -> Node:
        return emit_view(graph, view, like)

    tensors = [put(view) for view in (match.query.heads, match.key.heads)]
    angles = [put(view) for view in (match.key.cos, match.key.sin)]
    options = dict(_norm_options(match))
    options |= {k: v for k, v in given.items() if k in ("k_scale", "v_scale", "kv_cache_dtype", "group")}
    return emit(
        graph, rope_kv_cache_update, *tensors, given["value"], *angles, given["kv_cache"],
        given["slot_mapping"], like=like, **options,
    )  # fmt: skip


def _norm_options(match: _Match) -> Iterator[tuple[str, Any]]:
    for letter, heads in (("q", match.query), ("k", match.key)):
        if heads.norm is not None:
            yield f"{letter}_weight", heads.norm.weight
            yield f"{letter}_eps", heads.norm.eps
