"""What C++ and Python tell each other of calls of ops: numbers that C++ reads at every call, and lessons.

Much of what an op honours is in context variables and in the registry, where C++ cannot look. Whoever puts
such a thing in force says so here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int64
from typing import Any, NamedTuple

__all__ = [
    "EPOCH",
    "PYTHON_ONLY",
    "STEP",
    "Argument",
    "LibraryCall",
    "amounts_to",
    "change_python_only",
    "lessons",
    "new_epoch",
    "new_step",
    "python_only",
]

PYTHON_ONLY = c_int64(0)
"""How many things are in force, in whichever thread, that Python alone honours."""
EPOCH = c_int64(0)
"""Moves when what C++ learned of calls may no longer hold."""
STEP = c_int64(0)
"""Moves with `EPOCH`, and where what was learned of calls under a plan of a step may no longer hold."""
_LOCK = threading.Lock()


def new_epoch() -> None:
    """All that was learned is forgotten."""
    with _LOCK:
        EPOCH.value += 1
        STEP.value += 1


def new_step() -> None:
    """What was learned of calls under plans is forgotten."""
    with _LOCK:
        STEP.value += 1


def change_python_only(by: int) -> None:
    """One more thing, or one less, that Python alone honours."""
    with _LOCK:
        PYTHON_ONLY.value += by


@contextmanager
def python_only() -> Iterator[None]:
    """Inside the ``with`` block every call of an op goes through Python."""
    change_python_only(1)
    try:
        yield
    finally:
        change_python_only(-1)


class Argument(NamedTuple):
    """Stands for a tensor that a call of ours was given."""

    name: str
    """As in the op's schema."""
    half: int | None = None
    """Of a cache [blocks, 2, ...]: its keys (0) or its values (1); None: all of it."""


class LibraryCall(NamedTuple):
    """One call of a library that a call of ours amounts to."""

    function: Any
    """The overload of an op of torch, or a function of tvm-ffi."""
    arguments: tuple[object, ...]
    """All of them in order: `Argument`, tensors that stay the same throughout the step, numbers and None."""


class _Lessons(threading.local):
    heard: list[LibraryCall] | None = None
    given: tuple[Any, ...] = ()


_LESSONS = _Lessons()


@contextmanager
def lessons(*given: Any) -> Iterator[list[LibraryCall]]:
    """Collects what `amounts_to` says inside the ``with`` block of a call with these tensors."""
    before, heard = (_LESSONS.heard, _LESSONS.given), list[LibraryCall]()
    _LESSONS.heard, _LESSONS.given = heard, given
    try:
        yield heard
    finally:
        _LESSONS.heard, _LESSONS.given = before


def amounts_to(call: Callable[[], LibraryCall | None], query: Any, output: Any) -> None:
    """Says that what an implementation did under a step's plan was one call of a library, and no more.

    Until the plan goes, the same holds for calls that differ only in where tensors are and what is in them.

    Args:
        call: gives it, or None where it was more than that; called if somebody wants to know.
        query, output: what the implementation was given. Where they are not what our op was given, somebody
            else did more, and nothing is learned.
    """
    if _LESSONS.heard is None or not (query is _LESSONS.given[0] and output is _LESSONS.given[1]):
        return
    if (library_call := call()) is not None:
        _LESSONS.heard.append(library_call)
