"""Which calls of ops that are C++ go through Python all the same: numbers that C++ reads at every call.

Much of what an op honours is in context variables and in the registry, where C++ cannot look. Whoever puts
such a thing in force says so here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int64

__all__ = ["EPOCH", "PYTHON_ONLY", "change_python_only", "python_only"]

PYTHON_ONLY = c_int64(0)
"""How many things are in force, in whichever thread, that Python alone honours."""
EPOCH = c_int64(0)
"""Moves when what C++ learned of calls may no longer hold."""
_LOCK = threading.Lock()


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
