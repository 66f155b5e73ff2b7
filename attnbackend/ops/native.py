"""Ops of the CPU's backends whose calls C++ serves.

What Python served once, C++ serves from then on, as long as nothing of a call changed beside the number of
tokens and what its tensors hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import CDLL, Structure, byref, c_void_p, cast
from functools import cache
from typing import Any

from torch import Tensor

from attnbackend.kernels.cpu import BuildError, library, load_ops, unavailable_reason
from attnbackend.native_calls import EPOCH
from attnbackend.ops.cpu_linear import SERVED, WHEN_USED
from attnbackend.ops.generate import op_name, python_run
from attnbackend.ops.library import (
    ATTENTION,
    KV_CACHE_UPDATE,
    MLA_ATTENTION,
    MLA_CACHE_UPDATE,
    NAMESPACE,
    OpRole,
)
from attnbackend.ops.python_side import begin, define, prepare
from attnbackend.ops.rope_write import ROPE_SCHEMA, rope_kv_cache_update, update
from attnbackend.ops.transforms import without_derivatives
from attnbackend.registry import is_overridden

__all__ = ["how_ops_are_called", "serve_cpu_ops"]

_SERVED = (
    ("CPU_ATTN", ATTENTION), ("CPU_ATTN", KV_CACHE_UPDATE), ("CPU_MLA", MLA_ATTENTION),
    ("CPU_MLA", MLA_CACHE_UPDATE),
)  # fmt: skip


class _Kernels(Structure):
    """As in linear_op.h."""

    _fields_ = (("attention", c_void_p), ("cache_write", c_void_p), ("linear", c_void_p))


def serve_cpu_ops() -> str | None:
    """Lets C++ serve calls of the CPU's ops from here on. Returns why it cannot: Python then serves them all.

    Raises:
        RuntimeError: there are no kernels.
    """
    with _LOCK:
        return _served()


_LOCK = threading.Lock()


@cache
def _served() -> str | None:
    kernels = library()
    try:
        ops = load_ops()
    except BuildError as error:
        return str(error)
    prepare(ops, (role for _, role in _SERVED), ("WWWWWWWwwffwwsi", "WWw", "WWWwwww", "WWWww"))
    for backend, role in _SERVED:
        define(op_name(backend, role), role.schema, _attention_op(backend, role, ops))
    define("rope_kv_cache_update", ROPE_SCHEMA, _rope_op(ops))
    for name, (schema, multiply, _) in SERVED.items():
        define(name, schema, without_derivatives(f"{NAMESPACE}::{name}", multiply))
    WHEN_USED.append(ops.attnbackend_ops_serve_linear)
    ops.attnbackend_ops_share(byref(_shared(kernels)))
    ops.attnbackend_ops_share_rope(kernels.attnbackend_rope)
    begin(ops, EPOCH)
    ops.attnbackend_ops_serve()
    return None


def how_ops_are_called() -> str | None:
    """For people: whether C++ serves calls here, or why not; None: there are no kernels to call."""
    if unavailable_reason() is not None:
        return None
    reason = serve_cpu_ops()
    return "C++, called without Python" if reason is None else f"C++, called through Python: {reason}"


def _shared(kernels: CDLL) -> _Kernels:
    functions = (kernels.attnbackend_attention, kernels.attnbackend_cache_write, kernels.attnbackend_linear)
    return _Kernels(*(cast(x, c_void_p) for x in functions))


def _attention_op(backend: str, role: OpRole, ops: CDLL) -> Callable[..., None]:
    run = python_run(backend, role)

    def serve(*args: Any, **kwargs: Any) -> None:
        call = role.call(*args, **kwargs)
        run(call)
        if len(call[0]) > 0 and not is_overridden(backend):
            ops.attnbackend_ops_teaches()

    return serve


def _rope_op(ops: CDLL) -> Callable[..., Any]:
    run = without_derivatives(rope_kv_cache_update.name(), update)

    def serve(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor] = run(*args, **kwargs)
        if len(outputs[0]) > 0:
            ops.attnbackend_ops_teaches()
        return outputs

    return serve
