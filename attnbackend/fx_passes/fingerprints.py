"""Texts by which compile caches tell objects apart: what a class, a function or a value says in Python.

Two processes give the same text exactly when the objects mean the same. What has no source, or an address in
its text, gives one that no other process has, so that nothing compiled is found again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from attnbackend.fx_passes.module_sources import is_known, module_texts

__all__ = ["pass_text"]

_PROCESS = f" of process {uuid.uuid4().hex}"
_Told = dict[int, tuple[int, Any]]
"""Id of an object -> its number, and the object, which keeps its id: each is told once."""


def pass_text(cls: type, settings: dict[str, Any]) -> str:
    """Of a pass: its class, the modules of that and of its bases with what they import, and its settings."""
    told: _Told = {}
    modules = [base.__module__ for base in _own(cls)]
    return _joined([_class_text(cls, told), *module_texts(modules, modules), _text(settings, told)])


def _own(cls: type) -> list[type]:
    """A class and its bases, wherever they were written; ours and torch's are known without."""
    return [base for base in cls.__mro__ if not is_known(base.__module__)]


def _text(value: Any, told: _Told) -> str:
    """Of a value: its repr, and the sources of the functions and classes behind it."""
    if value is None or isinstance(value, (str, bytes, int, float)):
        return repr(value)
    if id(value) in told:
        return f"#{told[id(value)][0]}"
    told[id(value)] = len(told), value
    if isinstance(value, types.FunctionType):
        return _function_text(value, told)
    if isinstance(value, type):
        return f"{value.__qualname__}{_class_text(value, told)}"
    of_type, parts = _text(type(value), told), _parts(value)
    if parts is not None:
        return _joined([of_type, *(_text(part, told) for part in parts)])
    text = repr(value)
    return f"{text}{of_type}{_PROCESS if ' at 0x' in text else ''}"


def _joined(texts: Iterable[str]) -> str:
    return f"({', '.join(texts)})"


def _parts(value: Any) -> list[Any] | None:
    """What a value is made of, where its repr would not tell; None: it is a whole."""
    if type(value) is dict:
        return list(value.items())
    if type(value) in (tuple, list):
        return list(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return _parts_of_callable(value)


def _parts_of_callable(value: Any) -> list[Any] | None:
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.BuiltinMethodType):
        owner = None if isinstance(value.__self__, types.ModuleType) else value.__self__
        return [value.__module__, value.__qualname__, owner]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return [value.__wrapped__] if isinstance(value, _CACHED) else None


_CACHED = type(functools.cache(len))


def _class_text(cls: type, told: _Told) -> str:
    return _joined(f"{_source_of(base)}{_contents(base, told)}" for base in _own(cls))


def _source(thing: Any) -> str | None:
    try:
        return inspect.getsource(getattr(thing, "__code__", thing))  # a wrapper's own, not what it wraps
    except (OSError, TypeError):  # typed at a prompt, or made by exec
        return None


def _source_of(thing: Any) -> str:
    return _source(thing) or f"{thing.__qualname__}{_PROCESS}"


def _contents(cls: type, told: _Told) -> str:
    """What a class holds now: two that one function makes differ by what their methods close over."""
    held = {name: value for name, value in vars(cls).items() if not _is_made(name, value)}
    return _joined(f"{name}={_text(held[name], told)}" for name in sorted(held))


def _is_made(name: str, value: Any) -> bool:
    """Whether Python, or a decorator such as ``dataclass``, made it of the class's source."""
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        return _source(inspect.unwrap(function)) is None
    is_own = isinstance(value, (property, classmethod))
    return not is_own and (name.startswith(("__", "_abc_")) or inspect.isdatadescriptor(value))


def _function_text(function: types.FunctionType, told: _Told) -> str:
    """Its source, and what it reads: closure, defaults, and what its names stand for in its module."""
    given = [_cell_contents(cell) for cell in function.__closure__ or ()]
    given += [function.__defaults__, function.__kwdefaults__]
    names = sorted({name for name in _names(function.__code__) if name in function.__globals__})
    texts = [f"{name}={_read_text(function.__globals__[name], function.__module__, told)}" for name in names]
    return _joined([_source_of(function), *(_text(value, told) for value in given), *texts])


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that it, and functions and comprehensions inside of it, look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _read_text(value: Any, module: str, told: _Told) -> str:
    """Of what a function finds in its module; what is torch's or ours, or a lock of theirs, is no news."""
    if isinstance(value, types.ModuleType):
        return _joined(module_texts([value.__name__], [module]))
    if isinstance(value, (types.FunctionType, type)):
        return "" if is_known(value.__module__) else _text(value, told)
    text = _text(value, told)
    return "" if is_known(type(value).__module__) and _parts(value) is None and _PROCESS in text else text
