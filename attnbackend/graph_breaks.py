"""Where a step that is captured in pieces is cut: attention and cache writes run between its CUDA graphs.

Whoever captures says so with `set_breaks`; ops that are to stay outside of graphs hand themselves over with
`run_between`. Nested calls are part of the outer one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

from attnbackend.native_calls import python_only

__all__ = ["Breaks", "run_between", "set_breaks"]

A = TypeVar("A", bound=tuple[Any, ...])


class Breaks(ABC):
    """A capture in pieces."""

    @abstractmethod
    def between(self, run: Callable[[A], None], arguments: A) -> None:
        """Runs ``run(arguments)`` outside of any graph, now and at each replay.

        Args:
            run: writes tensors among ``arguments`` and returns nothing.
            arguments: a tuple, or a NamedTuple, of tensors, numbers and None.
        """


_CURRENT: ContextVar[Breaks | None] = ContextVar("attnbackend_graph_breaks", default=None)


@contextmanager
def set_breaks(breaks: Breaks | None) -> Iterator[None]:
    """Hands calls of `run_between` inside the ``with`` block to ``breaks``; None: they just run."""
    token = _CURRENT.set(breaks)
    try:
        with nullcontext() if breaks is None else python_only():
            yield
    finally:
        _CURRENT.reset(token)


def run_between(run: Callable[[A], None], arguments: A) -> None:
    """``run(arguments)``, between two graphs where a step is captured in pieces."""
    breaks = _CURRENT.get()
    if breaks is None:
        run(arguments)
        return
    with set_breaks(None):
        breaks.between(run, arguments)
