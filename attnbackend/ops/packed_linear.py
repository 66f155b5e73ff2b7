"""`packed_linear`: a linear layer on a CPU whose weight was reordered once for oneDNN's matrix product.

The packed copy is a cache beside the weight, never an input: without one, or after the weight changed, the op
multiplies with the weight itself and gives the same answer, only slower.

Shape legend: N rows, I input features, O output features.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.nn.functional as F
from torch import Tensor

from attnbackend._torch_compat import StorageRef, multiply_packed, pack_weight
from attnbackend.ops.library import NAMESPACE, define_function

__all__ = [
    "LINEAR_SCHEMA", "WHEN_USED", "PackedWeight", "multiply", "packed_linear", "packed_weights",
    "packed_weights_in_use",
]  # fmt: skip


class PackedWeight:
    """A packed copy of a weight [O, I], found by the op for as long as this object lives.

    It notices writes in place as torch counts them. Writes past the count (through ``.data`` or a NumPy view)
    it cannot notice: make the copy anew after them.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        self.packed = pack_weight(weight_OI.detach())
        self._storage = StorageRef(weight_OI.untyped_storage())
        self._layout = (weight_OI.shape, weight_OI.stride())
        self._version = _version(weight_OI)
        self._weight = weakref.ref(weight_OI)
        self.address = weight_OI.data_ptr()
        _PACKED[self.address] = self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or unpickled layer has a weight of its own, which nobody packed."""
        return type(None), ()

    def is_of(self, weight_OI: Tensor) -> bool:
        """Whether ``weight_OI`` still is, and holds, what was packed."""
        return (
            not self._storage.expired()
            and self._version == _version(weight_OI)
            and self._layout == (weight_OI.shape, weight_OI.stride())
        )

    @property
    def weight(self) -> Tensor | None:
        """The weight, where it still is, and holds, what was packed."""
        weight = self._weight()
        current = weight is not None and weight.data_ptr() == self.address and self.is_of(weight)
        return weight if current else None


_PACKED: weakref.WeakValueDictionary[int, PackedWeight] = weakref.WeakValueDictionary()
"""By the weight's address."""


_IN_USE: ContextVar[bool] = ContextVar("attnbackend_packed_weights_in_use", default=False)


WHEN_USED: list[Callable[[bool], object]] = []
"""Are told, on the thread that it is about, whether packed copies may be used from here on."""


def packed_weights() -> list[PackedWeight]:
    """All packed weights of this process."""
    return list(_PACKED.values())


@contextmanager
def packed_weights_in_use() -> Iterator[None]:
    """The op uses packed copies, and own kernels, inside the ``with`` block alone: a model used by itself
    never does. Weights must not change inside the block, which is a step of serving."""
    token = _IN_USE.set(True)
    try:
        _tell(True)
        yield
    finally:
        _IN_USE.reset(token)
        _tell(_IN_USE.get())


def _tell(used: bool) -> None:
    for told in WHEN_USED:
        told(used)


def _version(x: Tensor) -> int:
    """Changes with every write in place; inference tensors keep no count."""
    return -1 if x.is_inference() else x._version


def multiply(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """The op, in Python."""
    packed = _PACKED.get(weight_OI.data_ptr()) if _IN_USE.get() else None
    if packed is None or not packed.is_of(weight_OI):
        return F.linear(x, weight_OI, bias_O)
    return multiply_packed(x, packed.packed, bias_O)


def _fake(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight_OI.shape[0])


LINEAR_SCHEMA = "(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"
packed_linear = define_function(f"{NAMESPACE}::packed_linear", LINEAR_SCHEMA, multiply, _fake)
