"""Python's side of ops whose calls C++ serves, whichever library of ours serves them.

A call that C++ has not met goes through Python, by an op of the same name and schema in a namespace of its
own: checks, messages and choices stay in one place.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable
from ctypes import CDLL, Structure, byref, c_char_p, c_int64, c_void_p, cast, pointer
from typing import Any

import torch

from attnbackend.native_calls import PYTHON_ONLY
from attnbackend.ops.calls import SCHEMA_TYPES
from attnbackend.ops.library import OpRole

__all__ = ["begin", "define", "prepare"]

_LIBRARY = torch.library.Library("attnbackend_python", "FRAGMENT")
_KINDS = {"Tensor": "W", "Tensor?": "w", "float": "f", "int": "i", "int?": "j", "bool": "b", "str": "s"}
_ALIKE = str.maketrans("TtPn", "WwWi")


class _Numbers(Structure):
    """As in known_calls.h."""

    _fields_ = (("python_only", c_void_p), ("epoch", c_void_p))


def prepare(ops: CDLL, roles: Iterable[OpRole], more: tuple[str, ...] = ()) -> None:
    """Makes a library's functions known, and asserts that its source takes what the schemas say."""
    ops.attnbackend_ops_kinds.restype = c_char_p
    hints = (typing.get_type_hints(role.call).values() for role in roles)
    own = " ".join([*("".join(map(_kind, annotations)) for annotations in hints), *more])
    kinds = ops.attnbackend_ops_kinds().decode()
    assert kinds.translate(_ALIKE) == own, f"the C++ source takes {kinds}, the schemas say {own}"


def begin(ops: CDLL, epoch: c_int64) -> None:
    """Lets a library serve what it has learned, until ``epoch`` moves."""
    numbers = (cast(pointer(number), c_void_p) for number in (PYTHON_ONLY, epoch))
    ops.attnbackend_ops_share_numbers(byref(_Numbers(*numbers)))


def _kind(annotation: Any) -> str:
    return _KINDS[SCHEMA_TYPES[annotation]]


def define(name: str, schema: str, run: Callable[..., Any] | None) -> None:
    """An op that C++ calls; None: one that it has itself."""
    _LIBRARY.define(f"{name}{schema}")
    if run is not None:
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
