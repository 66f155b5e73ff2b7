"""`PickRowsEarly`: what is picked at the end of a computation is picked before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from attnbackend.fx_passes.base import Change, GraphPass, NearMiss, PassReport
from attnbackend.fx_passes.cache_writes import caches_in
from attnbackend.fx_passes.edits import emit, emit_again
from attnbackend.fx_passes.forms import NoMatch, argument, first, has_layout_of, name_of, shape_of
from attnbackend.fx_passes.nodes import OpNode, may_write, tensor_of
from attnbackend.fx_passes.pick_queries import attend_picked, attention_into
from attnbackend.fx_passes.row_forms import RESHAPES, row_sources

__all__ = ["PickRowsEarly"]

aten = torch.ops.aten


class PickRowsEarly(GraphPass):
    """Moves an ``index_select`` that is returned to what its source is computed of, row by row.

    Behind a model's last attention, everything is needed for the tokens alone whose logits are wanted:
    projections, norms and the MLP then run on those. It pays where fewer rows are picked than there
    are, which a graph does not tell: run it on graphs of which you know it.

    Of attention on a CPU, picked tokens alone are then queries, each a request of its own: their keys are in
    the cache. Their sums may be rounded otherwise. It moves past what computes each row of its result of the
    same row of its inputs, and stops, with the reason, at what somebody else reads, what may mix rows, and
    calls that write other memory.

    Args:
        picks_queries: False: attention stays as it is.
    """

    name = "pick_rows_early"

    def __init__(self, picks_queries: bool = True) -> None:
        self.picks_queries = picks_queries

    def run(self, graph_module: GraphModule) -> PassReport:
        graph, changes, misses = graph_module.graph, [], []
        for pick in filter(_is_pick, graph.output_node().all_input_nodes):
            above = _Above.of(pick)
            if not above.moved:
                misses.append(NearMiss(pick.name, "earlier pick of rows", tuple(above.stops)))
                continue
            change, picks = _move(graph, pick, above)
            changes.append(change)
            for attention, early in _attentions(graph, picks if self.picks_queries else ()):
                try:
                    changes += _attend(graph, attention, early)
                except NoMatch as no:
                    misses.append(NearMiss(attention.node.name, "attention of picked rows", (str(no),)))
        if changes:
            graph_module.recompile()
        return PassReport(self.name, tuple(changes), tuple(misses))


def _is_pick(node: Node) -> bool:
    return name_of(node) == "index_select" and len(node.users) == 1 and not may_write(node)


@dataclass(frozen=True)
class _Above:
    """What of the computation above a pick can be of picked rows alone."""

    dims: dict[Node, int]
    """What is to be picked of, and of what nothing else is wanted, and which dimension the rows are."""
    moved: dict[Node, Mapping[Node, int]] = field(default_factory=dict)
    """The calls that are made of picked rows, the last first, each with what those are picked of."""
    stops: list[str] = field(default_factory=list)
    """Why there are no more."""
    caches: frozenset[Node] = frozenset()
    """What stands for memory of caches: whoever reads it stays as it is."""

    @classmethod
    def of(cls, pick: Node) -> _Above:
        source = first(pick)
        dims = {source: argument(pick, 1, "dim") % len(shape_of(source))}
        found = cls(dims, caches=caches_in(pick.graph))
        node = pick.prev
        while node.op != "root" and not may_write(node):
            if node in found.dims:
                found._add(node, pick)
            node = node.prev
        if node in found.dims or any(wanted < node for wanted in found.dims):
            found.stops.append(f"{node} writes memory")
        for part, sources in list(found.moved.items()):
            if any(x not in found.moved and not shape_of(x) for x in sources):
                del found.moved[part]  # of a tuple that stays whole
        return found

    def _add(self, node: Node, pick: Node) -> None:
        dim = self.dims[node]
        try:
            self._check_readers(node, pick)
            sources = row_sources(node, dim)
            if read := self.caches.intersection(sources):
                raise NoMatch(f"{node} reads a cache, {min(read)}")
            if other := [x for x, d in sources.items() if self.dims.get(x, d) != d]:
                raise NoMatch(f"rows of {other[0]} are two of its dimensions")
        except NoMatch as no:
            self.stops.append(str(no))
        else:
            self.moved[node] = sources
            self.dims.update(sources)

    def _check_readers(self, node: Node, pick: Node) -> None:
        for user in node.users:
            if user is not pick and node not in self.moved.get(user, ()):
                raise NoMatch(f"{user} reads all rows of {node}")


def _attentions(graph: Graph, picks: Sequence[Node]) -> Iterator[tuple[OpNode, Node]]:
    """What writes that of which rows are picked."""
    for pick in picks:
        if (attention := attention_into(graph, first(pick))) is not None:
            yield attention, pick


def _attend(graph: Graph, attention: OpNode, pick: Node) -> Iterator[Change]:
    name, query = attention.node.name, attention.arguments()["query"]
    queries = attend_picked(graph, attention, pick)
    yield Change(name, f"of {query}", f"of {queries}", "each picked token is a request")
    if (above := _Above.of(queries)).moved:
        yield _move(graph, queries, above)[0]


def _move(graph: Graph, pick: Node, above: _Above) -> tuple[Change, list[Node]]:
    """The picks that take the place of ``pick``, too."""
    rows, last = argument(pick, 2, "index"), first(pick)
    picked: dict[Node, Node] = {}
    with graph.inserting_before(pick):
        for node, sources in reversed(above.moved.items()):
            for source, dim in sources.items():
                if source not in picked:
                    picked[source] = emit(graph, aten.index_select.default, source, dim, rows, like=pick)
            picked[node] = _again(graph, node, above.dims[node], {x: picked[x] for x in sources})
        result = picked[last]
        if not has_layout_of(tensor_of(result), tensor_of(pick)):
            result = emit(graph, aten.contiguous.default, result, like=pick)
    pick.replace_all_uses_with(result)
    for node in (pick, *above.moved):
        graph.erase_node(node)
    picked_of = [node for node in picked if node not in above.moved]
    names = ", ".join(node.name for node in picked_of)
    change = Change(pick.name, f"of {last}", f"of {names}", f"{len(above.moved)} calls go row by row")
    return change, [picked[node] for node in picked_of]


def _again(graph: Graph, node: Node, dim: int, picked: Mapping[Node, Node]) -> Node:
    if name_of(node) not in RESHAPES:
        return emit_again(graph, node, picked)
    sizes = [*shape_of(node)]
    sizes[dim] = -1
    return emit(graph, aten.reshape.default, picked[first(node)], sizes, like=node)
