"""Recognising that a value is only wanted in float8: scaled by one number, or group by group."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from attnbackend.fx_passes.forms import (
    ASSERTION,
    NoMatch,
    argument,
    first,
    name_of,
    pair_of,
    rounds,
    shape_of,
)
from attnbackend.fx_passes.nodes import tensor_of

__all__ = ["Quantization", "match_quantization"]

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CASTS = {"to", "_to_copy", "float", "half", "bfloat16", "type", "convert_element_type"}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"}
_LARGEST_FLOOR = 1e-6
"""A floor under magnitudes up to this guards against division by 0 and does no more."""


class Quantization(NamedTuple):
    """What happens to a value until it is float8."""

    views: tuple[Node, ...]
    """Changes of shape, in order."""
    scale: Node
    """What it is divided by."""
    dtype: torch.dtype
    end: Node
    """The float8 value."""
    found_scales: tuple[Node, ...] = ()
    """The scales found for each group of the last dimension, in every form that the graph has of them, the
    size of that dimension 1; none: `scale` is one that is given."""
    group: int = 0
    """Elements of a group."""


class _Scaling(NamedTuple):
    quotient: Node
    scale: Node
    found_scales: tuple[Node, ...] = ()
    group: int = 0
    divisor: float = 0.0
    """Of a group's largest magnitude, to give its scale."""


def match_quantization(value: Node, ignored: Node) -> Quantization:
    """Reads what is done to ``value``, by others than ``ignored``, as a quantisation.

    Raises:
        NoMatch: it is something else; says what.
    """
    source, views = _past_shapes(value, ignored)
    users = _users(source, ignored)
    scaling = _given_scale(source, users[0]) if len(users) == 1 else _found_scales(source, users)
    if scaling.group and not {name_of(view) for view in views} <= _RESHAPES:
        raise NoMatch(f"{source} has groups of elements that do not follow each other in a token")
    limits, node = None, scaling.quotient
    while not _is_float8(node):
        node = _only_user(node, ignored)
        if name_of(node) in ("clamp", "clip") and limits is None:
            limits = argument(node, 1, "min"), argument(node, 2, "max")
        elif _is_shape_change(node):
            views.append(node)
        elif name_of(node) not in _CASTS or not (_is_float8(node) or (limits is None and _is_cast(node))):
            raise NoMatch(_no_step(node))
    dtype = tensor_of(node).dtype
    _check_range(node, limits, scaling, dtype)
    return Quantization(tuple(views), scaling.scale, dtype, node, scaling.found_scales, scaling.group)


def _past_shapes(node: Node, ignored: Node) -> tuple[Node, list[Node]]:
    """Past changes of shape and conversions between floating-point types."""
    views: list[Node] = []
    while len(users := _users(node, ignored)) == 1:
        user = users[0]
        if _is_shape_change(user):
            views.append(user)
        elif not _is_cast(user):
            break
        node = user
    return node, views


def _is_shape_change(node: Node) -> bool:
    return name_of(node) in _RESHAPES | {"transpose", "permute"}


def _is_float8(node: Node) -> bool:
    return tensor_of(node).dtype in _FLOAT8


def _is_cast(node: Node) -> bool:
    """To a floating-point type of 16 bits or more."""
    if name_of(node) not in _CASTS:
        return False
    dtype = tensor_of(node).dtype
    return bool(dtype.is_floating_point) and dtype.itemsize > 1


def _users(node: Node, ignored: Node) -> list[Node]:
    users = [user for user in node.users if user is not ignored and name_of(user) != ASSERTION]
    if not users:
        raise NoMatch(f"{node} is read by nobody, not by one quantisation")
    return users


def _only_user(node: Node, ignored: Node) -> Node:
    users = _users(node, ignored)
    if len(users) > 1:
        raise NoMatch(f"{node} is read by {', '.join(map(str, users))}, not by one quantisation")
    return users[0]


def _no_step(node: Node) -> str:
    name = name_of(node)
    if "fp4" in name:
        return f"{node} is {name}: nvfp4 needs compute capability 10.0, and no kernel here writes it"
    if name in _CASTS:
        return f"{node} converts to {tensor_of(node).dtype}"
    return f"{node} is {name or 'no call'}, no step of a quantisation"


def _given_scale(source: Node, user: Node) -> _Scaling:
    if name_of(user) in ("clamp", "clip") or (name_of(user) in _CASTS and not _is_cast(user)):
        raise NoMatch(f"{source} is converted without a scale")
    if name_of(user) not in ("div", "truediv", "mul") or rounds(user):
        raise NoMatch(_no_step(user))
    return _Scaling(user, _divisor(user, source))


