"""Linear layers that own kernels compute: where they do, and that the model stays what it was."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from attnbackend.layers import CPULinear, give_back_linears, take_linears
from attnbackend.ops.cpu_linear import cpu_linear, own_products
from attnbackend.ops.native import how_ops_are_called

if (how := how_ops_are_called()) != "C++, called without Python":
    pytest.skip(str(how), allow_module_level=True)


def _model(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96, bias=bias), nn.SiLU(), nn.Linear(96, 40, bias=bias)).eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 64), (7, 64), (1, 50, 64), (0, 64)], ids=str)
def test_layers_give_the_plain_layers_answer(bias: bool, shape: tuple[int, ...]) -> None:
    model, x = _model(bias), torch.randn(shape)
    with torch.inference_mode():
        expected = model(x)
        assert take_linears(model) == "2 linear layers multiply by own kernels"
        assert type(model[0]) is CPULinear
        with own_products():
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        give_back_linears(model)
        assert type(model[0]) is nn.Linear
        assert torch.equal(model(x), expected)


def test_gradients_take_the_plain_way() -> None:
    model = _model()
    take_linears(model)
    with own_products():
        model(torch.ones(2, 64)).sum().backward()
    assert model[0].weight.grad is not None


def test_types_that_the_kernels_do_not_know_are_left_alone() -> None:
    model = _model().double()
    assert take_linears(model) == "0 linear layers multiply by own kernels"
    assert type(model[0]) is nn.Linear


def test_opcheck_passes_with_and_without_own_kernels() -> None:
    layer, x = _model()[0], torch.randn(3, 64)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    torch.library.opcheck(cpu_linear, (x, weight, bias))
    with own_products():
        torch.library.opcheck(cpu_linear, (x, weight, None))


def test_equal_layers_compile_once(fresh_compiler: None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    layers = [nn.Linear(64, 64) for _ in range(4)]
    model = nn.Sequential(*layers).eval()
    take_linears(model)
    counter = CompileCounterWithBackend("aot_eager")
    with torch.inference_mode(), own_products():
        x = torch.randn(3, 64)
        expected = model(x)
        for layer in layers:
            layer.compile(backend=counter, fullgraph=True)
        torch.testing.assert_close(model(x), expected)
    assert counter.frame_count == 1


def test_a_copied_model_has_weights_of_its_own() -> None:
    model, x = _model(), torch.randn(3, 64)
    take_linears(model)
    twin = copy.deepcopy(model)
    with torch.no_grad(), own_products():
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
        twin[0].weight.zero_()
        assert torch.equal(twin[0](x), twin[0].bias.expand(3, -1))
    give_back_linears(twin)
    assert type(twin[0]) is nn.Linear


def test_a_model_used_by_itself_multiplies_as_torch_does() -> None:
    model, x = _model(), torch.randn(30, 64)
    take_linears(model)
    with torch.no_grad():
        assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))
