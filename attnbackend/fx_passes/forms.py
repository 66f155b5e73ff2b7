"""What a node does, in one language for Dynamo's graphs (methods, operators, torch functions) and ATen's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from attnbackend._torch_compat import same_size
from attnbackend.fx_passes.nodes import tensor_of

__all__ = [
    "ASSERTION",
    "SAME_ELEMENTS",
    "NoMatch",
    "Viewed",
    "argument",
    "first",
    "has_layout_of",
    "last_range",
    "name_of",
    "only_adds_dimensions",
    "operands",
    "pair_of",
    "past_casts",
    "rounds",
    "same_memory",
    "shape_of",
    "view_source",
]


ASSERTION = "_assert_tensor_metadata"
"""What export puts beside a conversion; it goes with the tensor that it speaks of."""


class NoMatch(Exception):
    """What was looked for is not there; the text says what is instead."""


def name_of(node: Any) -> str:
    """``mul``, ``cat``, ...: the same whichever of its spellings the node has; "" for what is no call."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return getattr(node.target, "__name__", str(node.target))


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """An argument by place, else by name, else the default."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def first(node: Any) -> Any:
    """What a call is applied to, whether it is given by place or by name; None: nothing."""
    if not isinstance(node, Node) or node.args:
        return node.args[0] if isinstance(node, Node) else None
    return next((node.kwargs[name] for name in _FIRST if name in node.kwargs), None)


_FIRST = ("input", "self", "tensor", "tensors")


def pair_of(node: Any) -> tuple[Any, Any]:
    """The two sides of a call that has two; None for one that is not given."""
    second = argument(node, 1, "other", node.kwargs.get("mat2")) if isinstance(node, Node) else None
    return first(node), second


def shape_of(node: Any) -> Sequence[Any]:
    value = tensor_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def has_layout_of(a: Any, b: Any) -> bool:
    """Whether the elements of two values, equal but for that, surely lie in the same way."""
    if isinstance(a, (list, tuple)):
        return all(map(has_layout_of, a, b))
    if not isinstance(a, torch.Tensor):
        return True
    places = ((*x.stride(), x.storage_offset()) for x in (a, b))
    return all(map(same_size, *places))


def past_casts(node: Any) -> Any:
    """Past conversions between floating-point types of 16 bits or more, which round at most."""
    while name_of(node) in _CASTS and _is_wide(node) and _is_wide(first(node)):
        node = first(node)
    return node


def _is_wide(node: Any) -> bool:
    """Whether a value is of a floating-point type of 16 bits or more: a narrower one does more than round."""
    dtype = tensor_of(node).dtype if isinstance(node, Node) else torch.int32
    return bool(dtype.is_floating_point) and dtype.itemsize > 1


_CASTS = ("to", "_to_copy", "float", "half", "bfloat16", "type", "type_as", "convert_element_type")


def operands(node: Any, name: str) -> tuple[Any, Any]:
    """The two sides of a sum or product.

    Raises:
        NoMatch: the node is another call, or has a factor besides.
    """
    pair = pair_of(node)
    is_plain = None not in pair and len(node.args) <= 2 and not rounds(node)
    if name_of(node) != name or not is_plain or node.kwargs.get("alpha", 1) != 1:
        raise NoMatch(f"{node} is {name_of(node) or 'no call'} where {name} is looked for")
    return pair


def rounds(node: Node) -> bool:
    """Whether a quotient is rounded to a whole number."""
    return node.kwargs.get("rounding_mode") is not None


class Viewed(NamedTuple):
    """A node as a view of another: which of the other's dimensions each of its own is."""

    source: Node
    axes: tuple[int | None, ...]
    """None: of size 1, and no dimension of the source."""

    @classmethod
    def whole(cls, node: Node) -> Viewed:
        return cls(node, tuple(range(len(shape_of(node)))))

    def is_same(self, other: Viewed) -> bool:
        """Whether both show the same memory in the same way, wherever their dimensions of size 1 are from."""
        if not same_memory(self.source, other.source):
            return False
        sizes = shape_of(self.source)
        mine, others = (
            [a if a is None or not _is_one(sizes[a]) else None for a in v.axes] for v in (self, other)
        )
        return mine == others

    def through(self, step: Viewed) -> Viewed:
        """As a view of what ``self.source`` is a view of."""
        return Viewed(step.source, tuple(None if axis is None else step.axes[axis] for axis in self.axes))


def view_source(node: Node) -> Viewed:
    """Follows transpositions, dimensions of size 1 that come and go, and copies, as far as they reach."""
    found = Viewed.whole(node)
    while (step := _view_step(found.source)) is not None:
        found = found.through(step)
    return found


def _view_step(node: Node) -> Viewed | None:
    source = first(node)
    if not isinstance(source, Node) or not isinstance(tensor_of(source), torch.Tensor):
        return None
    name, rank = name_of(node), len(shape_of(source))
    axes: list[int | None] = list(range(rank))
    if name == "transpose":
        a, b = (argument(node, place, f"dim{place - 1}") for place in (1, 2))
        axes[a], axes[b] = axes[b], axes[a]
    elif name == "permute":
        axes = [axis % rank for axis in _flat(node.args[1:] or (node.kwargs["dims"],))]
    elif name in ("contiguous", "clone", "detach", "alias"):
        pass
    elif name == "select" or (name == "getitem" and isinstance(node.args[1], int)):
        dim = int(argument(node, 1, "dim")) % rank if name == "select" else 0
        if not _is_one(shape_of(source)[dim]):
            return None
        del axes[dim]
    elif name in _SAME_ELEMENTS or (name == "getitem" and only_adds_dimensions(node.args[1])):
        return _reshape_step(node, source)
    else:
        return None
    return Viewed(source, tuple(axes))


