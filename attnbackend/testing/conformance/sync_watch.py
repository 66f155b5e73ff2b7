"""Sees the calls that wait for a GPU, and on a CPU those that would."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["SyncWatch", "watched"]

_WAITING = {
    "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__",
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "equal", "allclose",
    "__contains__", "is_nonzero", "repeat_interleave",
}  # fmt: skip
"""Names of functions whose result, or its shape, depends on data."""


class SyncWatch(TorchFunctionMode):
    """Inside the ``with`` block, lists the torch calls made from Python that need data on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if _waits(name, args, kwargs):
            self.seen.append(f"{name}() needs data on the host, {_caller()}")
        return func(*args, **kwargs)


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "repeat_interleave":
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
        return isinstance(repeats, Tensor) and "output_size" not in kwargs
    if name in ("to", "copy_"):
        return "cpu" in map(str, (*args[1:], *kwargs.values()))
    if name == "where":
        return len(args) == 1 and not kwargs
    if name in ("__getitem__", "__setitem__", "index_put_"):
        return _has_mask(args[1])
    return name in _WAITING


def _has_mask(index: Any) -> bool:
    """Whether an index holds a boolean mask: the number of elements it picks is data."""
    if isinstance(index, Tensor):
        return index.dtype is torch.bool
    return isinstance(index, (tuple, list)) and any(map(_has_mask, index))


def _caller() -> str:
    """The innermost line outside torch and this module."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and frame.filename != __file__:
            return f"at {frame.filename}:{frame.lineno}: {frame.line}"
    return "from an unknown place"


@contextmanager
def watched(device: torch.device) -> Iterator[list[str]]:
    """Lists what waits for the device inside the ``with`` block."""
    if device.type != "cuda":
        with SyncWatch() as watch:
            yield watch.seen
        return
    seen: list[str] = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield seen
    except RuntimeError as error:
        seen.append(str(error).splitlines()[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
