"""Process-wide choices that people make: a forced backend and debug checks.

Each has an environment variable, read at every use, so that changing it takes effect at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Config", "debug_checks_enabled", "forced_backend", "get_config", "set_config"]

BACKEND_VARIABLE = "ATTNBACKEND"
DEBUG_VARIABLE = "ATTNBACKEND_DEBUG"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Choices that stand above the environment."""

    backend: str | None = None
    """Name of the backend to use wherever none is named more closely; None: the environment's, or automatic."""
    debug: bool | None = None
    """Check block tables and slots against the cache on every call; None: as ATTNBACKEND_DEBUG says."""


_CURRENT: ContextVar[Config] = ContextVar("attnbackend_config", default=Config())  # noqa: B039 (frozen)


def get_config() -> Config:
    """The configuration in force."""
    return _CURRENT.get()


@contextmanager
def set_config(**changes: Any) -> Iterator[Config]:
    """Changes fields of the configuration inside the ``with`` block; an unknown name is a TypeError."""
    token = _CURRENT.set(replace(_CURRENT.get(), **changes))
    try:
        yield _CURRENT.get()
    finally:
        _CURRENT.reset(token)


def forced_backend() -> tuple[str, str] | None:
    """The forced backend's name and who forced it, or None.

    The configuration stands above the environment. Case and outer space do not matter in the
    environment's value, and an empty value is no value.
    """
    configured = _CURRENT.get().backend
    if configured is not None:
        return configured, "the configuration (set_config)"
    from_environment = os.environ.get(BACKEND_VARIABLE, "").strip().upper()
    if from_environment:
        return from_environment, f"the environment variable {BACKEND_VARIABLE}"
    return None


def debug_checks_enabled() -> bool:
    """Whether block tables and slots are checked against the cache on every call."""
    configured = _CURRENT.get().debug
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0") if configured is None else configured
