"""Linear layers of one input as one product: the op, the memory that it wants, the pass that emits it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import attnbackend
from attnbackend._torch_compat import fake_mode
from attnbackend.fx_passes import MergeLinears, PassManager, RemoveNoOps, graph_text
from attnbackend.layers import merge_linears
from attnbackend.ops.merged_linear import joined, merged_linear

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 24, bias=bias)
        self.k_proj = nn.Linear(16, 8, bias=bias)
        self.v_proj = nn.Linear(16, 8, bias=bias)
        self.gate_proj = nn.Linear(24, 32)
        self.up_proj = nn.Linear(24, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        mixed = q + torch.cat([k, v, k], -1)
        return self.gate_proj(mixed).relu() * self.up_proj(mixed)


def block(bias: bool = False) -> Block:
    torch.manual_seed(0)
    return Block(bias).requires_grad_(False)


class Heads(nn.Module):
    """What is made of the layers' outputs are views of them, and products."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.kv_proj = nn.Linear(16, 24, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, kv = self.q_proj(x).view(-1, 3, 8), self.kv_proj(x)
        low, high = q.split((3, 5), -1)
        return low.transpose(0, 1).exp(), high * 2, kv[..., 4:] - 1


def test_what_graphs_say_of_strides_is_true_after_the_pass() -> None:
    """Pieces of a graph are compiled for the strides that it names."""
    wrong: list[str] = []

    class Compare(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            value, said = super().run_node(n), n.meta.get("example_value")
            if isinstance(value, Tensor) and isinstance(said, Tensor) and value.stride() != said.stride():
                wrong.append(f"{n}: {said.stride()}, not {value.stride()}")
            return value

    def backend(graph_module: torch.fx.GraphModule, _: object) -> object:
        assert len(MergeLinears().run(graph_module).changes) == 1
        return lambda *args: Compare(graph_module).run(*args)

    model = Heads().requires_grad_(False)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    for actual, expected in zip(compiled(x()), model(x()), strict=True):
        torch.testing.assert_close(actual, expected)
    assert not wrong


def x(rows: int = 5) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [False, True])
def test_weights_lie_together_and_the_model_is_the_same(bias: bool) -> None:
    model = block(bias)
    expected, state = model(x()), copy.deepcopy(model.state_dict())
    assert merge_linears(model) == 2
    assert joined([model.q_proj.weight, model.k_proj.weight, model.v_proj.weight]) is not None
    assert torch.equal(model(x()), expected)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert merge_linears(model) == 2, "merging again changes nothing"


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_op_gives_each_layer_s_output(together: bool, bias: bool) -> None:
    model = block(bias)
    if together:
        merge_linears(model)
    layers = [model.q_proj, model.k_proj, model.v_proj]
    biases = [layer.bias for layer in layers] if bias else []
    got = merged_linear(x(), [layer.weight for layer in layers], biases)
    torch.testing.assert_close(got, torch.cat([layer(x()) for layer in layers], -1), rtol=1e-6, atol=1e-6)
    torch.library.opcheck(merged_linear, (x(), [layer.weight for layer in layers], biases))


def test_a_weight_written_after_merging_is_read() -> None:
    model = block()
    merge_linears(model)
    model.k_proj.weight.zero_()
    layers = [model.q_proj, model.k_proj, model.v_proj]
    assert not merged_linear(x(), [layer.weight for layer in layers], [])[:, 24:32].any()


def test_only_neighbours_of_one_buffer_are_joined() -> None:
    whole = torch.arange(12.0).view(6, 2)
    assert torch.equal(joined([whole[:4], whole[4:]]), whole)  # type: ignore[arg-type]
    assert joined([whole[4:], whole[:4]]) is None
    assert joined([whole[:3], whole[4:]]) is None
    assert joined([whole[:4], whole[4:].clone()]) is None
    assert joined([whole[:, :1], whole[:, 1:]]) is None


ALONE = {
    "another dtype": lambda m: setattr(m, "k_proj", m.k_proj.double()),
    "another width": lambda m: setattr(m, "k_proj", nn.Linear(12, 8, bias=False)),
    "a bias": lambda m: setattr(m, "k_proj", nn.Linear(16, 8)),
    "another class": lambda m: setattr(m, "k_proj", nn.Identity()),
}


@pytest.mark.parametrize("why", ALONE)
def test_layers_that_do_not_fit_are_left_alone(why: str) -> None:
    model = block()
    ALONE[why](model)
    assert merge_linears(model) == 1


def test_a_shared_weight_is_left_alone() -> None:
    model = block()
    model.other = nn.Linear(16, 8, bias=False)
    model.other.weight = model.k_proj.weight
    assert merge_linears(model) == 1
    assert model.other.weight is model.k_proj.weight


