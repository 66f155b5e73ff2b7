"""What tells calls of one kind apart, before a pass and after it: what they are given.

A pass may give a call other arguments that mean the same, so no mark has to stay. But where a call has none
of its own marks any more, and those of another instead, it is the other, in a place that was not its own.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping
from itertools import permutations
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from attnbackend.fx_passes.forms import name_of

__all__ = ["Marker", "Marks", "moved"]

Marks = tuple[frozenset[Hashable], frozenset[Hashable]]
"""By what is computed, and by the nodes themselves."""


class Marker:
    """Gives calls of a graph, as it is now, their marks."""

    def __init__(self, graph: Graph) -> None:
        self._formulas: dict[Node, int] = {}
        for node in graph.nodes:
            self._formulas[node] = self._formula(node)

    def _formula(self, node: Node, without: Container[Node] = ()) -> int:
        """A number for what is computed: equal for two nodes that apply one function to equal values."""
        if node.op not in ("call_function", "call_method"):
            return hash((node.op, str(node.target)))
        given = map_arg((node.args, node.kwargs), lambda n: None if n in without else self._formulas.get(n))
        return hash((name_of(node), repr(given)))

    def of(self, call: Node, without: Container[Node]) -> Marks:
        """Of the values that ``call`` is given, and what these are made of, ``without`` left out."""
        nodes = set(_ancestors([call], without))
        formulas = {self._formulas[n] for n in nodes if n is not call} | {self._formula(call, without)}
        return frozenset(formulas), frozenset(nodes)

    def of_value(self, value: Any, without: Container[Node]) -> Marks:
        """Of one of the values that a call is given."""
        given: list[Node] = []
        map_arg(value, given.append)
        nodes = set(_ancestors([n for n in given if n not in without], without))
        return frozenset(self._formulas[n] for n in nodes), frozenset(nodes)


def _ancestors(nodes: list[Node], without: Container[Node]) -> Iterator[Node]:
    stack, seen = list(nodes), set(nodes)
    while stack:
        node = stack.pop()
        yield node
        new = [n for n in node.all_input_nodes if n not in seen and n not in without]
        seen.update(new)
        stack += new


def moved(before: Mapping[int, list[Marks]], after: Mapping[int, list[Marks]]) -> Iterator[tuple[int, int]]:
    """Places in one order of calls, and the places that what is there had before, where these differ."""
    for kind in (0, 1):
        old, new = _union(before, kind), _union(after, kind)
        own = {p: old[p].difference(*(old[q] for q in old if q != p)) for p in old}
        for place, other in permutations(new.keys() & own.keys(), 2):
            is_other = new[place] & own[other] and not new[place] & own[place]
            if is_other and (new[other] & own[place] or not new[other] & own[other]):
                yield place, other


def _union(calls: Mapping[int, list[Marks]], kind: int) -> dict[int, frozenset[Any]]:
    return {place: frozenset().union(*(marks[kind] for marks in found)) for place, found in calls.items()}
