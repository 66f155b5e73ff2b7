"""Attention ops of backends whose call is one call of a library, to which C++ hands calls that it knows.

Under a plan of a step the first call goes through Python, where the implementation says what it amounted to
(`attnbackend.native_calls.amounts_to`). Until the plan goes, C++ makes the same call of the library for every
call that differs only in where its tensors are and what is in them: for the other layers of the step.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from ctypes import CDLL, c_char_p, c_int64
from functools import cache
from typing import Any

import torch

from attnbackend.forward_context import get_forward_context
from attnbackend.kernels.cpu import BuildError, load_library_calls
from attnbackend.native_calls import PYTHON_ONLY, STEP, lessons
from attnbackend.ops.calls import AttentionCall
from attnbackend.ops.generate import op_name, python_run
from attnbackend.ops.lessons import teach
from attnbackend.ops.library import ATTENTION
from attnbackend.ops.python_side import begin, define, prepare

__all__ = ["serve_library_calls"]


@cache
def _loaded() -> CDLL | str:
    """The library, ready to serve, or why there is none."""
    try:
        ops = load_library_calls()
    except BuildError as error:
        return str(error)
    prepare(ops, (ATTENTION,))
    ops.attnbackend_ops_serve.argtypes = [c_char_p, c_char_p]
    ops.attnbackend_ops_serve.restype = c_int64
    define("hold", "(Tensor x) -> int", None)
    begin(ops, STEP)
    atexit.register(ops.attnbackend_ops_forget)
    return ops


def serve_library_calls(backend: str, device_type: str) -> str | None:
    """Lets C++ serve the attention op of a backend from here on, for tensors of a device: "cuda" or "cpu".

    Returns:
        Why it cannot: Python then serves every call. None: it does.
    """
    with _LOCK:
        return _served(backend, device_type)


_LOCK = threading.Lock()


@cache
def _served(backend: str, device_type: str) -> str | None:
    ops = _loaded()
    if isinstance(ops, str):
        return ops
    name = op_name(backend, ATTENTION)
    define(name, ATTENTION.schema, _general(backend, ops))
    served = ops.attnbackend_ops_serve(name.encode(), device_type.upper().encode())
    return None if served else "library_calls.cpp has no room for one more op (MOST_OPS)"


def _general(backend: str, ops: CDLL) -> Callable[..., None]:
    run = python_run(backend, ATTENTION)

    def serve(*args: Any, **kwargs: Any) -> None:
        call = AttentionCall(*args, **kwargs)
        with lessons(call.query, call.output) as heard:
            run(call)
        if heard and _holds(backend, call) and teach(ops, heard[0]):
            ops.attnbackend_ops_teaches()

    return serve


def _holds(backend: str, call: AttentionCall) -> bool:
    """Whether a plan of the step served the call: what an op plans for itself holds for the moment only.

    A cache that came as bytes was seen in another type than its argument has, and an LSE may have been turned
    into another base afterwards.
    """
    context = get_forward_context()
    is_plain = call.kv_cache.dtype is not torch.uint8 and call.lse is None
    if context is None or PYTHON_ONLY.value or not is_plain:
        return False
    plan = context.plans.get((call.group, backend))
    return plan is not None and plan.is_for(call.query_start_loc, call.seq_lens, call.block_table)
