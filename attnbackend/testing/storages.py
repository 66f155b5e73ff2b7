"""Live tensor storages of the process: finding them, hashing their bytes, naming their owners."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

__all__ = [
    "LiveStorage",
    "byte_view",
    "covered_bytes",
    "hash_bytes",
    "live_storages",
    "owner_of",
    "storage_of",
    "wait_for_devices",
]


@dataclass(frozen=True, eq=False)
class LiveStorage:
    """One region of memory, held alive so that its address cannot be reused meanwhile."""

    storage: torch.UntypedStorage
    device: torch.device
    address: int
    num_bytes: int
    example: Tensor
    """One of the tensors over it, for naming it."""

    @property
    def moved(self) -> bool:
        """Whether the storage was resized or replaced since; its old address may be gone."""
        return (self.storage.data_ptr(), self.storage.nbytes()) != (self.address, self.num_bytes)

    def overlaps(self, other: LiveStorage) -> bool:
        """Whether both hold some byte in common, as tensors over foreign memory can."""
        return (
            self.device == other.device
            and self.address < other.address + other.num_bytes
            and other.address < self.address + self.num_bytes
        )


def storage_of(tensor: Tensor) -> LiveStorage | None:
    """The storage of a tensor; None where it has no memory: meta, fake, sparse, empty."""
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return None
        try:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
        except (RuntimeError, NotImplementedError):
            # Wrapper, sparse and functional tensors; what they wrap is found by itself.
            return None
    if address == 0 or storage.nbytes() == 0:
        return None
    return LiveStorage(storage, storage.device, address, storage.nbytes(), tensor)


def live_storages() -> list[LiveStorage]:
    """Storages of all tensors that Python can reach, each address once."""
    found: dict[tuple[torch.device, int], LiveStorage] = {}
    for tensor in _live_tensors():
        live = storage_of(tensor)
        if live is not None:
            key = (live.device, live.address)
            if key not in found or live.num_bytes > found[key].num_bytes:
                found[key] = live
    return list(found.values())


def byte_view(live: LiveStorage) -> Tensor:
    """All bytes of the storage, uint8 [num_bytes], sharing its memory."""
    empty = torch.empty(0, dtype=torch.uint8, device=live.device)
    return empty.set_(live.storage, 0, (live.num_bytes,), (1,))


def covered_bytes(tensor: Tensor, live: LiveStorage) -> Tensor:
    """Which bytes of its storage the elements of ``tensor`` occupy, bool [num_bytes]."""
    mask = torch.zeros(live.num_bytes, dtype=torch.bool, device=live.device)
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    first = tensor.storage_offset() * size
    mask.as_strided([*tensor.shape, size], [*strides, 1], first).fill_(True)
    return mask


def hash_bytes(live: LiveStorage) -> bytes:
    """Digest of the storage's bytes: NaN and -0.0 count as what they are."""
    on_cpu = byte_view(live).cpu()
    buffer = (ctypes.c_char * live.num_bytes).from_address(on_cpu.data_ptr())
    return hashlib.blake2b(buffer, digest_size=16).digest()


def wait_for_devices() -> None:
    """Until the kernels in flight, on whatever stream, have written what they write."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def owner_of(live: LiveStorage) -> str:
    """``module.attribute`` (or ``module.attribute[...]``) that holds a tensor over the storage.

    Falls back on the type of an object that refers to one, for instance ``<attribute of Engine>``.
    """
    tensors = [x for x in _live_tensors() if _lies_over(x, live)]
    wanted = {id(tensor) for tensor in tensors}
    for module_name, module in list(sys.modules.items()):
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in wanted:
                return f"{module_name}.{attribute}"
            if any(id(item) in wanted for item in _items(value)):
                return f"{module_name}.{attribute}[...]"
    return _holder_type(tensors)


def _lies_over(tensor: Tensor, live: LiveStorage) -> bool:
    other = storage_of(tensor)
    return other is not None and other.storage._cdata == live.storage._cdata


def _items(value: object) -> Iterator[object]:
    if type(value) is dict:
        yield from list(value.values())
    elif type(value) in (list, tuple, set):
        yield from list(value)  # type: ignore[call-overload]


def _holder_type(tensors: list[Tensor]) -> str:
    for holder in gc.get_referrers(*tensors) if tensors else ():
        plain = isinstance(holder, (FrameType, LiveStorage, Tensor, Iterator))
        if hasattr(holder, "__dict__") and not plain:
            return f"<attribute of {type(holder).__qualname__}>"
    return "<no owner that Python can name>"


def _live_tensors() -> Iterator[Tensor]:
    # By type, not isinstance: that asks lazy proxies for __class__, which can run their code.
    return (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
