"""What C++ is told of a call of a library: the function, and where each of its arguments comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL, Structure, byref, c_int32, c_int64, c_void_p, cast
from functools import cache
from pathlib import Path
from struct import pack, unpack
from typing import Any

import torch
from torch import Tensor

from attnbackend.native_calls import Argument, LibraryCall
from attnbackend.ops.calls import AttentionCall

__all__ = ["ffi_problem", "teach"]

_PLACES = {name: place for place, name in enumerate(AttentionCall._fields)}
_ABSENT, _CONSTANT, _HELD, _ARGUMENT, _HALF = range(5)
_MOST_PARTS = 64


class _Part(Structure):
    """As in lesson.h."""

    _fields_ = (("kind", c_int64), ("type", c_int64), ("value", c_int64), ("half", c_int64))


def teach(ops: CDLL, call: LibraryCall) -> bool:
    """Whether C++ can make the call; it then knows how."""
    if len(call.arguments) > _MOST_PARTS:
        return False
    if isinstance(call.function, torch._ops.OpOverload):
        return _teach_op(ops, call.function, call.arguments)
    return _teach_ffi(ops, call.function, call.arguments)


def _argument(value: Argument) -> _Part:
    return _Part(_ARGUMENT if value.half is None else _HALF, 0, _PLACES[value.name], value.half or 0)


def _hold(value: Tensor) -> int:
    """C++'s own handle of a tensor."""
    return torch.ops.attnbackend_python.hold(value)


def _bits(value: float) -> int:
    return unpack("q", pack("d", value))[0]


def _array(parts: Sequence[_Part]) -> Any:
    return (_Part * len(parts))(*parts)


# --- ops of torch

_CONVERSIONS: dict[str, Callable[[Any], int]] = {"Tensor": _hold, "float": _bits, "int": int, "bool": int}


@cache
def _kinds_of(op: torch._ops.OpOverload) -> list[str] | None:
    """Each argument's type, be it optional or not; None where there is one that C++ does not make."""
    kinds = [_kind(argument.type) for argument in op._schema.arguments]
    return kinds if _CONVERSIONS.keys() >= set(kinds) else None


def _teach_op(ops: CDLL, op: torch._ops.OpOverload, arguments: tuple[object, ...]) -> bool:
    kinds = _kinds_of(op)
    if kinds is None:
        return False
    names = (op._schema.name, op._schema.overload_name)
    parts = [_op_part(kind, value) for kind, value in zip(kinds, arguments, strict=True)]
    ops.attnbackend_ops_teach_op(*(name.encode() for name in names), _array(parts), c_int64(len(parts)))
    return True


def _kind(annotation: Any) -> str:
    return str(annotation.getElementType() if isinstance(annotation, torch.OptionalType) else annotation)


def _op_part(kind: str, value: object) -> _Part:
    if value is None:
        return _Part(_ABSENT)
    if isinstance(value, Argument):
        return _argument(value)
    return _Part(_HELD if kind == "Tensor" else _CONSTANT, 0, _CONVERSIONS[kind](value))


# --- compiled functions that are called by tvm-ffi

_INT, _BOOL, _FLOAT = 1, 2, 3


class _Ffi(Structure):
    """As in ffi_call.h."""

    _fields_ = (
        ("call", c_void_p), ("set_stream", c_void_p), ("keep", c_void_p), ("release", c_void_p),
        ("current_stream", c_void_p),
    )  # fmt: skip


def _teach_ffi(ops: CDLL, function: Any, arguments: tuple[object, ...]) -> bool:
    if _shared_ffi(ops) is not None or not all(map(_is_ffi_value, arguments)):
        return False
    # C++ keeps objects of its own from the call on; until then they are kept here.
    values = [_ffi_tensor(value) if isinstance(value, Tensor) else value for value in arguments]
    parts = [_ffi_part(value) for value in values]
    ops.attnbackend_ops_teach_ffi(c_void_p(function.__chandle__()), _array(parts), c_int64(len(parts)))
    return True


def _is_ffi_value(value: object) -> bool:
    return isinstance(value, Argument | Tensor | int | float | None) or hasattr(value, "__chandle__")


def _ffi_tensor(value: Tensor) -> Any:
    """The library's own object for the memory of a tensor, without a wait of one stream for another."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(torch.utils.dlpack.to_dlpack(value))  # type: ignore[attr-defined]


def _ffi_part(value: Any) -> _Part:
    if value is None:
        return _Part(_ABSENT)
    if isinstance(value, Argument):
        return _argument(value)
    if isinstance(value, bool | int):
        return _Part(_CONSTANT, _BOOL if isinstance(value, bool) else _INT, value)
    if isinstance(value, float):
        return _Part(_CONSTANT, _FLOAT, _bits(value))
    address = value.__chandle__()
    return _Part(_CONSTANT, c_int32.from_address(address + 8).value, address)  # TVMFFIObject's type_index


@cache
def _shared_ffi(ops: CDLL) -> str | None:
    """Hands the functions of tvm-ffi to C++, or says why it cannot."""
    functions = _ffi_functions()
    if isinstance(functions, str):
        return functions
    ops.attnbackend_ops_share_ffi(byref(functions))
    return None


def ffi_problem() -> str | None:
    """Why C++ cannot call functions by tvm-ffi here; None: it can."""
    functions = _ffi_functions()
    return functions if isinstance(functions, str) else None


@cache
def _ffi_functions() -> _Ffi | str:
    try:
        from tvm_ffi.libinfo import find_libtvm_ffi

        library = CDLL(find_libtvm_ffi())
        names = ("FunctionCall", "EnvSetStream", "ObjectIncRef", "ObjectDecRef")
        functions = [getattr(library, f"TVMFFI{name}") for name in names]
        if torch.cuda.is_available():
            cuda = CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
            functions.append(cuda.aoti_torch_get_current_cuda_stream)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return _Ffi(*(cast(function, c_void_p) for function in functions))
