"""Choices that people make for a whole process: a forced backend and debug checks.

Each has an environment variable, read at every use, so that changing it takes effect at once.
"""

from __future__ import annotations

import os
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple

__all__ = [
    "Config",
    "ForcedBackend",
    "debug_checks_enabled",
    "forced_backend",
    "get_config",
    "set_config",
]

BACKEND_VARIABLE = "ATTNBACKEND"
DEBUG_VARIABLE = "ATTNBACKEND_DEBUG"

_DEBUG_VALUES = {"": False, "0": False, "1": True}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Choices that stand above the environment.

    Raises:
        TypeError: a value of another type than stated, such as ``debug="0"``.
    """

    backend: str | None = None
    """Name of the backend to use wherever none is named more closely, or a member of one of the
    enums; None: the environment's, or automatic."""
    debug: bool | None = None
    """Check block tables and slots against the cache on every call; None: as ``ATTNBACKEND_DEBUG``
    says."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", getattr(self.backend, "key", self.backend))
        for name, kind in (("backend", str), ("debug", bool)):
            value = getattr(self, name)
            if not (value is None or isinstance(value, kind)):
                raise TypeError(f"{name}={value!r} must be a {kind.__name__} or None")


_CURRENT: ContextVar[Config] = ContextVar("attnbackend_config", default=Config())  # noqa: B039


def get_config() -> Config:
    """The configuration in force in this thread or task."""
    return _CURRENT.get()


class set_config:
    """Changes fields of the configuration, from the call on or for a ``with`` block only.

    ``set_config(backend="TORCH_SDPA")`` as a statement holds until it is changed again; as
    ``with set_config(...):`` the configuration from before comes back at the end of the block. Like
    all context variables it concerns the current thread or task and those that copy its context.

    Raises:
        TypeError: an unknown field, or a value of another type than the field's.
    """

    def __init__(self, **changes: Any) -> None:
        self._token: Token[Config] = _CURRENT.set(replace(_CURRENT.get(), **changes))

    def __enter__(self) -> Config:
        return _CURRENT.get()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _CURRENT.reset(self._token)


class ForcedBackend(NamedTuple):
    """A backend that is to be used whatever the automatic choice would be."""

    name: str
    by: str
    """Who forces it, for messages."""
    any_case: bool = False
    """Whether upper and lower case of the name mean the same, as in the environment."""


def forced_backend() -> ForcedBackend | None:
    """The backend that the configuration or else the environment forces, or None.

    In the environment outer space and case do not matter, and an empty value is no value.
    """
    configured = _CURRENT.get().backend
    if configured is not None:
        return ForcedBackend(configured, "the configuration (set_config)")
    from_environment = os.environ.get(BACKEND_VARIABLE, "").strip()
    if from_environment:
        by = f"the environment variable {BACKEND_VARIABLE}"
        return ForcedBackend(from_environment, by, any_case=True)
    return None


def debug_checks_enabled() -> bool:
    """Whether block tables and slots are checked against the cache on every call.

    Raises:
        ValueError: ``ATTNBACKEND_DEBUG`` is neither 0 nor 1.
    """
    configured = _CURRENT.get().debug
    if configured is not None:
        return configured
    value = os.environ.get(DEBUG_VARIABLE, "").strip()
    if value not in _DEBUG_VALUES:
        raise ValueError(f"{DEBUG_VARIABLE}={value!r}; allowed: 0 or 1, or unset for 0")
    return _DEBUG_VALUES[value]
