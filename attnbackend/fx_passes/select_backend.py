"""`SelectBackend`: the selected backend's own ops in the place of the agnostic ones, node by node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from attnbackend.fx_passes.base import Change, GraphPass, NearMiss, PassReport, Stage
from attnbackend.fx_passes.choices import BackendChoice, BackendPriorities, Site, choose_backend
from attnbackend.fx_passes.memory import Memory
from attnbackend.fx_passes.nodes import OpNode, find_ops, tensor_of
from attnbackend.fx_passes.shape_range import ShapeRange
from attnbackend.ops.agnostic import (
    attention,
    kv_cache_update,
    mla_attention,
    mla_kv_cache_update,
    mla_mixed_attention,
)
from attnbackend.ops.bind import attention_config, update_config
from attnbackend.ops.generate import backend_of_op, backend_op
from attnbackend.ops.library import (
    ATTENTION,
    KV_CACHE_UPDATE,
    MLA_ATTENTION,
    MLA_CACHE_UPDATE,
    MLA_MIXED,
    OpRole,
)
from attnbackend.ops.mla_bind import mla_config
from attnbackend.selector import AttentionSelectorConfig, Selection

__all__ = ["BackendChoice", "SelectBackend"]


_READERS: dict[Any, tuple[OpRole, Callable[..., AttentionSelectorConfig]]] = {
    attention: (ATTENTION, attention_config),
    mla_attention: (MLA_ATTENTION, mla_config),
    mla_mixed_attention: (MLA_MIXED, mla_config),
}
"""Agnostic op -> the role of a backend's own, and what a call asks of a backend."""
_WRITERS: dict[Any, tuple[OpRole, Callable[..., AttentionSelectorConfig]]] = {
    kv_cache_update: (KV_CACHE_UPDATE, update_config),
    mla_kv_cache_update: (MLA_CACHE_UPDATE, mla_config),
}


class SelectBackend(GraphPass):
    """Swaps the agnostic ops for those of the backend that serves each node.

    A cache write follows the attention that reads the same cache, and stays agnostic where the backend has
    no writer of its own. Since all ops of a role share one schema, only the node's target changes.
    """

    name = "select_backend"
    stage = Stage.SELECT

    def __init__(self, backend: BackendChoice = None) -> None:
        if not (backend is None or callable(backend) or isinstance(backend, str | BackendPriorities)):
            raise TypeError(
                f"SelectBackend: backend={backend!r} must be a name, such as 'TRITON_ATTN', a function or "
                "BackendPriorities that gives names, or None for the automatic choice"
            )
        self.backend = backend

    def run(self, graph_module: GraphModule) -> PassReport:
        found = list(find_ops(graph_module.graph))
        tokens, memory = ShapeRange.of(graph_module), Memory(graph_module.graph)
        readers = {op.node: self._select(op, *_READERS[op.op], tokens) for op in found if op.op in _READERS}
        done = [_swap(op, readers[op.node], _READERS[op.op][0]) for op in found if op.op in _READERS]
        for op in found:
            if op.op in _WRITERS:
                selection = _reader_of(op, readers, memory) or self._select(op, *_WRITERS[op.op], tokens)
                done.append(_swap(op, selection, _WRITERS[op.op][0]))
        done += [miss for op in found if (miss := _named_already(op))]
        changes = tuple(x for x in done if isinstance(x, Change))
        if changes:
            graph_module.recompile()
        return PassReport(self.name, changes, tuple(x for x in done if isinstance(x, NearMiss)))

    def _select(
        self, op: OpNode, role: OpRole, config_of: Callable[..., AttentionSelectorConfig], tokens: ShapeRange
    ) -> Selection:
        call = role.call(**{name: tensor_of(a) for name, a in op.arguments().items()})
        return choose_backend(self.backend, config_of(call), Site.of(op.node, tokens))


def _swap(op: OpNode, selection: Selection, role: OpRole) -> Change | NearMiss:
    own = backend_op(selection.name, role)
    op.node.meta["attnbackend"] = selection
    if own is None:
        why = f"{selection.name} has no {role.suffix} of its own; the agnostic op serves"
        return NearMiss(op.node.name, "swap", (why,))
    before = op.op.name()
    op.set_op(own)
    return Change(op.node.name, before, own.name(), selection.because)


def _named_already(op: OpNode) -> NearMiss | None:
    named = backend_of_op(op.op)
    return named and NearMiss(op.node.name, "swap", (f"the graph names {named[0]} already",))


def _reader_of(update: OpNode, readers: dict[Node, Selection], memory: Memory) -> Selection | None:
    """The backend of an attention that reads the cache which ``update`` writes, the first after it."""
    key = memory.key(update.arguments()["kv_cache"])
    own = [op for op in find_ops(update.node.graph) if op.node in readers]
    found = [op.node for op in own if memory.key(op.arguments()["kv_cache"]) == key]
    found.sort(key=lambda node: node < update.node)
    return readers[found[0]] if found else None
