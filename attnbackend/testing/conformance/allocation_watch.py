"""Sees the memory that torch's ops allocate in a call, and what of it lives on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attnbackend._torch_compat import StorageRef, TorchDispatchMode, tree_leaves

__all__ = ["AllocationWatch"]


class AllocationWatch(TorchDispatchMode):
    """Inside the ``with`` block, notes every storage that is new."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[StorageRef, int]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            storage = x.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in given:
                self._made.append((StorageRef(storage), storage.nbytes()))
        return result

    def keep_alive(self) -> None:
        """From now on only what lives at this moment counts."""
        self._made = [(there, size) for there, size in self._made if not there.expired()]

    @property
    def given_up(self) -> list[int]:
        """Bytes of each storage that has died since."""
        return [size for there, size in self._made if there.expired()]


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
