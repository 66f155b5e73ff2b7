"""Weights that are more than numbers in memory, as quantised ones are, are left as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbackend.host_memory import move_to_huge_pages
from attnbackend.layers import merge_linears, take_linears


class Halves(Tensor):
    """Holds half of each number, in a tensor of its own, and computes `F.linear` itself."""

    halves: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Halves:
        made: Halves = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype)  # type: ignore[attr-defined]
        made.halves = numbers / 2
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.halves * 2, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].halves * 2)
        raise NotImplementedError(f"{func} of halves")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", [Halves, Tensor.to_sparse_csr], ids=["subclass", "sparse"])
def test_layers_of_other_weights_are_left_alone(kind: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.q_proj, model.k_proj, model.v_proj = (nn.Linear(64, 32, bias=False) for _ in range(3))
    layers, x = list(model.children()), torch.randn(3, 64)
    with torch.no_grad():
        expected = [layer(x) for layer in layers]
        for layer in layers:
            layer.weight = nn.Parameter(kind(layer.weight.detach()), requires_grad=False)
        assert move_to_huge_pages([layer.weight for layer in layers], 1 << 30) == 0
        assert merge_linears(model) == 0
        take_linears(model)
        assert {type(layer) for layer in layers} == {nn.Linear}
        for layer, before in zip(layers, expected, strict=True):
            torch.testing.assert_close(layer(x), before)
