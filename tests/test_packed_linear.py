"""Packed linear layers: the same answer with and without the packed copy, and never a stale one."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from attnbackend._torch_compat import can_pack
from attnbackend.layers import PackedLinear, pack_linears, unpack_linears
from attnbackend.ops.packed_linear import _IN_USE, _PACKED, packed_linear, packed_weights_in_use

if reason := can_pack(torch.ones(2, 2)):
    pytest.skip(f"oneDNN cannot pack here: {reason}", allow_module_level=True)

MANY = 1 << 30


@pytest.fixture(autouse=True)
def _as_while_serving() -> Iterator[None]:
    with packed_weights_in_use():
        yield


def _model(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96, bias=bias), nn.SiLU(), nn.Linear(96, 40, bias=bias)).eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (7, 48), (1, 5, 48), (0, 48)], ids=str)
def test_packed_layers_give_the_plain_layers_answer(bias: bool, shape: tuple[int, ...]) -> None:
    model, x = _model(bias), torch.randn(shape)
    with torch.inference_mode():
        expected = model(x)
        assert pack_linears(model, MANY).startswith("2 linear layers packed")
        assert type(model[0]) is PackedLinear
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        unpack_linears(model)
        assert type(model[0]) is nn.Linear
        assert torch.equal(model(x), expected)


def test_the_packed_copy_is_really_used() -> None:
    model = _model()
    pack_linears(model, MANY)
    packed = _PACKED[model[0].weight.data_ptr()]
    packed.packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(96, 48))
    with torch.inference_mode():
        assert torch.equal(model[0](torch.ones(20, 48))[0], model[0].bias)


def test_a_weight_that_changed_in_place_is_not_served_stale() -> None:
    model, x = _model(), torch.randn(3, 48)
    pack_linears(model, MANY)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
        expected = nn.functional.linear(x, model[0].weight, model[0].bias)
        assert torch.equal(model[0](x), expected)


def test_a_weight_at_the_address_of_a_dead_one_is_not_taken_for_it() -> None:
    model = _model()
    pack_linears(model, MANY)
    address, packed = model[0].weight.data_ptr(), model[0].packed_weight
    model[0].weight = nn.Parameter(torch.zeros(1))
    gc.collect()
    other = torch.empty(96, 48)
    _PACKED[other.data_ptr()] = packed
    assert not packed.is_of(other), f"the storage at {address} is gone"


def test_copies_go_with_their_layers() -> None:
    before = len(_PACKED)
    model = _model()
    pack_linears(model, MANY)
    assert len(_PACKED) == before + 2
    del model
    gc.collect()
    assert len(_PACKED) == before


def test_gradients_take_the_plain_way() -> None:
    model = _model()
    pack_linears(model, MANY)
    model(torch.ones(2, 48)).sum().backward()
    assert model[0].weight.grad is not None


def test_nothing_is_packed_beyond_the_memory_given() -> None:
    model = _model()
    assert "copies would take" in pack_linears(model, max_bytes=100)
    assert type(model[0]) is nn.Linear


def test_types_that_onednn_cannot_multiply_are_left_alone() -> None:
    model = _model().double()
    assert "not packed" in pack_linears(model, MANY)


def test_opcheck_passes_with_and_without_a_packed_copy() -> None:
    model = _model()
    x = torch.randn(3, 48)
    weight, bias = model[0].weight.detach(), model[0].bias.detach()
    torch.library.opcheck(packed_linear, (x, weight, bias))
    pack_linears(model, MANY)
    torch.library.opcheck(packed_linear, (x, weight, None))


def test_equal_layers_compile_once(fresh_compiler: None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    layers = [nn.Linear(48, 48) for _ in range(4)]
    model = nn.Sequential(*layers).eval()
    pack_linears(model, MANY)
    counter = CompileCounterWithBackend("aot_eager")
    with torch.inference_mode():
        x = torch.randn(3, 48)
        expected = model(x)
        for layer in layers:
            layer.compile(backend=counter, fullgraph=True)
        torch.testing.assert_close(model(x), expected)
    assert counter.frame_count == 1


def test_a_copied_model_has_nothing_packed_and_the_same_answer() -> None:
    model, x = _model(), torch.randn(3, 48)
    pack_linears(model, MANY)
    twin = copy.deepcopy(model)
    assert pickle.loads(pickle.dumps(model))[0].packed_weight is None
    with torch.no_grad():
        torch.testing.assert_close(twin(x), model(x))
        twin[0].weight.zero_()
        assert torch.equal(twin[0](x), twin[0].bias.expand(3, -1))
    unpack_linears(twin)
    assert type(twin[0]) is nn.Linear


def test_a_model_used_by_itself_takes_its_own_weights() -> None:
    """Also after writes that torch does not count, as weights are merged or synchronised."""
    model, x = _model(), torch.randn(3, 48)
    pack_linears(model, MANY)
    model[0].weight.data.mul_(2.0)
    token = _IN_USE.set(False)
    with torch.no_grad():
        assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))
    _IN_USE.reset(token)