_SAME_ELEMENTS = {
    "view", "reshape", "_unsafe_view", "unflatten", "flatten", "squeeze", "unsqueeze", "expand",
}  # fmt: skip
SAME_ELEMENTS = _SAME_ELEMENTS | {"contiguous", "clone", "detach", "alias", "to", "_to_copy"}
"""Calls whose result, where it has as many elements and their type, has the same ones in the same order."""


def only_adds_dimensions(index: Any) -> bool:
    """Whether ``x[index]`` has all elements of x."""
    return isinstance(index, tuple) and all(i is None or i is Ellipsis or i == slice(None) for i in index)


def _flat(values: Sequence[Any]) -> list[Any]:
    return list(values[0]) if len(values) == 1 and isinstance(values[0], (list, tuple)) else list(values)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _reshape_step(node: Node, source: Node) -> Viewed | None:
    """A change of shape that only adds or drops dimensions of size 1."""
    real = [i for i, size in enumerate(shape_of(source)) if not _is_one(size)]
    axes: list[int | None] = []
    place = 0
    for size in shape_of(node):
        if _is_one(size):
            axes.append(None)
        elif place < len(real) and same_size(size, shape_of(source)[real[place]]):
            axes.append(real[place])
            place += 1
        else:
            return None
    return Viewed(source, tuple(axes)) if place == len(real) else None


def same_memory(a: Any, b: Any) -> bool:
    """Whether two nodes are one, or the same view of the same."""
    if a is b or not (isinstance(a, Node) and isinstance(b, Node)):
        return bool(a == b)
    name = name_of(a)
    if (
        not name
        or name != name_of(b)
        or name not in _VIEWS
        or len(a.args) != len(b.args)
        or a.kwargs != b.kwargs
    ):
        return False
    return all(same_memory(x, y) for x, y in zip(a.args, b.args, strict=True))


_VIEWS = _SAME_ELEMENTS | {"slice", "select", "getitem", "transpose", "permute", "narrow", "alias"}


def last_range(node: Any) -> tuple[Node, int, int]:
    """The node whose last dimension ``node`` is a part of, and where the part starts and stops.

    Raises:
        NoMatch: it is no such part, or a part whose place is not known.
    """
    name = name_of(node)
    if name == "slice":
        found = _sliced(node, argument(node, 1, "dim", 0), *(argument(node, i, "") for i in (2, 3)))
        found = found if argument(node, 4, "step", 1) == 1 else None
    elif name == "getitem" and name_of(node.args[0]) in ("chunk", "split", "split_with_sizes"):
        found = _piece(node.args[0], node.args[1])
    elif name == "getitem" and isinstance(node.args[1], tuple):
        found = _indexed(node)
    elif name == "alias":
        found = first(node), 0, shape_of(node)[-1]
    elif name == "narrow":
        dim, start, length = (argument(node, i + 1, n) for i, n in enumerate(("dim", "start", "length")))
        found = _sliced(node, dim, start, start + length) if isinstance(start, int) else None
    else:
        found = None
    if found is None:
        raise NoMatch(f"{node} is {name or 'no call'} where a part of the last dimension is looked for")
    return found


def _sliced(node: Node, dim: int, start: Any, stop: Any) -> tuple[Node, int, int] | None:
    source = first(node)
    assert isinstance(source, Node)
    shape = shape_of(source)
    size, start = shape[-1], 0 if start is None else start
    stop = size if stop is None else stop
    if dim % len(shape) != len(shape) - 1 or not all(isinstance(n, int) for n in (size, start, stop)):
        return None
    begin, end, _ = slice(start, stop).indices(size)
    return source, begin, end


def _indexed(node: Node) -> tuple[Node, int, int] | None:
    index: Any = node.args[1]
    *before, last = index
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    if not all(item is Ellipsis or item == slice(None) for item in before):
        return None
    rank = len(shape_of(node.args[0]))
    if Ellipsis not in before and len(before) + 1 != rank:
        return None
    return _sliced(node, -1, last.start, last.stop)


def _piece(cut: Node, index: Any) -> tuple[Node, int, int] | None:
    source = first(cut)
    names = ("split_size_or_sections", "split_size", "split_sizes", "chunks")
    sizes: Any = next(s for name in names if (s := argument(cut, 1, name)) is not None)
    whole, dim = shape_of(source), argument(cut, 2, "dim", 0)
    if dim % len(whole) != len(whole) - 1 or not isinstance(whole[-1], int):
        return None
    if name_of(cut) == "chunk":
        sizes = -(-whole[-1] // sizes)
    if isinstance(sizes, int):
        return _sliced(cut, -1, index * sizes, (index + 1) * sizes)
    return _sliced(cut, -1, sum(sizes[:index]), sum(sizes[: index + 1]))
