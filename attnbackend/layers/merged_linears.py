"""Weights of linear layers that read one input, laid one behind the other in memory.

The modules stay as they are: their parameters become views of one buffer, so `merged_linear` multiplies them
at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attnbackend.plain_weights import is_plain_weight

__all__ = ["SIBLINGS", "merge_linears"]

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
)  # fmt: skip
"""Names under which models keep layers of one input."""


def merge_linears(model: nn.Module, siblings: Sequence[Sequence[str]] = SIBLINGS) -> int:
    """Lays the weights of siblings together, in place.

    A group is left alone where its modules are not plain linear layers of one width, dtype and device, where
    one of them is shared with another module, or where some have a bias and others none. Call it before
    compiling or capturing: addresses change.

    Returns:
        How many groups lie together now.
    """
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    merged = 0
    for parent in model.modules():
        for names in siblings:
            layers = [getattr(parent, name, None) for name in names]
            if _fit_together(layers, owners):
                _lay_together([layer.weight for layer in layers])  # type: ignore[union-attr]
                if layers[0].bias is not None:  # type: ignore[union-attr]
                    _lay_together([layer.bias for layer in layers])  # type: ignore[union-attr]
                merged += 1
    return merged


def _fit_together(layers: Sequence[object], owners: Counter[int]) -> bool:
    plain = [layer for layer in layers if type(layer) is nn.Linear and is_plain_weight(layer.weight)]
    if len(plain) != len(layers):
        return False
    kinds = {(p.weight.shape[1], p.weight.dtype, p.weight.device, p.bias is None) for p in plain}
    return len(kinds) == 1 and all(owners[id(p.weight)] == 1 for p in plain)


def _lay_together(parameters: Sequence[Tensor]) -> None:
    buffer = torch.cat([p.detach() for p in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = buffer[start : start + len(parameter)]
        start += len(parameter)
