"""`nn.Linear` with its weight packed for a CPU's matrix product, in the place of the plain module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnbackend._torch_compat import can_pack
from attnbackend.ops.packed_linear import PackedWeight, packed_linear

__all__ = ["PackedLinear", "pack_linears", "unpack_linears"]


class PackedLinear(nn.Linear):
    """A linear layer that multiplies with a packed copy of its weight, except where gradients are wanted."""

    packed_weight: PackedWeight | None

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(input)
        return packed_linear(input, self.weight, self.bias)


def pack_linears(model: nn.Module, max_bytes: int) -> str:
    """Packs every plain linear layer of a model on a CPU, in place: the modules change their class.

    Args:
        model: weights stay where they are; the packed copies take as many bytes again.
        max_bytes: what the copies may take together.

    Returns:
        What was done, or why nothing was.
    """
    layers = [m for m in model.modules() if type(m) is nn.Linear]
    refused = {reason for m in layers if (reason := can_pack(m.weight))}
    if refused or not layers:
        return f"not packed: {'; '.join(sorted(refused)) or 'the model has no plain linear layer'}"
    wanted = sum(m.weight.nbytes for m in layers)
    if wanted > max_bytes:
        return f"not packed: the copies would take {wanted} bytes and {max_bytes} may be used"
    for layer in layers:
        layer.__class__ = PackedLinear
        layer.packed_weight = PackedWeight(layer.weight)  # type: ignore[assignment]
    return f"{len(layers)} linear layers packed, {wanted} bytes"


def unpack_linears(model: nn.Module) -> None:
    """Makes the packed layers plain again and frees their copies."""
    for layer in [m for m in model.modules() if type(m) is PackedLinear]:
        del layer.packed_weight
        layer.__class__ = nn.Linear  # type: ignore[assignment]
