"""Recognising rotary embedding of queries and keys, and the norms of their heads before it.

Shape legend: T tokens, D head size, R rotated elements of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from attnbackend._torch_compat import same_size
from attnbackend.fx_passes.forms import (
    NoMatch,
    Viewed,
    argument,
    first,
    last_range,
    name_of,
    operands,
    past_casts,
    shape_of,
    view_source,
)
from attnbackend.fx_passes.nodes import tensor_of

__all__ = [
    "Norm",
    "RotatedHeads",
    "both_ways",
    "joined",
    "match_norm",
    "match_rotated_heads",
    "token_angle",
]


class Norm(NamedTuple):
    """Root-mean-square normalisation of the last dimension."""

    source: Node
    weight: Node
    eps: float | Node
    """A node where Dynamo takes the number for one that may change."""

    @property
    def inputs(self) -> list[Node]:
        given = (self.source, self.weight, self.eps)
        return [value for value in given if isinstance(value, Node)]


class _Rotation(NamedTuple):
    source: Node
    cos: Node
    sin: Node
    size: int
    """R."""


class RotatedHeads(NamedTuple):
    """Heads [T, heads, D] that are a rotation of ``heads``."""

    heads: Viewed
    """What is rotated, or normalised and rotated, with its dimensions in that order."""
    cos: Viewed
    """[T, R]."""
    sin: Viewed
    norm: Norm | None

    def has_angles_of(self, other: RotatedHeads) -> bool:
        """Whether both are rotated by the same angles."""
        return self.cos.is_same(other.cos) and self.sin.is_same(other.sin)

    @property
    def inputs(self) -> list[Node]:
        found = [self.heads.source, self.cos.source, self.sin.source]
        return found if self.norm is None else [*found, *self.norm.inputs]


def match_rotated_heads(node: Node) -> RotatedHeads:
    """Reads ``node``, [T, heads, D], as rotated heads.

    Raises:
        NoMatch: it is something else; says what.
    """
    viewed = view_source(node)
    rotation = _match_rotation(viewed.source)
    _check_types(node, rotation)
    before = viewed._replace(source=rotation.source)
    below = before.through(view_source(rotation.source))
    norm = match_norm(below.source)
    heads = before if norm is None else below._replace(source=norm.source)
    cos, sin = (
        token_angle(x, rotation.source, rotation.size, viewed) for x in (rotation.cos, rotation.sin)
    )  # fmt: skip
    return RotatedHeads(heads, cos, sin, norm)


def _check_types(node: Node, rotation: _Rotation) -> None:
    dtypes = {tensor_of(x).dtype for x in (node, rotation.source)}
    if len(dtypes) > 1:
        raise NoMatch(f"{node} is rotated in another type than its own: {', '.join(map(str, dtypes))}")


def _match_rotation(node: Node) -> _Rotation:
    """All of the last dimension rotated, or its first elements, the others joined on as they are."""
    if name_of(node) in ("cat", "concat"):
        first, rest = joined(node)
        rotation = _match_whole(first)
        source, start, stop = last_range(rotation.source)
        size = shape_of(source)[-1]
        if (start, stop) != (0, rotation.size) or last_range(rest) != (source, stop, size):
            raise NoMatch(f"{node} does not join rotated elements to the others of the same heads")
        return rotation._replace(source=source)
    return _match_whole(node)


def _match_whole(node: Node) -> _Rotation:
    left, right = operands(node, "add")
    try:
        return _match_sum(left, right)
    except NoMatch as first:
        try:
            return _match_sum(right, left)
        except NoMatch as second:
            raise NoMatch(f"{first}; {second}") from None


def _match_sum(straight: Any, turned: Any) -> _Rotation:
    """x cos + turn(x) sin, where turn gives (-second half, first half)."""
    for turn, sin in both_ways(operands(turned, "mul")):
        if name_of(turn) not in ("cat", "concat"):
            continue
        source, size = _match_turn(turn)
        for x, cos in both_ways(operands(straight, "mul")):
            if x is source:
                return _Rotation(source, cos, sin, size)
    raise NoMatch(f"{turned} has no factor that turns halves of what {straight} multiplies")


def both_ways(pair: tuple[Any, Any]) -> list[tuple[Any, Any]]:
    return [pair, (pair[1], pair[0])]


def _match_turn(node: Node) -> tuple[Node, int]:
    negated, second = joined(node)
    if name_of(negated) != "neg":
        raise NoMatch(f"{negated} is {name_of(negated) or 'no call'} where neg is looked for")
    source, start, stop = last_range(first(negated))
    size = shape_of(source)[-1]
    if size % 2 or (start, stop) != (size // 2, size) or last_range(second) != (source, 0, size // 2):
        raise NoMatch(f"{node} does not turn the halves of {source}")
    return source, size


def joined(node: Node) -> tuple[Any, Any]:
    parts, dim = argument(node, 0, "tensors"), argument(node, 1, "dim", 0)
    rank = len(shape_of(node))
    if len(parts) != 2 or dim % rank != rank - 1:
        raise NoMatch(
            f"{node} joins {len(parts)} parts along dimension {dim}, where 2 along the last are wanted"
        )
    return parts[0], parts[1]


def token_angle(angle: Any, rotated: Node, width: int, heads: Viewed) -> Viewed:
    """cos or sin as [T, width]: one row a token, none that differs from head to head.

    Args:
        angle: what multiplies ``rotated``, or parts of its last dimension.
        rotated: the value.
        width: elements of a row.
        heads: the value as [T, ...].

    Raises:
        NoMatch: it is something else; says what.
    """
    if not isinstance(angle, Node):
        raise NoMatch(f"{angle} is no tensor of angles")
    sizes, rank = shape_of(angle), len(shape_of(rotated))
    token_axis = heads.axes[0]
    axes = {axis + rank - len(sizes): axis for axis in range(len(sizes))}
    of_token = None if token_axis is None else axes.get(token_axis)
    for axis, size in enumerate(sizes[:-1]):
        if axis != of_token and not (isinstance(size, int) and size == 1):
            raise NoMatch(f"{angle} of shape {tuple(sizes)} differs between heads or requests")
    tokens = shape_of(heads.source)[token_axis] if token_axis is not None else 1
    if not sizes or not same_size(sizes[-1], width):
        raise NoMatch(f"{angle} has {sizes[-1:]} elements a token where {width} are rotated")
    if of_token is None or not same_size(sizes[of_token], tokens):
        if not same_size(tokens, 1):
            raise NoMatch(f"{angle} of shape {tuple(sizes)} has one row for all tokens")
        of_token = None
    return Viewed(angle, (of_token, len(sizes) - 1)).through(view_source(angle))


def match_norm(node: Node) -> Norm | None:
    """None where ``node`` is no norm of its last dimension with a weight."""
    if name_of(node) == "rms_norm":
        return _norm_call(node)
    try:
        return _norm_by_hand(node)
    except NoMatch:
        return None


def _norm_call(node: Node) -> Norm | None:
    source, weight = first(node), argument(node, 2, "weight")
    assert isinstance(source, Node)
    sizes = list(argument(node, 1, "normalized_shape"))
    eps = argument(node, 3, "eps")
    if weight is None or len(sizes) != 1 or not _is_weight(weight, source):
        return None
    return Norm(source, weight, torch.finfo(tensor_of(source).dtype).eps if eps is None else eps)


def _is_weight(weight: Any, source: Node) -> bool:
    return isinstance(weight, Node) and tuple(shape_of(weight)) == tuple(shape_of(source)[-1:])


def _norm_by_hand(node: Node) -> Norm:
    """weight * (x * rsqrt(mean(x ** 2) + eps)), computed in float32 in between or not."""
    for weight, scaled in both_ways(operands(node, "mul")):
        if not _is_weight(weight, node):
            continue
        for x, root in both_ways(operands(past_casts(scaled), "mul")):
            if name_of(root) == "rsqrt":
                source = past_casts(x)
                eps = _mean_square_eps(first(root), x)
                if tensor_of(source).dtype == tensor_of(node).dtype:
                    return Norm(source, weight, eps)
    raise NoMatch(f"{node} is no norm")


def _mean_square_eps(total: Any, x: Any) -> float | Node:
    mean, eps = operands(total, "add")
    if not isinstance(tensor_of(eps), (int, float, torch.SymFloat)) or name_of(mean) != "mean":
        raise NoMatch(f"{total} is no mean of squares")
    dims = argument(mean, 1, "dim")
    dims = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    if [dim % len(shape_of(x)) for dim in dims] != [len(shape_of(x)) - 1] or not argument(mean, 2, "keepdim"):
        raise NoMatch(f"{mean} is no mean of the last dimension")
    squares = first(mean)
    factors = squares.args if isinstance(squares, Node) else ()
    if (name_of(squares), factors) not in (("pow", (x, 2)), ("mul", (x, x)), ("square", (x,))):
        raise NoMatch(f"{squares} are no squares of {x}")
    return eps if isinstance(eps, Node) else float(eps)
