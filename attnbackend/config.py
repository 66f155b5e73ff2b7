"""Choices that people make for a whole process: a forced backend, kernel libraries and debug checks.

Each has an environment variable, read at every use, so that changing it takes effect at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple

from attnbackend.native_calls import change_python_only, new_step

__all__ = [
    "Config",
    "ForcedBackend",
    "choices_now",
    "debug_checks_enabled",
    "flash_attn_choice",
    "flash_attn_fp8_enabled",
    "forced_backend",
    "get_config",
    "library_choices",
    "mla_context_tokens",
    "mla_prefill_choice",
    "set_config",
    "widened_bytes",
]

BACKEND_VARIABLE = "ATTNBACKEND"
DEBUG_VARIABLE = "ATTNBACKEND_DEBUG"
FLASH_ATTN_VARIABLE = "ATTNBACKEND_FLASH_ATTN"
FLASH_ATTN_FP8_VARIABLE = "ATTNBACKEND_FLASH_ATTN_FP8"

MLA_PREFILL_VARIABLE = "ATTNBACKEND_MLA_PREFILL"
MLA_CONTEXT_VARIABLE = "ATTNBACKEND_MLA_CONTEXT_TOKENS"
WIDENED_VARIABLE = "ATTNBACKEND_WIDENED_BYTES"

_DEFAULT_CONTEXT_TOKENS = 1 << 15
_DEFAULT_WIDENED_BYTES = 1 << 30
_SWITCH_VALUES = {"": False, "0": False, "1": True}


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
    flash_attn: str | None = None
    """Which library serves `FLASH_ATTN`: the name of a provider or the number of a version, see
    `attnbackend.backends.flash_attn`; None: as ``ATTNBACKEND_FLASH_ATTN`` says, or the best that works."""
    flash_attn_fp8: bool | None = None
    """Let `FLASH_ATTN` serve float8 caches, for which its kernels round queries and probabilities to
    float8 as well: faster, and farther from exact than the relative rule allows. None: as
    ``ATTNBACKEND_FLASH_ATTN_FP8`` says, or no."""

    mla_prefill: str | None = None
    """Which library attends to the prompts of latent attention, a name from
    `attnbackend.backends.mla.prefill.MLA_PREFILLS`; None: as ``ATTNBACKEND_MLA_PREFILL`` says, or the first
    that can."""
    mla_context_tokens: int | None = None
    """Most cached tokens whose keys and values a prompt's attention holds at once, for each layer of latent
    attention in turn; None: as ``ATTNBACKEND_MLA_CONTEXT_TOKENS`` says, or 32768."""
    widened_bytes: int | None = None
    """Most bytes that a copy of a float8 cache's pages may take, made in the query's type for prompts whose
    kernels read no float8, for each layer in turn, always a power of two; prompts that need more are served
    by the decode backend, and all are with 0. None: as ``ATTNBACKEND_WIDENED_BYTES`` says, or 1 GiB."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", getattr(self.backend, "key", self.backend))
        kinds = (
            ("backend", str), ("debug", bool), ("flash_attn", str), ("flash_attn_fp8", bool),
            ("mla_prefill", str), ("mla_context_tokens", int), ("widened_bytes", int),
        )  # fmt: skip
        for name, kind in kinds:
            value = getattr(self, name)
            if not (value is None or isinstance(value, kind)):
                raise TypeError(f"{name}={value!r} must be a {kind.__name__} or None")


_STORED: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_stored_name = lru_cache(getattr(os.environ, "encodekey", str))
_STORED_NAMES = tuple(
    _stored_name(name)
    for name in (
        BACKEND_VARIABLE, DEBUG_VARIABLE, FLASH_ATTN_VARIABLE, FLASH_ATTN_FP8_VARIABLE, MLA_PREFILL_VARIABLE,
    )
)  # fmt: skip


def _variable(name: str) -> str:
    """Value of an environment variable without outer space, empty where there is none.

    Every eager call asks for some, and `os.environ` takes ten times as long to say that there is none.
    """
    return os.environ.get(name, "").strip() if _stored_name(name) in _STORED else ""


def choices_now() -> tuple[Any, ...]:
    """What was chosen, unread: equal to what this gave before where no choice has changed since."""
    return _CURRENT.get(), *map(_STORED.get, _STORED_NAMES)


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
        self._checks = bool(changes.get("debug"))
        change_python_only(self._checks)
        new_step()

    def __enter__(self) -> Config:
        return _CURRENT.get()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _CURRENT.reset(self._token)
        change_python_only(-self._checks)
        new_step()


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
    from_environment = _variable(BACKEND_VARIABLE)
    if from_environment:
        by = f"the environment variable {BACKEND_VARIABLE}"
        return ForcedBackend(from_environment, by, any_case=True)
    return None


def debug_checks_enabled() -> bool:
    """Whether block tables and slots are checked against the cache on every call.

    Raises:
        ValueError: ``ATTNBACKEND_DEBUG`` is neither 0 nor 1.
    """
    return _switch(_CURRENT.get().debug, DEBUG_VARIABLE)


def flash_attn_choice() -> str | None:
    """The library or version that the configuration or else the environment wants `FLASH_ATTN` to use."""
    configured = _CURRENT.get().flash_attn
    return configured or _variable(FLASH_ATTN_VARIABLE) or None


def flash_attn_fp8_enabled() -> bool:
    """Whether `FLASH_ATTN` may serve float8 caches at the precision of float8 queries.

    Raises:
        ValueError: ``ATTNBACKEND_FLASH_ATTN_FP8`` is neither 0 nor 1.
    """
    return _switch(_CURRENT.get().flash_attn_fp8, FLASH_ATTN_FP8_VARIABLE)


def mla_prefill_choice() -> str | None:
    """The library that the configuration or else the environment wants for prompts of latent attention."""
    configured = _CURRENT.get().mla_prefill
    return configured or _variable(MLA_PREFILL_VARIABLE).upper() or None


def mla_context_tokens() -> int:
    """Most cached tokens whose keys and values a prompt's attention holds at once.

    Raises:
        ValueError: it is not a positive number.
    """
    return _number("mla_context_tokens", MLA_CONTEXT_VARIABLE, _DEFAULT_CONTEXT_TOKENS, least=1)


def widened_bytes() -> int:
    """Most bytes of the copy in 16 bits that prompts over a float8 cache may take.

    Raises:
        ValueError: it is negative, or no number.
    """
    return _number("widened_bytes", WIDENED_VARIABLE, _DEFAULT_WIDENED_BYTES, least=0)


def _number(field: str, variable: str, default: int, least: int) -> int:
    configured = getattr(_CURRENT.get(), field)
    value: int | str = configured if configured is not None else _variable(variable) or default
    if not str(value).isdecimal() or int(value) < least:
        raise ValueError(f"{field}={value!r} (set_config, or {variable}); allowed: a number from {least} on")
    return int(value)


def library_choices() -> tuple[str | None, bool, str | None]:
    """Choices within backends, on which every cached selection depends besides the forced backend."""
    return flash_attn_choice(), flash_attn_fp8_enabled(), mla_prefill_choice()


def _switch(configured: bool | None, variable: str) -> bool:
    if configured is not None:
        return configured
    value = _variable(variable)
    if value not in _SWITCH_VALUES:
        raise ValueError(f"{variable}={value!r}; allowed: 0 or 1, or unset for 0")
    return _SWITCH_VALUES[value]
