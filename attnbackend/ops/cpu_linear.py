"""Linear layers whose products an own kernel computes while an engine on a CPU serves.

`cpu_linear` is one of them, `cpu_linears` two or three of one input, `cpu_gated_linear` SiLU of one times
another. The kernel reads weights as they lie: there is no packed copy of them. Everywhere else, and where
the kernel does not take a product, the ops are ``F.linear`` and ``F.silu``.

Shape legend: O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from attnbackend.ops.argument_checks import check_device
from attnbackend.ops.library import NAMESPACE, define_function

__all__ = ["MULTIPLE", "SERVED", "WHEN_USED", "cpu_gated_linear", "cpu_linear", "cpu_linears", "own_products"]

MULTIPLE = 32
"""Inputs are a multiple of so many where own kernels multiply; see args.h."""
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


def _linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return F.linear(x, weight_OI, bias_O)


def _fake(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    check_device("cpu_linear", x, (weight_OI, bias_O))
    return x.new_empty(*x.shape[:-1], weight_OI.shape[0])


def _linears(
    x: Tensor, weight_OI: Tensor, second_OI: Tensor, third_OI: Tensor | None = None,
    bias_O: Tensor | None = None, second_bias_O: Tensor | None = None, third_bias_O: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    pairs = ((weight_OI, bias_O), (second_OI, second_bias_O), (third_OI, third_bias_O))
    return [_linear(x, weight, bias) for weight, bias in pairs if weight is not None]


def _linears_fake(
    x: Tensor, weight_OI: Tensor, second_OI: Tensor, third_OI: Tensor | None = None, *biases: Tensor | None
) -> list[Tensor]:
    check_device("cpu_linears", x, (weight_OI, second_OI, third_OI, *biases))
    weights = (weight for weight in (weight_OI, second_OI, third_OI) if weight is not None)
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


def _gated(
    x: Tensor, gate_OI: Tensor, up_OI: Tensor, gate_bias_O: Tensor | None = None,
    up_bias_O: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return F.silu(_linear(x, gate_OI, gate_bias_O)) * _linear(x, up_OI, up_bias_O)


def _gated_fake(
    x: Tensor, gate_OI: Tensor, up_OI: Tensor, gate_bias_O: Tensor | None = None,
    up_bias_O: Tensor | None = None,
) -> Tensor:  # fmt: skip
    check_device("cpu_gated_linear", x, (gate_OI, up_OI, gate_bias_O, up_bias_O))
    if gate_OI.shape != up_OI.shape:
        raise ValueError(
            f"cpu_gated_linear: the weights' shapes are {tuple(gate_OI.shape)} and {tuple(up_OI.shape)}; "
            "give equal ones"
        )
    return x.new_empty(*x.shape[:-1], gate_OI.shape[0])


SERVED: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "cpu_linear": ("(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", _linear, _fake),
    "cpu_linears": (
        "(Tensor input, Tensor weight, Tensor second, Tensor? third=None, Tensor? bias=None, "
        "Tensor? second_bias=None, Tensor? third_bias=None) -> Tensor[]",
        _linears, _linears_fake,
    ),
    "cpu_gated_linear": (
        "(Tensor input, Tensor gate, Tensor up, Tensor? gate_bias=None, Tensor? up_bias=None) -> Tensor",
        _gated, _gated_fake,
    ),
}  # fmt: skip
"""Name -> schema, the op in Python, and its fake."""

cpu_linear, cpu_linears, cpu_gated_linear = (
    define_function(f"{NAMESPACE}::{name}", *parts) for name, parts in SERVED.items()
)
