"""The compiled function that an object of FlashInfer calls in the end, and what it hands to it.

The library wraps its functions in Python. Where that is done as is known here, the wrapping can be run with a
function that only listens, and C++ then calls the compiled one.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor

from attnbackend.native_calls import Argument, LibraryCall
from attnbackend.ops.lessons import ffi_problem

__all__ = ["compiled_call", "wrapping_problem"]

_WRAPPING, _WRAPPED = "paged_run", "paged_run_func"


def compiled_call(
    wrapper: Any, query: Tensor, sides: tuple[Tensor, Tensor], output: Tensor
) -> LibraryCall | None:  # fmt: skip
    """What ``wrapper.run(query, sides, out=output)`` calls; None: something that is not known here."""
    module = getattr(wrapper, "_cached_module", None)
    wrapping = getattr(module, _WRAPPING, None)
    if not isinstance(wrapping, FunctionType) or _WRAPPED not in wrapping.__code__.co_freevars:
        return None
    heard: list[tuple[Any, ...]] = []
    function, listening = _listening(wrapping, heard)
    wrapper._cached_module = SimpleNamespace(**{_WRAPPING: listening})
    try:
        wrapper.run(query, sides, out=output)
    finally:
        wrapper._cached_module = module
    arguments = _in_arguments(heard, (query, *sides, output))
    return None if arguments is None else LibraryCall(function, arguments)


def _listening(wrapping: FunctionType, heard: list[tuple[Any, ...]]) -> tuple[Any, FunctionType]:
    """The wrapped function, and the wrapping around one that writes down what it is called with."""
    cells = dict(zip(wrapping.__code__.co_freevars, wrapping.__closure__ or (), strict=True))
    function = cells[_WRAPPED].cell_contents
    cells[_WRAPPED] = CellType(lambda *arguments: heard.append(arguments))
    closure = tuple(cells.values())
    return function, FunctionType(
        wrapping.__code__, wrapping.__globals__, _WRAPPING, wrapping.__defaults__, closure
    )


def _in_arguments(heard: list[tuple[Any, ...]], given: tuple[Tensor, ...]) -> tuple[object, ...] | None:
    """The arguments of the one call that was heard, those of our op by name; None where that cannot be."""
    if len(heard) != 1:
        return None
    ours = (Argument("query"), Argument("kv_cache", 0), Argument("kv_cache", 1), Argument("output"))
    names = {id(tensor): name for tensor, name in zip(given, ours, strict=True)}
    found = tuple(names.get(id(value), value) for value in heard[0])
    memory = {tensor.untyped_storage().data_ptr() for tensor in given}
    others = {x.untyped_storage().data_ptr() for x in found if isinstance(x, Tensor)}
    complete = all(any(value is name for value in found) for name in ours)
    return found if complete and not memory & others else None


@cache
def wrapping_problem() -> str | None:
    """Why compiled functions of the installed library cannot be called from C++; None: they can."""
    from flashinfer.prefill import get_batch_prefill_module

    codes = inspect.unwrap(get_batch_prefill_module).__code__.co_consts
    wrappings = [code for code in codes if isinstance(code, CodeType) and code.co_name == _WRAPPING]
    if any(_WRAPPED in code.co_freevars for code in wrappings):
        return ffi_problem()
    return f"no function {_WRAPPED} in flashinfer.prefill.get_batch_prefill_module"