def test_the_pass_joins_layers_of_one_input() -> None:
    model = block()
    merge_linears(model)
    compiled = attnbackend.compile(model, compiler="eager", passes=[MergeLinears()])
    torch.testing.assert_close(compiled(x()), block()(x()), rtol=1e-6, atol=1e-6)
    (report,) = compiled.attnbackend_compiler.reports
    assert [change.before for change in report.changes] == ["3 x linear", "2 x linear"]


def test_the_graph_before_and_after() -> None:
    seen: list[str] = []

    def record(graph_module: torch.fx.GraphModule, example_inputs: object) -> torch.fx.GraphModule:
        seen.append(graph_text(graph_module))
        MergeLinears().run(graph_module)
        seen.append(graph_text(graph_module))
        return graph_module

    torch.compile(lambda x, a, b: nn.functional.linear(x, a) + nn.functional.linear(x, b), backend=record)(
        torch.ones(2, 4), torch.ones(3, 4), torch.ones(3, 4)
    )
    assert_expected_inline(
        seen[1],
        """\
l_x_: input
l_a_: input
l_b_: input
merged_linear_default = attnbackend::merged_linear(l_x_, [l_a_, l_b_], [])
split = split(merged_linear_default, [3, 3], -1)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
add = add(getitem, getitem_1)
return [add]""",
    )


def plus(x: Tensor) -> Tensor:
    x += 1
    return x


def first_set(x: Tensor) -> Tensor:
    x[0] = 7.0
    return x


def through_a_view(x: Tensor) -> Tensor:
    x.view(-1).add_(1)
    return x


def out_of_an_op(x: Tensor) -> Tensor:
    torch.add(x, 1, out=x)
    return x


