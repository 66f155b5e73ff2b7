"""Compiled code whose ops run on another backend than the one that they are named after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from attnbackend.native_calls import python_only

__all__ = ["redirected_reader", "redirected_writer", "redirects"]

Names = Mapping[str | None, str]

_READERS: ContextVar[Names] = ContextVar("attnbackend_redirected_readers", default={})  # noqa: B039
_WRITERS: ContextVar[Names] = ContextVar("attnbackend_redirected_writers", default={})  # noqa: B039


@contextmanager
def redirects(readers: Names, writers: Names) -> Iterator[None]:
    """In the block, ops of backends that are keys run on those that are values; None: the agnostic ops."""
    tokens = _READERS.set(readers), _WRITERS.set(writers)
    try:
        with python_only():
            yield
    finally:
        _READERS.reset(tokens[0])
        _WRITERS.reset(tokens[1])


def redirected_reader(name: str | None) -> str | None:
    """The backend on which an attention op named after ``name`` runs."""
    return _READERS.get().get(name, name)


def redirected_writer(name: str | None) -> str | None:
    """As `redirected_reader`, of cache writes."""
    return _WRITERS.get().get(name, name)
