"""`FuseLatentRopeCacheWrite`: rotation, the latent's norm and the cache write of latent attention in one op.

Shape legend: T tokens, R qk_rope_head_dim.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.fx import Graph, GraphModule, Node

from attnbackend.backends.mla.common import MLACommonBackend
from attnbackend.fx_passes.base import Change, GraphPass, PassReport, Stage
from attnbackend.fx_passes.cache_writes import check_no_write_between, fuse_cache_writes, next_reader
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
from attnbackend.fx_passes.pair_forms import TurnedPairs, match_turned_pairs
from attnbackend.fx_passes.rope_forms import Norm, match_norm
from attnbackend.kernels import triton as kernels
from attnbackend.ops.generate import backend_of_op
from attnbackend.ops.latent_rope_write import rope_mla_kv_cache_update
from attnbackend.ops.library import MLA_ATTENTION, MLA_CACHE_UPDATE, MLA_MIXED, role_of
from attnbackend.registry import resolve_backend

__all__ = ["FuseLatentRopeCacheWrite"]

_WHAT = "rotation and write of latents"


class _Match(NamedTuple):
    write: OpNode
    reader: Node
    query_rope: Node
    """The rotated part of the reader's queries."""
    query: TurnedPairs
    key: TurnedPairs
    norm: Norm | None
    """Of the latent; None: it is written as it is."""

    @property
    def outputs(self) -> tuple[Node, ...]:
        given = self.write.arguments()
        normed = () if self.norm is None else (given["kv_c"],)
        return (self.query_rope, given["k_pe"], *normed)

    @property
    def inputs(self) -> tuple[Node, ...]:
        latent = [self.write.arguments()["kv_c"]] if self.norm is None else self.norm.inputs
        return (*self.query.inputs, *self.key.inputs, *latent)


class FuseLatentRopeCacheWrite(GraphPass):
    """Rotation of queries and keys, the norm of latents, and the write of their rows become one op.

    It looks at each write of a latent cache: the keys that it writes, and the rotated part of the queries
    that read it, must be pairs of elements turned by angles of their tokens, first elements of the pairs
    joined to second ones, as `layers.MLAAttention` computes them. Rows of slot -1 get their query too.
    """

    name = "fuse_latent_rope_cache_write"
    stage = Stage.FUSE

    def run(self, graph_module: GraphModule) -> PassReport:
        return fuse_cache_writes(
            graph_module,
            self.name,
            _WHAT,
            MLA_CACHE_UPDATE,
            lambda graph, write: _fuse(graph, _match(graph, write)),
        )


def _match(graph: Graph, write: OpNode) -> _Match:
    _check_support(write)
    reader = next_reader(graph, write, MLA_ATTENTION, MLA_MIXED)
    query_rope = _query_rope(reader)
    given = write.arguments()
    match = _Match(
        write, reader.node, query_rope, match_turned_pairs(query_rope), match_turned_pairs(given["k_pe"]),
        match_norm(given["kv_c"]),
    )  # fmt: skip
    if not match.key.turns_as(match.query):
        raise NoMatch("queries and keys are rotated by different angles, or by other pairs")
    _check_order(match)
    return match


def _check_support(write: OpNode) -> None:
    key = tensor_of(write.arguments()["k_pe"])
    if reason := kernels.unavailable_reason(key.device.type):
        raise NoMatch(reason)
    named = backend_of_op(write.op)
    if named is not None and not issubclass(resolve_backend(named[0]), MLACommonBackend):
        raise NoMatch(f"{named[0]} has a cache of its own kind")
    if key.shape[1] % 2 or key.shape[1] > 256:
        raise NoMatch(f"rotated keys have {key.shape[1]} elements; the kernel takes even numbers up to 256")


def _query_rope(reader: OpNode) -> Node:
    given = reader.arguments()
    if role_of(reader.op) is MLA_ATTENTION:
        return given["query_rope"]
    query, rope = given["query"], tensor_of(given["k_pe"]).shape[1]
    parts: Any = query.args[0] if name_of(query) in ("cat", "concat") else ()
    if len(parts) != 2 or tensor_of(parts[1]).shape[-1] != rope:
        raise NoMatch(f"{query} does not join a rotated part of {rope} elements to the others of a head")
    return parts[1]


def _check_order(match: _Match) -> None:
    write = match.write.node
    inner = nodes_between(match.outputs, match.inputs)
    for node in inner:
        for user in node.users:
            if user not in inner and user is not write and not (node in match.outputs and user > write):
                raise NoMatch(f"{node} is used by {user} too")
    for value in match.inputs:
        if not value < write:
            raise NoMatch(f"{value} comes after the write")
    check_no_write_between(inner, match.inputs, write)


def _fuse(graph: Graph, match: _Match) -> Change:
    write, given = match.write.node, match.write.arguments()
    inner = nodes_between(match.outputs, match.inputs)
    follows = made_contiguous(graph, match.outputs)
    with graph.inserting_before(write):
        results = _emit_op(graph, match, given)
        new = [
            emit(graph, operator.getitem, results, place, like=write) for place in range(len(match.outputs))
        ]
    for before, after in zip(match.outputs, new, strict=True):
        before.replace_all_uses_with(after, delete_user_cb=lambda user: user > write)
    set_values(follows)
    before_name = match.write.op.name()
    graph.erase_node(write)
    remove_unused(graph, inner)
    done = "norm of latents, " if match.norm is not None else ""
    because = f"{match.reader} reads the rotated {match.query.pairs.source} and {match.key.pairs.source}"
    return Change(write.name, f"{done}rotation, {before_name}", rope_mla_kv_cache_update.name(), because)


def _emit_op(graph: Graph, match: _Match, given: dict[str, Any]) -> Node:
    like = match.write.node

    def put(view: Viewed) -> Node:
        return emit_view(graph, view, like)

    latent = given["kv_c"] if match.norm is None else match.norm.source
    return emit(
        graph, rope_mla_kv_cache_update, put(match.query.pairs), latent, put(match.key.pairs),
        put(match.key.cos), put(match.key.sin), given["kv_cache"], given["slot_mapping"], like=like,
        interleaved=match.key.interleaved, **dict(_options(match, given)),
    )  # fmt: skip


def _options(match: _Match, given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    if match.norm is not None:
        yield "weight", match.norm.weight
        yield "eps", match.norm.eps
    yield from ((k, v) for k, v in given.items() if k in ("k_scale", "kv_cache_dtype", "group"))
