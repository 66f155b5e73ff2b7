"""`RecogniseAttention`: attention that a model spells in its own way becomes the agnostic op.

Shape legend: B requests, H query heads, K key-value heads, N query tokens, L keys, D head size, T tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from attnbackend._torch_compat import add_buffer, same_size
from attnbackend.fx_passes.attention_forms import AttentionForm, is_candidate, match_attention
from attnbackend.fx_passes.base import Change, GraphPass, NearMiss, PassReport, Stage
from attnbackend.fx_passes.edits import (
    emit,
    insert_traced,
    remove_unused,
    restrided,
    result_of,
    set_values,
    traced_calls,
)
from attnbackend.fx_passes.forms import NoMatch, has_layout_of, name_of, shape_of
from attnbackend.fx_passes.memory import Memory
from attnbackend.fx_passes.nodes import tensor_of
from attnbackend.integrations.dense_cache import attend_dense
from attnbackend.layers.paged import BatchTensors, BoundLayer, write_and_attend
from attnbackend.types import AttentionType

__all__ = ["PagedState", "RecogniseAttention"]


@dataclass(frozen=True)
class PagedState:
    """What a graph needs to keep its keys in pages from step to step.

    Both are memory that the graph will read, and the caches it will write, wherever it runs: fill the batch's
    tensors in place before each step.
    """

    batch: BatchTensors
    """``slot_mapping`` as long as the most tokens that a step may have; the first T of it count."""
    kv_caches: tuple[Tensor, ...]
    """One for each attention of the graph, in their order."""


class RecogniseAttention(GraphPass):
    """Finds ``F.scaled_dot_product_attention``, ``flex_attention`` and softmax(Q K^T) V written out.

    Without ``paged``, attention of dense tensors stays attention of dense tensors, on the agnostic op. With
    it, causal attention of one row of new tokens to themselves becomes a write of their keys and attention to
    all that the request has in its cache.

    Left alone, with the reason: masks that are tensors, causal attention from the top left over more keys
    than queries, dropout, head sizes that differ, anything that needs a gradient, a value on the way
    that is written in place.

    Raises:
        ValueError: in `run`, where a second graph has attention that the first one had not: a model that
            breaks into graphs would keep several layers in one cache.
    """

    name = "recognise_attention"
    stage = Stage.RECOGNISE

    def __init__(self, paged: PagedState | None = None) -> None:
        self.paged = paged
        self._places: list[str] = []
        """Where in the model the attention is that has the caches."""

    def run(self, graph_module: GraphModule) -> PassReport:
        changes: list[Change] = []
        misses: list[NearMiss] = []
        places: list[str] = []
        for node in [n for n in graph_module.graph.nodes if is_candidate(n)]:
            try:
                form = match_attention(node, graph_module)
                if not form.takes_pair:
                    _check_writes(graph_module, node, form)
                how = self._paged(graph_module, form, len(changes)) if self.paged else _dense(form)
                places.append(_place(node))
                changes.append(_replace(graph_module.graph, node, form, *how))
            except NoMatch as no:
                misses.append(NearMiss(node.name, "agnostic attention", (str(no),)))
        if changes:
            self._claim_caches(places)
            graph_module.recompile()
        return PassReport(self.name, tuple(changes), tuple(misses))

    def _claim_caches(self, places: list[str]) -> None:
        self._places = self._places or places
        if self.paged is not None and places != self._places:
            other = next((p for p in places if p not in self._places), places[-1])
            raise ValueError(
                f"the caches of a PagedState are those of one graph's {len(self._places)} attentions, and "
                "another graph has others, which would be kept in the same caches; compile the model in one "
                f"graph (fullgraph=True says where it breaks), or give each part a pass and caches of its "
                f"own. Found: {other}"
            )

    def settings(self) -> dict[str, Any]:
        return {"is_paged": self.paged is not None}

    def _paged(
        self, graph_module: GraphModule, form: AttentionForm, place: int
    ) -> tuple[Callable[..., Tensor], list[Node]]:
        """The function that stands for the form, and its arguments beside query, key and value."""
        assert self.paged is not None
        _check_paged(form, self.paged, place)
        names = [f"attnbackend_batch_{name}" for name in BatchTensors._fields]
        values = dict(zip(names, self.paged.batch, strict=True))
        values[f"attnbackend_kv_cache_{place}"] = self.paged.kv_caches[place]
        nodes = [_attribute(graph_module, name, value, form.query) for name, value in values.items()]
        features = {"scale": form.scale, "logits_soft_cap": form.logits_soft_cap}

        def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
            q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (q, k, v))
            batch = BatchTensors(rest[0][: q.shape[2]], *rest[1:4])
            out_THD = write_and_attend(q_THD, k_TKD, v_TKD, BoundLayer(rest[4]), batch, **features)
            return out_THD.transpose(0, 1).unsqueeze(0)

        return attend, nodes


def _place(node: Node) -> str:
    """Where in the model a node comes from: the same for each graph that is made of the same code."""
    modules = [value[0] for value in node.meta.get("nn_module_stack", {}).values()]
    return f"{'; '.join(map(str, modules))}\n{node.meta.get('stack_trace', '')}"


def _check_paged(form: AttentionForm, paged: PagedState, place: int) -> None:
    if not form.causal or not same_size(shape_of(form.query)[0], 1):
        raise NoMatch(
            f"causal={form.causal} attention of {shape_of(form.query)[0]} rows; one causal row is paged"
        )
    if place >= len(paged.kv_caches):
        raise NoMatch(f"there are {len(paged.kv_caches)} caches, and all are taken")
    cache, key = tuple(paged.kv_caches[place].shape), shape_of(form.key)
    if len(cache) != 5 or cache[3:] != (key[1], key[3]):
        raise NoMatch(f"its cache has shape {cache}, and its keys {key[1]} heads of {key[3]}")


def _dense(form: AttentionForm) -> tuple[Callable[..., Tensor], list[Node]]:
    kind = AttentionType.DECODER
    if not form.causal:
        is_own = same_size(shape_of(form.query)[2], shape_of(form.key)[2])
        kind = AttentionType.ENCODER_ONLY if is_own else AttentionType.ENCODER_DECODER
    features = {
        "scale": form.scale, "causal": form.causal, "logits_soft_cap": form.logits_soft_cap,
        "sliding_window": None, "attention_chunk_size": None,
    }  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_dense(q, k, v, None, features, kind).transpose(1, 2)

    return attend, []


def _attribute(graph_module: GraphModule, name: str, value: Tensor, like: Node) -> Node:
    """A tensor that the graph's module holds, as a node in front of all calls."""
    found = [n for n in graph_module.graph.nodes if n.op == "get_attr" and n.target == name]
    if found:
        return found[0]
    add_buffer(graph_module, name, value)
    first = next(n for n in graph_module.graph.nodes if n.op != "placeholder")
    with graph_module.graph.inserting_before(first):
        node = graph_module.graph.get_attr(name)
    query: Any = like.meta.get("val", like.meta.get("example_value"))
    node.meta["val" if "val" in like.meta else "example_value"] = query.fake_mode.from_tensor(
        value, static_shapes=True
    )
    return node


