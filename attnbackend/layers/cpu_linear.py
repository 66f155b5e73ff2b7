"""`nn.Linear` whose products an own kernel computes where a CPU serves, in the place of the plain module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnbackend.ops.cpu_linear import cpu_linear
from attnbackend.plain_weights import is_plain_weight

__all__ = ["CPULinear", "give_back_linears", "take_linears"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class CPULinear(nn.Linear):
    """A linear layer of the op `cpu_linear`, except where gradients are wanted."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(input)
        return cpu_linear(input, self.weight, self.bias)


def take_linears(model: nn.Module) -> str:
    """Lets a CPU's plain linear layers multiply by own kernels: the modules change their class.

    Returns:
        What was done, or why nothing was.
    """
    from attnbackend.ops.native import how_ops_are_called, serve_cpu_ops

    if (how := how_ops_are_called()) is None or serve_cpu_ops() is not None:
        return f"torch multiplies: {how or 'there are no C++ kernels'}"
    linears = [m for m in model.modules() if type(m) is nn.Linear and is_plain_weight(m.weight)]
    layers = [m for m in linears if m.weight.dtype in _DTYPES]
    for layer in layers:
        layer.__class__ = CPULinear
    return f"{len(layers)} linear layers multiply by own kernels"


def give_back_linears(model: nn.Module) -> None:
    """Makes the layers plain again."""
    for layer in [m for m in model.modules() if type(m) is CPULinear]:
        layer.__class__ = nn.Linear  # type: ignore[assignment]
