"""Ops of the CPU's backends whose calls C++ serves.

A call that C++ has not met goes through Python, by an op of the same name and schema in a namespace of its
own: checks, messages and choices stay in one place. What Python served once, C++ serves from then on, as long
as nothing of a call changed beside the number of tokens and what its tensors hold.
"""

from __future__ import annotations

import threading
import typing
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, Structure, byref, c_char_p, c_int64, c_void_p, cast, pointer
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from attnbackend.kernels.cpu import BuildError, library, load_ops, unavailable_reason
from attnbackend.native_calls import EPOCH, PYTHON_ONLY
from attnbackend.ops.calls import SCHEMA_TYPES
from attnbackend.ops.generate import op_name, python_run
from attnbackend.ops.library import ATTENTION, KV_CACHE_UPDATE, MLA_ATTENTION, MLA_CACHE_UPDATE, OpRole
from attnbackend.ops.packed_linear import (
    LINEAR_SCHEMA,
    WHEN_USED,
    PackedWeight,
    multiply,
    packed_weights,
)
from attnbackend.registry import is_overridden

__all__ = ["how_ops_are_called", "serve_cpu_ops"]

_LIBRARY = torch.library.Library("attnbackend_python", "FRAGMENT")
_SERVED = (
    ("CPU_ATTN", ATTENTION), ("CPU_ATTN", KV_CACHE_UPDATE), ("CPU_MLA", MLA_ATTENTION),
    ("CPU_MLA", MLA_CACHE_UPDATE),
)  # fmt: skip
_KINDS = {"Tensor": "W", "Tensor?": "w", "float": "f", "int": "i", "int?": "j", "bool": "b", "str": "s"}
_GIVEN, _TEACHES, _VALUE_ERROR, _RUNTIME_ERROR = range(1, 5)


class _Shared(Structure):
    """As in known_calls.h."""

    _fields_ = (
        ("attention", c_void_p), ("cache_write", c_void_p), ("linear", c_void_p), ("python_only", c_void_p),
        ("epoch", c_void_p),
    )  # fmt: skip


@cache
def serve_cpu_ops() -> str | None:
    """Lets C++ serve calls of the CPU's ops from here on. Returns why it cannot: Python then serves them all.

    Raises:
        RuntimeError: there are no kernels.
    """
    kernels = library()
    try:
        ops = load_ops()
    except BuildError as error:
        return str(error)
    ops.attnbackend_ops_kinds.restype = c_char_p
    ops.attnbackend_ops_verdict.argtypes = [c_int64, c_char_p]
    own = " ".join([*(_kinds(role) for _, role in _SERVED), "WWw"])
    kinds = ops.attnbackend_ops_kinds().decode()
    assert kinds.translate(str.maketrans("Tt", "Ww")) == own, f"ops.cpp takes {kinds}, the schemas say {own}"
    for backend, role in _SERVED:
        name = op_name(backend, role)
        _LIBRARY.define(f"{name}{role.schema}")
        _LIBRARY.impl(name, _attention_op(backend, role, ops), "CompositeExplicitAutograd")
    _LIBRARY.define(f"packed_linear{LINEAR_SCHEMA}")
    _LIBRARY.define("keep_packed(Tensor weight, Tensor packed) -> ()")
    _LIBRARY.impl("packed_linear", _LinearOp(ops).__call__, "CompositeExplicitAutograd")
    ops.attnbackend_ops_share(byref(_shared(kernels)))
    return None


def how_ops_are_called() -> str | None:
    """For people: whether C++ serves calls here, or why not; None: there are no kernels to call."""
    if unavailable_reason() is not None:
        return None
    reason = serve_cpu_ops()
    return "C++, called without Python" if reason is None else f"C++, called through Python: {reason}"


def _kinds(role: OpRole) -> str:
    return "".join(_KINDS[SCHEMA_TYPES[kind]] for kind in typing.get_type_hints(role.call).values())


def _shared(kernels: CDLL) -> _Shared:
    functions = (kernels.attnbackend_attention, kernels.attnbackend_cache_write, kernels.attnbackend_linear)
    numbers = (pointer(PYTHON_ONLY), pointer(EPOCH))
    return _Shared(*(cast(x, c_void_p) for x in (*functions, *numbers)))


def _attention_op(backend: str, role: OpRole, ops: CDLL) -> Callable[..., None]:
    run = python_run(backend, role)

    def serve(*args: Any, **kwargs: Any) -> None:
        call = role.call(*args, **kwargs)
        with _telling(ops):
            run(call)
            teaches = len(call[0]) > 0 and not is_overridden(backend)
            ops.attnbackend_ops_verdict(_TEACHES if teaches else _GIVEN, b"")

    return serve


class _LinearOp:
    """Serves products that C++ leaves to Python, and tells it what packed weights it may use in this step."""

    def __init__(self, ops: CDLL) -> None:
        self._ops = ops
        self._kept: dict[int, weakref.ref[PackedWeight]] = {}
        """What C++ holds, by the address of the weight."""
        self._checked = threading.local()
        self._keep = torch.ops.attnbackend_python.keep_packed.default
        WHEN_USED.append(self._begin)

    def _begin(self, used: bool) -> None:
        self._checked.needed = used
        self._ops.attnbackend_ops_serve_linear(used)

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result = input  # of a call that failed
        with _telling(self._ops):
            if getattr(self._checked, "needed", False):
                self._checked.needed = False
                self._share()
            result = multiply(input, weight, bias)
            self._ops.attnbackend_ops_verdict(_GIVEN, b"")
        return result

    def _share(self) -> None:
        """From here on to the end of the step C++ may use what it holds: weights do not change in between."""
        current = {packed.address: packed for packed in packed_weights() if packed.weight is not None}
        for address in [a for a, kept in self._kept.items() if kept() is not current.get(a)]:
            self._forget(address)
        for address in current.keys() - self._kept.keys():
            weight, packed = current[address].weight, current[address]
            self._keep(weight, packed.packed)
            self._kept[address] = weakref.ref(packed, partial(self._forget, address))
        self._ops.attnbackend_ops_packed_is_valid()

    def _forget(self, address: int, _: object = None) -> None:
        self._kept.pop(address, None)
        self._ops.attnbackend_ops_forget_packed(c_void_p(address))


@contextmanager
def _telling(ops: CDLL) -> Iterator[None]:
    """Tells C++ of exceptions, which would not get through it as they are."""
    try:
        yield
    except ValueError as error:
        ops.attnbackend_ops_verdict(_VALUE_ERROR, str(error).encode())
    except Exception as error:
        kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
        ops.attnbackend_ops_verdict(_RUNTIME_ERROR, f"{kind}{error}".encode())
