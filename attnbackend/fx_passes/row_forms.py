"""Which rows of its inputs a row of a call's result is made of.

A row is what a tensor has at one place of a dimension, such as what belongs to one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from attnbackend._torch_compat import same_size
from attnbackend.fx_passes.forms import (
    NoMatch,
    argument,
    first,
    last_range,
    name_of,
    only_adds_dimensions,
    shape_of,
)
from attnbackend.fx_passes.nodes import tensor_of

__all__ = ["RESHAPES", "row_sources"]

RESHAPES = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"}
"""Calls that give the same elements another shape."""


def row_sources(node: Node, dim: int) -> Mapping[Node, int]:
    """The inputs whose row i row i of ``node`` is made of, along which of their dimensions.

    Args:
        node: a call; a tuple stands for its tensors.
        dim: the dimension of the rows.

    Raises:
        NoMatch: a row is made of other rows too, or that is not known.
    """
    name, shape = name_of(node), shape_of(node)
    if name not in _CUTS and (not shape or same_size(shape[dim], 1)):
        raise NoMatch(f"{node} has no rows, or one for all that are picked")
    for names, rule in _RULES:
        if name in names:
            return rule(node, dim)
    raise NoMatch(f"{node} is {name or node.op}, which may mix rows")


def _elementwise(node: Node, dim: int) -> Mapping[Node, int]:
    """With broadcasting: dimensions are counted from the last."""
    from_last, sources = dim - len(shape_of(node)), {}
    for source in node.all_input_nodes:
        shape = shape_of(source)
        if len(shape) + from_last >= 0 and not same_size(shape[from_last], 1):
            sources[source] = len(shape) + from_last
    return sources


def _conversion(node: Node, dim: int) -> Mapping[Node, int]:
    """Of another tensor nothing but its type is taken."""
    return {first(node): dim}


def _linear(node: Node, dim: int) -> Mapping[Node, int]:
    return _along_rows(node, dim, 1)


def _norm(node: Node, dim: int) -> Mapping[Node, int]:
    sizes = argument(node, 1, "normalized_shape")
    return _along_rows(node, dim, len(sizes) if isinstance(sizes, (list, tuple)) else len(shape_of(node)))


def _along_rows(node: Node, dim: int, count: int) -> Mapping[Node, int]:
    """A function of the ``count`` last dimensions of the first input."""
    if dim >= len(shape_of(node)) - count:
        raise NoMatch(f"{node} mixes rows: they lie in its {count} last dimensions")
    given: list[Node] = []
    map_arg((node.args, node.kwargs), given.append)
    if given.count(source := first(node)) > 1:
        raise NoMatch(f"{node} takes all rows of {source} beside the one")
    return {source: dim}


def _dropout(node: Node, dim: int) -> Mapping[Node, int]:
    if argument(node, 2, "training", argument(node, 2, "train", True)) is not False:
        raise NoMatch(f"{node} draws random numbers")
    return _elementwise(node, dim)


def _softmax(node: Node, dim: int) -> Mapping[Node, int]:
    return _aside(node, dim, argument(node, 1, "dim"), first(node))


def _reduction(node: Node, dim: int) -> Mapping[Node, int]:
    source, over = first(node), argument(node, 1, "dim")
    rank = len(shape_of(source))
    if over is None:
        raise NoMatch(f"{node} mixes rows: it is over all dimensions")
    gone = {d % rank for d in (over if isinstance(over, (list, tuple)) else (over,))}
    kept = [d for d in range(rank) if argument(node, 2, "keepdim", False) or d not in gone]
    if kept[dim] in gone:
        raise NoMatch(f"{node} mixes rows: it is over dimension {dim}")
    return {source: kept[dim]}


def _reshape(node: Node, dim: int) -> Mapping[Node, int]:
    source, shape = first(node), shape_of(node)
    before = prod(shape[:dim])
    is_plain = tensor_of(node).dtype is tensor_of(source).dtype
    if is_plain and all(isinstance(size, int) for size in (*shape[:dim], *shape[dim + 1 :])):
        for place, size in enumerate(of_source := shape_of(source)):
            if same_size(size, shape[dim]) and same_size(prod(of_source[:place]), before):
                return {source: place}
    raise NoMatch(f"{node} has rows that are no rows of {source}")


def _permute(node: Node, dim: int) -> Mapping[Node, int]:
    source, rank = first(node), len(shape_of(node))
    axes = list(range(rank))
    if name_of(node) == "permute":
        given: Any = node.args[1:] or (node.kwargs["dims"],)
        axes = [d % rank for d in (given[0] if isinstance(given[0], (list, tuple)) else given)]
    else:
        a, b = (argument(node, place, f"dim{place - 1}") for place in (1, 2))
        axes[a], axes[b] = axes[b], axes[a]
    return {source: axes[dim]}


def _getitem(node: Node, dim: int) -> Mapping[Node, int]:
    source, place = node.args
    if isinstance(source, Node) and isinstance(place, int):
        return {source: dim if name_of(source) in _CUTS else dim + 1}
    if only_adds_dimensions(place):
        return _reshape(node, dim)
    return _part(node, dim)


def _select(node: Node, dim: int) -> Mapping[Node, int]:
    source = first(node)
    return {source: dim + (dim >= argument(node, 1, "dim") % len(shape_of(source)))}


def _part(node: Node, dim: int) -> Mapping[Node, int]:
    if dim == len(shape_of(node)) - 1:
        raise NoMatch(f"{node} is a part of the rows")
    return {last_range(node)[0]: dim}


def _cut(node: Node, dim: int) -> Mapping[Node, int]:
    return _aside(node, dim, argument(node, 2, "dim", 0), first(node))


def _cat(node: Node, dim: int) -> Mapping[Node, int]:
    return _aside(node, dim, argument(node, 1, "dim", 0), *first(node))


def _aside(node: Node, dim: int, other: Any, *sources: Node) -> Mapping[Node, int]:
    """A call that works along another dimension."""
    if not isinstance(other, int) or other % len(shape_of(sources[0])) == dim:
        raise NoMatch(f"{node} mixes rows: it is over dimension {other}")
    return dict.fromkeys(sources, dim)


_CUTS = {"split", "split_with_sizes", "chunk"}
_RULES: Sequence[tuple[set[str], Callable[[Node, int], Mapping[Node, int]]]] = (
    (
        {
            "_to_copy", "abs", "add", "bfloat16", "clamp", "clone", "contiguous", "convert_element_type",
            "cos", "detach", "div", "exp", "float", "gelu", "half", "maximum", "minimum", "mul", "neg",
            "pow", "reciprocal", "relu", "rsqrt", "rsub", "sigmoid", "silu", "sin", "softplus", "sqrt",
            "square", "sub", "tanh", "truediv", "where",
        },
        _elementwise,
    ),
    ({"to", "type_as"}, _conversion),
    ({"linear", "cpu_linear", "merged_linear"}, _linear),
    ({"layer_norm", "rms_norm"}, _norm),
    ({"dropout"}, _dropout),
    ({"softmax"}, _softmax),
    ({"mean", "sum", "amax", "amin"}, _reduction),
    (RESHAPES, _reshape),
    ({"permute", "transpose"}, _permute),
    ({"getitem"}, _getitem),
    ({"select"}, _select),
    ({"slice", "narrow"}, _part),
    (_CUTS, _cut),
    ({"cat"}, _cat),
)  # fmt: skip
