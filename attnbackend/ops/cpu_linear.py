"""`cpu_linear`: a linear layer whose products an own kernel computes while an engine on a CPU serves.

The kernel reads the weight as it lies: there is no packed copy of it. Everywhere else, and where the kernel
does not take a product, the op is ``F.linear``.

Shape legend: O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor

from attnbackend.ops.argument_checks import check_device
from attnbackend.ops.library import NAMESPACE, define_function

__all__ = ["LINEAR_SCHEMA", "WHEN_USED", "cpu_linear", "multiply", "own_products"]

WHEN_USED: list[Callable[[bool], object]] = []
"""Are told, on the thread that it is about, whether own kernels may be used from here on."""


@contextmanager
def own_products() -> Iterator[None]:
    """Own kernels are used inside the ``with`` block alone: a model used by itself multiplies as torch."""
    try:
        _tell(True)
        yield
    finally:
        _tell(False)


def _tell(used: bool) -> None:
    for told in WHEN_USED:
        told(used)


def multiply(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """The op, in Python."""
    return F.linear(x, weight_OI, bias_O)


def _fake(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    check_device("cpu_linear", x, (weight_OI, bias_O))
    return x.new_empty(*x.shape[:-1], weight_OI.shape[0])


LINEAR_SCHEMA = "(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"
cpu_linear = define_function(f"{NAMESPACE}::cpu_linear", LINEAR_SCHEMA, multiply, _fake)
