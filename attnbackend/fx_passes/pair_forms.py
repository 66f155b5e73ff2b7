"""Recognising pairs of elements that turn by angles of their tokens, computed pair by pair.

Shape legend: T tokens, R rotated elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.fx import Node

from attnbackend.fx_passes.forms import (
    NoMatch,
    Viewed,
    argument,
    last_range,
    name_of,
    operands,
    past_casts,
    shape_of,
    view_source,
)
from attnbackend.fx_passes.nodes import tensor_of
from attnbackend.fx_passes.rope_forms import both_ways, joined, token_angle

__all__ = ["TurnedPairs", "match_turned_pairs"]


class TurnedPairs(NamedTuple):
    """[T, ..., R]: of pairs (x, y) of ``pairs``, x cos - y sin of all of them, then y cos + x sin."""

    pairs: Viewed
    """What turns, with its dimensions in that order."""
    cos: Viewed
    """[T, R / 2]."""
    sin: Viewed
    interleaved: bool
    """Pairs are (2i, 2i + 1); False: (i, i + R / 2)."""

    def turns_as(self, other: TurnedPairs) -> bool:
        """Whether both turn the same pairs by the same angles."""
        same = self.cos.is_same(other.cos) and self.sin.is_same(other.sin)
        return same and self.interleaved == other.interleaved

    @property
    def inputs(self) -> tuple[Node, ...]:
        return self.pairs.source, self.cos.source, self.sin.source


def match_turned_pairs(node: Node) -> TurnedPairs:
    """Reads ``node`` as turned pairs.

    Raises:
        NoMatch: it is something else; says what.
    """
    viewed = view_source(past_casts(node))
    wide, interleaved, cos, sin = _rotation(viewed.source)
    source = past_casts(wide)
    if tensor_of(source).dtype != tensor_of(node).dtype:
        raise NoMatch(f"{node} is {tensor_of(node).dtype} where what turns is {tensor_of(source).dtype}")
    heads = viewed._replace(source=source)
    half = shape_of(source)[-1] // 2
    cos, sin = (token_angle(angle, source, half, heads) for angle in (cos, sin))
    return TurnedPairs(heads.through(view_source(source)), cos, sin, interleaved)


def _rotation(node: Node) -> tuple[Node, bool, Any, Any]:
    """What turns, whether its pairs lie side by side, cos and sin."""
    if name_of(node) not in ("cat", "concat"):
        raise NoMatch(f"{node} is {name_of(node) or 'no call'} where cat is looked for")
    first, second = joined(node)
    reason = f"{first} and {second} are no pair that turns by one angle"
    for x, y, cos, sin in _factors(first, second):
        try:
            return *_parts(x, y), cos, sin
        except NoMatch as no:  # The factors may be the other way round.
            reason = str(no)
    raise NoMatch(reason)


def _factors(first: Any, second: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """x, y, cos and sin of x cos - y sin and y cos + x sin."""
    left, right = operands(first, "sub")
    added = operands(second, "add")
    for x, cos in both_ways(operands(left, "mul")):
        for y, sin in both_ways(operands(right, "mul")):
            for one, other in both_ways(added):
                if _is_product(one, y, cos) and _is_product(other, x, sin):
                    yield x, y, cos, sin


def _is_product(node: Any, a: Any, b: Any) -> bool:
    try:
        factors = operands(node, "mul")
    except NoMatch:
        return False
    return any(p is a and q is b for p, q in both_ways(factors))


def _parts(x: Any, y: Any) -> tuple[Node, bool]:
    """What x and y are the first and second elements of pairs of, and whether these lie side by side."""
    steps = [_every_other(part) for part in (x, y)]
    if steps[0] is not None and steps[1] is not None:
        (source, first), (other, second) = steps  # type: ignore[misc]
        if source is not other or (first, second) != (0, 1):
            raise NoMatch(f"{x} and {y} are no pairs of one value")
        return source, True
    source, start, stop = last_range(x)
    size = shape_of(source)[-1]
    if (start, stop) != (0, size // 2) or last_range(y) != (source, size // 2, size):
        raise NoMatch(f"{x} and {y} are no halves of one value")
    return source, False


def _every_other(node: Any) -> tuple[Node, int] | None:
    """A value and 0 or 1, where ``node`` has every second element of its last dimension from there on."""
    rank = len(shape_of(node))
    if name_of(node) == "slice":
        dim, start, stop, step = (
            argument(node, place, name, default)
            for place, name, default in ((1, "dim", 0), (2, "start", None), (3, "end", None), (4, "step", 1))
        )
        if dim % rank != rank - 1:
            return None
    elif name_of(node) == "getitem" and isinstance(node.args[1], tuple) and _selects_last(node.args[1], rank):
        last = node.args[1][-1]
        start, stop, step = last.start, last.stop, last.step
    else:
        return None
    whole = stop is None or (isinstance(stop, int) and stop >= shape_of(node.args[0])[-1])
    start = 0 if start is None else start
    return (node.args[0], start) if step == 2 and whole and start in (0, 1) else None


def _selects_last(index: tuple[Any, ...], rank: int) -> bool:
    *before, last = index
    all_of_others = all(item is Ellipsis or item == slice(None) for item in before)
    return isinstance(last, slice) and all_of_others and (Ellipsis in before or len(index) == rank)
