"""From a backend class to its ops: the author writes a class, nobody writes a signature twice."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from attnbackend.backend import AttentionBackend
from attnbackend.impl import AttentionImpl, MLAAttentionImpl, SparseMLAAttentionImpl
from attnbackend.ops.bind import check_attention_call, check_update_call, run_attention, run_update
from attnbackend.ops.library import (
    ATTENTION,
    KV_CACHE_UPDATE,
    MLA_ATTENTION,
    MLA_CACHE_UPDATE,
    MLA_MIXED,
    MLA_PREFILL,
    NAMESPACE,
    OpRole,
    define_op,
    serve,
)
from attnbackend.ops.mla_bind import (
    check_mha_call,
    check_mixed_call,
    check_mla_update_call,
    check_mqa_call,
    run_mha,
    run_mixed,
    run_mla_update,
    run_mqa,
)

__all__ = ["backend_of_op", "backend_op", "backend_op_names", "define_backend_ops", "op_name", "python_run"]

_OPS: dict[str, tuple[str, OpRole, torch._ops.OpOverload]] = {}
"""Op name -> (backend name, role, overload). An op looks its backend up by name, so it outlives a class."""


def op_name(backend_name: str, role: OpRole) -> str:
    """The op's name within the namespace, such as ``triton_attn_forward``."""
    return f"{re.sub(r'[^0-9a-z]+', '_', backend_name.lower())}_{role.suffix}"


def define_backend_ops(backend: type[AttentionBackend]) -> None:
    """Defines the ops of a backend, those that exist already excepted.

    Raises:
        ValueError: another backend's name leads to the same op name.
    """
    with _LOCK:  # threads may ask for a backend at once
        for role in _roles_of(backend):
            _define(backend.get_name(), role, *_RUNS[role])


_LOCK = threading.Lock()
_RUNS: dict[OpRole, tuple[Callable[..., None], Callable[..., object]]] = {
    ATTENTION: (run_attention, check_attention_call),
    KV_CACHE_UPDATE: (run_update, check_update_call),
    MLA_ATTENTION: (run_mqa, check_mqa_call),
    MLA_MIXED: (run_mixed, check_mixed_call),
    MLA_PREFILL: (run_mha, check_mha_call),
    MLA_CACHE_UPDATE: (run_mla_update, check_mla_update_call),
}


def _roles_of(backend: type[AttentionBackend]) -> Iterator[OpRole]:
    impl = backend.get_impl_cls()
    if issubclass(impl, AttentionImpl):
        yield ATTENTION
        if has_own_writer(backend):
            yield KV_CACHE_UPDATE
    elif issubclass(impl, MLAAttentionImpl):
        yield MLA_ATTENTION
        if not issubclass(impl, SparseMLAAttentionImpl):
            yield from (MLA_MIXED, MLA_PREFILL)
        if has_own_writer(backend):
            yield MLA_CACHE_UPDATE


def has_own_writer(backend: type[AttentionBackend]) -> bool:
    """Whether the backend writes its cache itself, and so has an op of its own for it."""
    impl = backend.get_impl_cls()
    if issubclass(impl, MLAAttentionImpl):
        return impl.mla_kv_cache_update is not MLAAttentionImpl.mla_kv_cache_update
    method = getattr(impl, "kv_cache_update", None)
    return method is not None and method is not AttentionImpl.kv_cache_update


def _define(
    backend_name: str, role: OpRole, run: Callable[..., None], check: Callable[..., object]
) -> None:  # fmt: skip
    name = op_name(backend_name, role)
    if name in _OPS:
        if _OPS[name][0] != backend_name:
            raise ValueError(
                f"backends {_OPS[name][0]!r} and {backend_name!r} would share the op name {name!r}; "
                "rename one of them"
            )
        return
    op = define_op(name, role, partial(run, backend_name), partial(check, backend_name))
    _OPS[name] = (backend_name, role, op)


def python_run(backend_name: str, role: OpRole) -> Callable[[Any], None]:
    """What a backend's op does, given the bound arguments."""
    run = partial(_RUNS[role][0], backend_name)
    return partial(serve, f"{NAMESPACE}::{op_name(backend_name, role)}", run)


def backend_op(backend_name: str, role: OpRole) -> torch._ops.OpOverload | None:
    """A backend's op for a role, or None where it has none of its own."""
    entry = _OPS.get(op_name(backend_name, role))
    return entry[2] if entry is not None and entry[0] == backend_name else None


def backend_of_op(op: torch._ops.OpOverload) -> tuple[str, OpRole] | None:
    """Whose op it is and in which role; None for ops that are no backend's own."""
    entry = _OPS.get(op.name().removeprefix(f"{NAMESPACE}::"))
    return entry[:2] if entry is not None and entry[2] is op else None


def backend_op_names() -> list[str]:
    """Names of all generated ops, within the namespace."""
    return sorted(_OPS)
