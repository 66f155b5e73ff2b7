"""What torch would derive, or map over batches, of any op: of ours it is refused, where torch gives zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from op_cases import case, require
from torch import Tensor

import attnbackend
from attnbackend.ops import cpu_linear, latent_rope_write, merged_linear, rope_write  # noqa: F401 (defines ops)
from attnbackend.registry import backend_names, is_implemented, resolve_backend
from attnbackend.testing import make_batch, op_kwargs, op_positional

for backend in filter(is_implemented, backend_names()):
    resolve_backend(backend)  # defines its ops
OF_BACKENDS = {
    f"attnbackend::{name}" for name in attnbackend.ops.backend_op_names()
}  # other tests define more
OPS = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("attnbackend::"))
PLAIN = torch.ones(2)
VALUES = {"float": 1.0, "int": 1, "bool": True, "str": "auto"}
Call = Callable[[Tensor], Tensor]


def overload(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.attnbackend, name.removeprefix("attnbackend::")).default


def calls_with(op: torch._ops.OpOverload) -> dict[str, Call]:
    """For each of an op's tensors, a function of it alone that calls the op and gives one number."""
    kinds = {a.name: str(a.type).removeprefix("Optional[").removesuffix("]") for a in op._schema.arguments}

    def call_with(changed: str, x: Tensor) -> Tensor:
        tensors = {name: x if name == changed else PLAIN for name in kinds}
        values = {"Tensor": tensors, "List[Tensor": {name: [y, y] for name, y in tensors.items()}}
        op(**{name: values[k][name] if k in values else VALUES[k] for name, k in kinds.items()})
        return x.sum()

    return {name: lambda x, n=name: call_with(n, x) for name, kind in kinds.items() if "Tensor" in kind}


def tangent_of(call: Call) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(torch.ones(2), torch.ones(2)))).tangent


WAYS: dict[str, Callable[[Call], Any]] = {
    "grad": lambda call: torch.func.grad(call)(torch.ones(2)),
    "jvp": lambda call: torch.func.jvp(call, (torch.ones(2),), (torch.ones(2),)),
    "vmap": lambda call: torch.func.vmap(call)(torch.ones(3, 2)),
    "forward mode": tangent_of,
}


def test_the_ops_are_those_of_every_backend() -> None:
    assert set(OPS) > OF_BACKENDS
    assert len(OPS) > 45


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPS)
def test_every_op_refuses_each_of_its_tensors(name: str, way: str) -> None:
    for argument, call in calls_with(overload(name)).items():
        with pytest.raises(RuntimeError, match=f"{name} serves inference") as error:
            WAYS[way](call)
        assert way == "forward mode" or f"but its {argument} comes from" in str(error.value)


@pytest.mark.parametrize("op", [merged_linear.merged_linear, cpu_linear.cpu_linear])
def test_gradients_of_products_are_refused(op: torch._ops.OpOverload) -> None:
    for call in calls_with(op).values():
        with pytest.raises(RuntimeError, match="serve inference and have no backward"):
            call(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("name", ["attention", "cpu_attn_forward"])
def test_plain_tensors_are_served_inside_transforms(name: str) -> None:
    require("CPU_ATTN", device_type="cpu")
    batch = make_batch(case("no_lse"), "cpu")
    op, args = overload(name), op_positional(batch)
    op(*args, **op_kwargs(batch))
    expected = batch.output.clone()

    def add(x: Tensor) -> Tensor:
        batch.output.fill_(torch.nan)
        op(*args, **op_kwargs(batch))
        return batch.output + x

    assert torch.equal(torch.func.vmap(add)(torch.zeros(2, 1))[1], expected)
    with forward_ad.dual_level():
        assert torch.equal(add(torch.zeros(1)), expected)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_transforms_are_refused_while_they_are_traced(way: str, fresh_compiler: None) -> None:
    call = calls_with(overload("attnbackend::attention"))["query"]
    with pytest.raises(Exception, match="attnbackend::attention serves inference"):
        torch.compile(lambda: WAYS[way](call), backend="aot_eager", fullgraph=True)()
