"""Attention ops of backends whose call is one call of a library's op, to which C++ hands calls that it knows.

Under a plan of a step the first call goes through Python, where the implementation says what it amounted to
(`attnbackend.native_calls.amounts_to`). Until the plan goes, C++ makes the same call of the library for every
call that differs only in where its tensors are and what is in them: for the other layers of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, Structure, c_char_p, c_int64, c_void_p
from functools import cache
from struct import pack, unpack
from typing import Any

import torch

from attnbackend.forward_context import get_forward_context
from attnbackend.kernels.cpu import BuildError, load_library_calls
from attnbackend.native_calls import PYTHON_ONLY, STEP, Argument, LibraryCall, lessons
from attnbackend.ops.calls import AttentionCall
from attnbackend.ops.generate import op_name, python_run
from attnbackend.ops.library import ATTENTION
from attnbackend.ops.python_side import GIVEN, TEACHES, begin, define, prepare, telling

__all__ = ["serve_library_calls"]

_PLACES = {name: place for place, name in enumerate(AttentionCall._fields)}
_ABSENT, _CONSTANT, _HELD, _ARGUMENT, _HALF = range(5)
_RESULTS = {"Tensor": "T", "Tensor[]": "L", "List[Tensor]": "L"}
_MOST_ARGUMENTS = 64


class _Part(Structure):
    """As in library_calls.cpp."""

    _fields_ = (("kind", c_int64), ("is_optional", c_int64), ("value", c_int64), ("half", c_int64))


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
    ops.attnbackend_ops_teach.argtypes = [c_char_p, c_char_p, c_char_p, c_void_p, c_int64]
    define("hold", "(Tensor x) -> int", None)
    begin(ops, STEP)
    return ops


@cache
def serve_library_calls(backend: str, device_type: str) -> str | None:
    """Lets C++ serve the attention op of a backend from here on, for tensors of a device: "cuda" or "cpu".

    Returns:
        Why it cannot: Python then serves every call. None: it does.
    """
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
        with telling(ops):
            with lessons() as heard:
                run(call)
            teaches = bool(heard) and _holds(backend, call) and _teach(ops, heard[0])
            ops.attnbackend_ops_verdict(TEACHES if teaches else GIVEN, b"")

    return serve


def _holds(backend: str, call: AttentionCall) -> bool:
    """Whether a plan of the step served the call: what an op plans for itself holds for the moment only."""
    context = get_forward_context()
    if context is None or PYTHON_ONLY.value:
        return False
    plan = context.plans.get((call.group, backend))
    return plan is not None and plan.is_for(call.query_start_loc, call.seq_lens, call.block_table)


def _teach(ops: CDLL, call: LibraryCall) -> bool:
    """Whether C++ can make the call."""
    schema = call.op._schema
    results = "".join(_RESULTS.get(str(result.type), "?") for result in schema.returns)
    if len(schema.arguments) > _MOST_ARGUMENTS or "?" in results:
        return False
    given = zip(schema.arguments, call.arguments, strict=True)
    made = [_part(argument.type, value) for argument, value in given]
    parts = [part for part in made if part is not None]
    if len(parts) < len(made):
        return False
    name, overload = schema.name.encode(), schema.overload_name.encode()
    ops.attnbackend_ops_teach(name, overload, results.encode(), (_Part * len(parts))(*parts), len(parts))
    return True


def _part(kind: Any, value: object) -> _Part | None:
    """Where an argument comes from; None for kinds that C++ does not make."""
    is_optional = isinstance(kind, torch.OptionalType)
    if value is None:
        return _Part(_ABSENT, is_optional)
    if isinstance(value, Argument):
        origin = _ARGUMENT if value.half is None else _HALF
        return _Part(origin, is_optional, _PLACES[value.name], value.half or 0)
    convert = _CONVERSIONS.get(str(kind.getElementType() if is_optional else kind))
    origin = _HELD if convert is _hold else _CONSTANT
    return None if convert is None else _Part(origin, is_optional, convert(value))


def _hold(value: Any) -> int:
    """C++'s own handle of a tensor."""
    return torch.ops.attnbackend_python.hold(value)


def _bits(value: Any) -> int:
    return unpack("q", pack("d", value))[0]


_CONVERSIONS: dict[str, Callable[[Any], int]] = {"Tensor": _hold, "float": _bits, "int": int, "bool": int}