def _check_writes(graph_module: GraphModule, node: Node, form: AttentionForm) -> None:
    """Raises NoMatch where something on the way to ``node`` is written in place, a mask by a mask, say."""
    inner = {n for n in _between(node, form) if isinstance(tensor_of(n), Tensor)}
    values = {*inner, *form[:3]}
    if write := Memory(graph_module.graph).first_write(min(inner), node, values):
        raise NoMatch(f"{write} writes in place what it is computed of")


def _between(node: Node, form: AttentionForm) -> set[Node]:
    """What leads from query, key and value to the node, itself included."""
    found, stack = set(), [node]
    while stack:
        current = stack.pop()
        if current not in found and current not in form[:3] and current.op not in ("placeholder", "get_attr"):
            found.add(current)
            stack += current.all_input_nodes
    return found


def _results(pair: Node) -> list[Node]:
    for user in pair.users:
        if user.target is not operator.getitem or (user.args[1] != 0 and user.users):
            raise NoMatch(f"{user} reads more of {pair} than its output")
    return [user for user in pair.users if user.args[1] == 0]


def _trace(attend: Callable[..., Tensor], given: list[Node]) -> GraphModule:
    try:
        return traced_calls(attend, given)
    except ValueError as error:  # sizes or types that no backend takes
        raise NoMatch(str(error).partition(". Tried")[0]) from error


def _follows(graph: Graph, ends: list[Node], value: Tensor) -> dict[Node, Any] | None:
    """What follows from ``ends`` lying as ``value`` does; None: it must be made contiguous, as they are.

    Raises:
        NoMatch: neither will do.
    """
    if all(has_layout_of(tensor_of(end), value) for end in ends):
        return {}
    try:
        found = restrided(graph, dict.fromkeys(ends, value))
    except NoMatch:
        if all(has_layout_of(tensor_of(end), tensor_of(end).new_empty(value.shape)) for end in ends):
            return None
        raise
    return {node: value for node, value in found.items() if node not in ends}


def _replace(
    graph: Graph, node: Node, form: AttentionForm, attend: Callable[..., Tensor], rest: list[Node]
) -> Change:  # fmt: skip
    given = [form.query, form.key, form.value, *rest]
    traced = _trace(attend, given)
    ends = _results(node) if form.takes_pair else [node]
    follows = _follows(graph, ends, result_of(traced))
    with graph.inserting_before(node):
        out = insert_traced(graph, traced, given, like=form.query)
        if follows is None:
            out = emit(graph, torch.ops.aten.contiguous.default, out, like=form.query)
    set_values(follows or {})
    for end in ends:
        end.replace_all_uses_with(out)
    remove_unused(graph, [node, *node.users] if form.takes_pair else _between(node, form))
    what = (
        "softmax(Q K^T) V" if name_of(node) not in ("flex_attention", "scaled_dot_product_attention") else ""
    )
    where = "over pages" if rest else "over dense tensors"
    return Change(node.name, what or name_of(node), "attnbackend::attention", where)