def in_place(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What is written in place, then viewed, has the strides of a part too."""
    y, z = linear(x, a), linear(x, b)
    y.add_(1)
    return y.add_(1).view(-1) + z.flatten()


def alias_of_what_is_written(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A reshape of rows that follow each other is a view, and sees the write."""
    y, z = linear(x, a), linear(x, b)
    flat = y.reshape(-1)
    y.mul_(2)
    return flat + z.flatten()


def in_bfloat16(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The first layer runs in another type than the second."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = linear(x, a)
    return low + linear(x, b)


def both_in_bfloat16(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear(x, a) + linear(x, b)


linear = nn.functional.linear
GIVEN = torch.rand(3)
APART: dict[str, tuple[Callable[..., Any], str]] = {
    "two inputs": (lambda x, a, b: linear(x, a) + linear(x + 1, b), ""),
    "a write by a method": (lambda x, a, b: linear(x, a) + linear(x.add_(1), b), ""),
    "a write by an operator": (lambda x, a, b: linear(x, a) + linear(plus(x), b), ""),
    "a write of an item": (lambda x, a, b: linear(x, a) + linear(first_set(x), b), "setitem may write"),
    "a write through a view": (lambda x, a, b: linear(x, a) + linear(through_a_view(x), b), "may write"),
    "a write by out=": (lambda x, a, b: linear(x, a) + linear(out_of_an_op(x), b), "may write"),
    "a bias on one side": (lambda x, a, b: linear(x, a) + linear(x, b, b[:, 0]), "is computed"),
    "no bias on one side": (lambda x, a, b: linear(x, a) + linear(x, b, GIVEN), "sets it apart"),
    "biases, one of which is computed": (
        lambda x, a, b: linear(x, a, a[:, 0]) + linear(x, b, b[:, 0] * 2), "is computed",
    ),
    "a weight that is computed": (lambda x, a, b: linear(x, a) + linear(x, a + b), "add is computed"),
    "a weight of one dimension": (
        lambda x, a, b: linear(x, b) + linear(x, bias=None, weight=a.__getitem__(0))[:, None], "is computed",
    ),
    "a view of all elements": (
        lambda x, a, b: linear(x, a).view(-1) + linear(x, b).view(-1), "does not take other strides",
    ),
    "a view of what was written": (in_place, "does not take other strides"),
    "a reshape of what is written": (alias_of_what_is_written, "would be a copy of y, which mul_"),
    "an output that is returned": (lambda x, a, b: (linear(x, a), linear(x, b) + 1), "is returned"),
    "a view that is returned": (lambda x, a, b: (linear(x, a)[:, 1:], linear(x, b) + 1), "is returned"),
    "places in memory": (
        lambda x, a, b: linear(x, a).as_strided((2, 2), (3, 1), 1) + linear(x, b)[:, :2], "as_strided, and",
    ),
    "another mode for one": (in_bfloat16, "may write memory, or change a mode"),
    "a mode that the op does not know": (both_in_bfloat16, "not torch.bfloat16"),
}  # fmt: skip
"""Layers that are not joined, and why; nothing is said where there is nothing to join."""


@pytest.mark.parametrize("what", APART)
def test_the_pass_leaves_others_alone(what: str) -> None:
    arguments = (torch.rand(2, 4), torch.rand(3, 4), torch.rand(3, 4))
    function, reason = APART[what]
    expected = function(*(a.clone() for a in arguments))
    seen: list[str] = []

    def run(graph_module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        before, names = graph_text(graph_module), [node.name for node in graph_module.graph.nodes]
        seen.append(str(PassManager([MergeLinears()]).run(graph_module)[0]))
        assert (graph_text(graph_module), [n.name for n in graph_module.graph.nodes]) == (before, names)
        return graph_module

    torch.testing.assert_close(torch.compile(function, backend=run)(*arguments), expected, rtol=0, atol=0)
    assert seen[0].startswith("merge_linears: 0 changes")
    assert (reason in seen[0]) if reason else "\n" not in seen[0]


def test_layers_that_are_trained_are_left_alone() -> None:
    model = Block()
    compiled = attnbackend.compile(model, compiler="aot_eager", passes=[MergeLinears()])
    compiled(x()).sum().backward()
    assert model.q_proj.weight.grad is not None
    assert "needs a gradient" in str(compiled.attnbackend_compiler)


def test_the_good_are_joined_beside_the_bad() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = linear(x, a) + linear(x, b)
        return linear(y, a[:, :3]).view(-1) * linear(y, b[:, :3]).view(-1) + linear(y, a[:, :3]).sum()

    arguments = (torch.rand(2, 4), torch.rand(3, 4), torch.rand(3, 4))
    compiled = attnbackend.compile(function, compiler="eager", passes=[MergeLinears()])
    torch.testing.assert_close(compiled(*arguments), function(*arguments))
    (report,) = compiled.attnbackend_compiler.reports
    assert len(report.changes) == 1
    assert len(report.near_misses) == 3


def test_a_graph_s_own_weights_come_first() -> None:
    """Where a graph fetches each weight right before its use."""
    x, a, b = torch.rand(2, 4), torch.rand(3, 4), torch.rand(3, 4)
    graph = torch.fx.Graph()
    given, first = graph.placeholder("x"), graph.get_attr("a")
    one = graph.call_function(linear, (given, first))
    two = graph.call_function(linear, (given, graph.get_attr("b")))
    graph.output(graph.call_function(torch.add, (one, two)))
    graph_module = torch.fx.GraphModule({"a": nn.Buffer(a), "b": nn.Buffer(b)}, graph)
    with fake_mode() as mode:
        for node in graph.nodes:
            like = {"x": (2, 4), "a": (3, 4), "b": (3, 4)}.get(node.name, (2, 3))
            node.meta["val"] = mode.from_tensor(torch.empty(like)) if node.op != "output" else None
    (report,) = PassManager([MergeLinears()]).run(graph_module)
    assert len(report.changes) == 1, str(report)
    torch.testing.assert_close(graph_module(x), linear(x, a) + linear(x, b))


STEPS: list[Callable[[Tensor, Tensor, Tensor, Tensor], Any]] = [
    lambda x, y, a, b: linear(x, a), lambda x, y, a, b: linear(x, weight=b), lambda x, y, a, b: x + y,
    lambda x, y, a, b: x.view(4, 4), lambda x, y, a, b: x.reshape(2, 8).reshape(4, 4),
    lambda x, y, a, b: x.t(), lambda x, y, a, b: x.contiguous(), lambda x, y, a, b: x.clone(),
    lambda x, y, a, b: x.flatten().unflatten(0, (4, 4)), lambda x, y, a, b: x[:, :].to(x.dtype),
    lambda x, y, a, b: torch.cat(x.chunk(2, -1)[::-1], -1), lambda x, y, a, b: torch.empty_like(x).copy_(y),
    lambda x, y, a, b: x.add_(1), lambda x, y, a, b: x[1:].mul_(2),
    lambda x, y, a, b: nn.functional.relu(x, True),
]  # fmt: skip
"""Layers, views, copies, sums, writes in place."""


def random_program(seed: int) -> Callable[..., tuple[Tensor, ...]]:
    choose = random.Random(seed)
    steps = [(choose.randrange(len(STEPS)), choose.random(), choose.random()) for _ in range(9)]
    returned = choose.random()

    def program(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        values = [x, linear(x, a), linear(x, b)]
        for step, i, j in steps:
            found = STEPS[step](values[int(i * len(values))], values[int(j * len(values))], a, b)
            values += [found] if found.shape == x.shape else []
        place = int(returned * (len(values) - 1))
        return (values[place], values[place + 1], *(value.sum() for value in values))

    return program


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_keep_their_meaning(seed: int) -> None:
    """What is returned lies as it did, and is the same memory as other things as it was."""
    program, given = random_program(seed), torch.rand(3, 4, 4)
    wanted, actual = (list(given.clone()) for _ in range(2))
    compiled = attnbackend.compile(program, compiler="eager", passes=[MergeLinears(), RemoveNoOps()])
    expected, found = program(*wanted), compiled(*actual)
    for results, arguments in ((expected, wanted), (found, actual)):
        for result in results[:2]:
            result.mul_(3)
        arguments.append(torch.stack(results[:2]))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(actual, wanted)
    assert [x.stride() for x in found] == [x.stride() for x in expected]
