"""`QuantizeQueries`: queries become float8 in the graph, not inside of the op that wants them so."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule

from attnbackend.fx_passes.base import Change, GraphPass, NearMiss, PassReport, Stage
from attnbackend.fx_passes.edits import emit
from attnbackend.fx_passes.forms import NoMatch
from attnbackend.fx_passes.nodes import OpNode, find_ops, tensor_of
from attnbackend.fx_passes.retarget import OpSite
from attnbackend.ops.library import ATTENTION, role_of
from attnbackend.registry import resolve_backend
from attnbackend.selector import backend_reasons

__all__ = ["QuantizeQueries"]

aten = torch.ops.aten
_WHAT = "quantised query"


class QuantizeQueries(GraphPass):
    """Clamp and cast of the query move out of ops that quantise it, into the graph.

    Inductor computes them together with what made the query. It looks at each attention whose backend is
    selected and converts queries for its cache (`AttentionBackend.query_dtype`): `FLASH_ATTN` over float8
    caches. The calls are the same; compiled code may round less between them and what made the query.
    """

    name = "quantize_queries"
    stage = Stage.CLEAN

    def run(self, graph_module: GraphModule) -> PassReport:
        graph, changes, misses = graph_module.graph, [], []
        for op in [op for op in find_ops(graph) if role_of(op.op) is ATTENTION]:
            try:
                changes.append(_quantize(graph, op, _query_dtype(op)))
            except NoMatch as no:
                misses.append(NearMiss(op.node.name, _WHAT, (str(no),)))
        if changes:
            graph_module.recompile()
        return PassReport(self.name, tuple(changes), tuple(misses))


def _query_dtype(op: OpNode) -> torch.dtype:
    if op.is_wrapped:
        raise NoMatch("the call is inside functionalisation's wrapper; run UndoFunctionalization first")
    site, given = OpSite.of(op), op.arguments()
    assert site is not None
    if site.backend is None:
        raise NoMatch("no backend is selected yet; run SelectBackend first")
    dtype = resolve_backend(site.backend).query_dtype(site.kv_cache_dtype)
    if dtype is None:
        raise NoMatch(f"{site.backend} takes queries as they are for a cache of {site.kv_cache_dtype!r}")
    if tensor_of(given["query"]).dtype is dtype:
        raise NoMatch("the query is quantised already")
    is_quantized = any(given.get(name) is not None for name in ("output_scale", "output_block_scale"))
    if given.get("key") is None and is_quantized:
        raise NoMatch("neither key nor output would have the model's type beside a quantised query")
    config = replace(site.config, has_quantized_query=True)
    if reasons := backend_reasons(site.backend, config):
        raise NoMatch("; ".join(f"{site.backend}: {reason}" for reason in reasons))
    return dtype


def _quantize(graph: Graph, op: OpNode, dtype: torch.dtype) -> Change:
    call, query, limit = op.node, op.arguments()["query"], torch.finfo(dtype).max
    with graph.inserting_before(call):
        limited = emit(graph, aten.clamp.default, query, -limit, limit, like=call)
        stored = emit(graph, aten._to_copy.default, limited, dtype=dtype, like=call)
    if call.args:
        call.args = (stored, *call.args[1:])
    else:
        call.update_kwarg("query", stored)
    return Change(call.name, f"{op.op.name()} of {query}", f"{op.op.name()} of {stored}", f"{dtype} queries")
