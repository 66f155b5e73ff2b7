"""Sees the memory that a call keeps, and whether a later call gives it up."""

from __future__ import annotations

import gc
from types import TracebackType

from attnbackend._torch_compat import StorageRef
from attnbackend.testing.storages import live_storages

__all__ = ["KeptMemory"]


class KeptMemory:
    """What tensors hold after the ``with`` block and did not before it, as far as Python can reach them."""

    def __init__(self) -> None:
        self._before: set[int] = set()
        self._kept: list[tuple[StorageRef, int]] = []

    def __enter__(self) -> KeptMemory:
        self._before = {live.address for live in live_storages()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.collect()  # What lies in a cycle alone is not kept.
        new = (live for live in live_storages() if live.address not in self._before)
        self._kept = [(StorageRef(live.storage), live.num_bytes) for live in new]

    @property
    def given_up(self) -> list[int]:
        """Bytes of each storage that has died since."""
        return [size for storage, size in self._kept if storage.expired()]
