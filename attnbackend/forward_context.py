"""The plans of the current step, where ops look them up.

A plan is a cache: an op that finds none that was made from its own tensors plans for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from attnbackend.metadata import AttentionMetadata
from attnbackend.native_calls import new_step

__all__ = ["ForwardContext", "get_forward_context", "set_forward_context"]


@dataclass(frozen=True)
class ForwardContext:
    """What is known on the host about the step that runs now."""

    plans: Mapping[tuple[int, str], AttentionMetadata] = field(default_factory=dict)
    """(KV cache group, backend name) -> plan. Not to be changed while it is in force."""


_CURRENT: ContextVar[ForwardContext | None] = ContextVar("attnbackend_forward_context", default=None)

get_forward_context = _CURRENT.get
"""The current context, or None outside of any."""


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Makes ``context`` current inside the ``with`` block."""
    token = _CURRENT.set(context)
    new_step()
    try:
        yield context
    finally:
        _CURRENT.reset(token)
        new_step()