def _divisor(node: Node, source: Node) -> Node:
    """The scale by which ``source`` is divided, or by whose reciprocal it is multiplied."""
    a, b = pair_of(node)
    if name_of(node) != "mul":
        other = b if a is source else None
    else:
        factor = b if a is source else a
        is_reciprocal = name_of(factor) == "reciprocal"
        other = first(factor) if is_reciprocal else None
    if not isinstance(other, Node):
        raise NoMatch(f"{node} neither divides by a scale nor multiplies by the reciprocal of one")
    return other


def _found_scales(source: Node, users: list[Node]) -> _Scaling:
    """One user takes magnitudes, another divides by what came of them."""
    ends = [_after_cast(source, user) for user in users]
    magnitudes = [node for _, node in ends if name_of(node) == "abs"]
    quotients = [(x, y) for x, y in ends if name_of(y) in ("div", "truediv", "mul") and not rounds(y)]
    if (len(magnitudes), len(quotients), len(ends)) != (1, 1, 2):
        raise NoMatch(f"{source} is read by {', '.join(map(str, users))}, not by one quantisation")
    dividend, quotient = quotients[0]
    scale = _divisor(quotient, dividend)
    scales, divisor = _scales_of(scale, magnitudes[0])
    size = shape_of(source)[-1]
    if not isinstance(size, int):
        raise NoMatch(f"{source} has groups of {size} elements, not of one size for all graphs")
    return _Scaling(quotient, scale, scales, size, divisor)


def _after_cast(source: Node, node: Node) -> tuple[Node, Node]:
    """``node``, or what alone reads it where it only converts, and what that reads."""
    if _is_cast(node) and len(users := _users(node, source)) == 1:
        return node, users[0]
    return source, node


def _scales_of(scale: Node, magnitudes: Node) -> tuple[tuple[Node, ...], float]:
    """Every form of the scales on the way from the largest magnitude to ``scale``, and its divisor."""
    path, divisor, node = [], 1.0, scale
    while name_of(node) != "amax":
        path.append(node)
        node, factor = _scale_step(node)
        divisor /= factor
    path.append(node)
    of: Any = first(node)
    while isinstance(of, Node) and of is not magnitudes and _is_cast(of):
        path.append(of)
        of = first(of)
    if of is not magnitudes or not _is_of_last(node):
        raise NoMatch(f"{node} is no largest magnitude of each group of the last dimension")
    scales = path[: next(i for i, n in enumerate(path) if _is_scaling_step(n)) + 1] if divisor != 1 else path
    inner = {
        magnitudes,
        *path,
        *(user for n in path for user in n.users if name_of(user) in ("eq", "__eq__")),
    }
    for step in inner - set(scales):
        if others := [user for user in step.users if user not in inner]:
            raise NoMatch(f"{step} is read by {', '.join(map(str, others))} too")
    return tuple(scales), divisor


def _scale_step(node: Node) -> tuple[Node, float]:
    """What a step of a scale's computation starts from, and the factor that it applies."""
    name = name_of(node)
    if _is_cast(node):
        return first(node), 1.0
    if _is_scaling_step(node):
        source, number = pair_of(node)
        return source, number if name == "mul" else 1.0 / number
    if name in ("clamp", "clip", "clamp_min") and argument(node, 2, "max") is None:
        floor = argument(node, 1, "min")
        if isinstance(floor, float) and 0 <= floor <= _LARGEST_FLOOR:
            return first(node), 1.0
        raise NoMatch(f"{node} puts {floor} under the scales, more than a guard against division by 0")
    if name == "where":
        test, one, value = (argument(node, i, n) for i, n in enumerate(("condition", "input", "other")))
        if one == 1.0 and isinstance(value, Node) and _is_zero_test(test, value):
            return value, 1.0
    raise NoMatch(f"{node} is {name or 'no call'}, no step from magnitudes to a scale")


def _is_scaling_step(node: Node) -> bool:
    is_by_number = isinstance(pair_of(node)[1], (int, float))
    return is_by_number and name_of(node) in ("div", "truediv", "mul") and not rounds(node)


def _is_zero_test(test: Any, value: Any) -> bool:
    return name_of(test) in ("eq", "__eq__") and first(test) is value and argument(test, 1, "other") == 0


def _is_of_last(node: Node) -> bool:
    """Whether the last dimension alone is reduced, and kept with size 1."""
    dims, rank = argument(node, 1, "dim"), len(shape_of(node))
    dims = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    last = len(dims) == 1 and isinstance(dims[0], int) and dims[0] % rank == rank - 1
    return last and bool(argument(node, 2, "keepdim"))


def _check_range(end: Node, limits: Any, scaling: _Scaling, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    if limits != (-largest, largest):
        raise NoMatch(f"values are limited to {limits} before {dtype}, not to its -{largest} to {largest}")
    if scaling.group and not math.isclose(scaling.divisor, largest, rel_tol=1e-6):
        raise NoMatch(f"{end}'s scales are magnitudes by {scaling.divisor:g}, not by {largest:g}")
