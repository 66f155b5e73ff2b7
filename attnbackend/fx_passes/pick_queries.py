"""Attention of those tokens alone whose output is wanted.

Shape legend: T tokens, R tokens that are picked, S requests, W block-table width, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from attnbackend._torch_compat import same_size
from attnbackend.fx_passes.edits import emit, nodes_between, remove_unused
from attnbackend.fx_passes.forms import NoMatch, argument, first, shape_of
from attnbackend.fx_passes.memory import Memory
from attnbackend.fx_passes.nodes import OpNode, find_ops, tensor_of
from attnbackend.ops.library import ATTENTION, role_of

__all__ = ["attend_picked", "attention_into"]

aten = torch.ops.aten
_ONE_ROW_A_QUERY = ("lse", "bidirectional_ranges", "output_scale", "output_block_scale")
"""Arguments of attention that a picked token would need a part of."""
_BATCH = ("query_start_loc", "seq_lens", "block_table")


def attention_into(graph: Graph, output: Node) -> OpNode | None:
    """The attention that writes ``output``, where it does in plain form."""
    found = [op for op in find_ops(graph) if op.node in output.users and role_of(op.op) is ATTENTION]
    return found[0] if found and found[0].arguments().get("output") is output else None


def attend_picked(graph: Graph, attention: OpNode, pick: Node) -> Node:
    """Puts attention of picked queries in the place of picked outputs of ``attention``.

    Each picked token is a request of its own then: its keys, all of which are in the cache, end with it.

    Args:
        graph: the graph.
        attention: the call.
        pick: ``index_select`` of its output.

    Returns:
        The ``index_select`` of the queries, which stands directly behind them.

    Raises:
        NoMatch: it may not be; says why.
    """
    given = attention.arguments()
    _check(attention.node, given, pick)
    rows_R, query = argument(pick, 2, "index"), given["query"]
    read = [rows_R, query, *(given[name] for name in _BATCH)]
    if (write := Memory(graph).first_write(query.next, attention.node, read)) is not None:
        raise NoMatch(f"{write} writes what {attention.node} reads, behind {query}")
    with graph.inserting_before(query.next):  # and so before what writes the cache
        picked = emit(graph, aten.index_select.default, query, 0, rows_R, like=query)
        changed = _requests(graph, attention.node, given, rows_R)
        contiguous = torch.contiguous_format
        output = emit(graph, aten.empty_like.default, picked, memory_format=contiguous, like=attention.node)
    with graph.inserting_before(attention.node):
        changed |= {"query": picked, "key": None, "value": None, "output": output, "group": -1}
        emit(graph, attention.op, **(given | changed), like=attention.node)
    made_before = nodes_between([given["output"]], [query])
    pick.replace_all_uses_with(output)
    for node in (pick, attention.node):
        graph.erase_node(node)
    remove_unused(graph, made_before)
    return picked


def _check(call: Node, given: dict[str, Any], pick: Node) -> None:
    output, query = tensor_of(given["output"]), tensor_of(given["query"])
    if query.device.type != "cpu":
        raise NoMatch(f"{call} has its plan from the host, which does not know of picked tokens")
    if argument(pick, 1, "dim") != 0 or first(pick) is not given["output"]:
        raise NoMatch(f"{pick} does not pick tokens of {given['output']}")
    batch = (given[name] for name in _BATCH)
    if late := [node for node in (*batch, argument(pick, 2, "index")) if given["query"] < node]:
        raise NoMatch(f"{late[0]} is computed behind {given['query']}")
    if others := [user for user in given["output"].users if user not in (call, pick)]:
        raise NoMatch(f"{others[0]} reads all rows of {given['output']}")
    if special := [name for name in _ONE_ROW_A_QUERY if given.get(name) is not None]:
        raise NoMatch(f"{call} has {special[0]}")
    if given.get("attn_type", "decoder") != "decoder" or not given.get("causal", True):
        raise NoMatch(f"{call} is no causal attention over a cache")
    if tensor_of(given["kv_cache"]).dtype is not query.dtype:
        raise NoMatch(f"{call} may read new keys before they were rounded for the cache")
    shapes = zip(shape_of(given["output"]), shape_of(given["query"]), strict=True)
    if output.dtype is not query.dtype or not all(same_size(*sizes) for sizes in shapes):
        raise NoMatch(f"{call} has output of another type or size than its query")


def _requests(graph: Graph, call: Node, given: dict[str, Any], rows_R: Node) -> dict[str, Any]:
    """Arguments of a batch in which each picked token is a request; one of no request has no keys."""

    def put(target: Any, *args: Any, **kwargs: Any) -> Node:
        return emit(graph, target, *args, like=call, **kwargs)

    starts, lens, table = (given[name] for name in _BATCH)
    token_R = put(aten._to_copy.default, rows_R, dtype=torch.int32)
    next_R = put(aten.searchsorted.Tensor, put(aten.slice.Tensor, starts, 0, 0, -1), token_R, right=True)
    request_R = put(aten.sub.Tensor, next_R, 1)
    behind_R = put(aten.sub.Tensor, put(aten.index_select.default, starts, 0, next_R), token_R)
    whole_R = put(aten.index_select.default, lens, 0, request_R)
    seen_R = put(aten.sub.Tensor, put(aten.add.Tensor, whole_R, 1), behind_R)
    lens_R = put(aten.clamp.default, put(aten.minimum.default, seen_R, whole_R), 0)
    count_R = put(aten.cumsum.default, put(aten.ones_like.default, token_R), 0)
    starts_R1 = put(aten.constant_pad_nd.default, count_R, [1, 0])
    return {
        "query_start_loc": put(aten._to_copy.default, starts_R1, dtype=torch.int32),
        "seq_lens": lens_R,
        "block_table": put(aten.index_select.default, table, 0, request_R),
    }
