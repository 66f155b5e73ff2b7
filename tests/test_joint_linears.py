"""Several products of one input in one op on CPUs, and the pass that joins them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnbackend
from attnbackend._torch_compat import fake_mode
from attnbackend.fx_passes import JoinCPULinears
from attnbackend.layers import take_linears
from attnbackend.ops import cpu_linear as ops
from attnbackend.ops.cpu_linear import cpu_gated_linear, cpu_linear, cpu_linears, own_products
from attnbackend.ops.native import how_ops_are_called

if (how := how_ops_are_called()) != "C++, called without Python":
    pytest.skip(str(how), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("fresh_compiler")
ROWS = [1, 2, 5, 8, 9, 17, 24, 33, 64, 131]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the products that Python served."""
    rows: list[int] = []

    def linear(x: Tensor, *args: Tensor | None) -> Tensor:
        rows.append(x.shape[:-1].numel())
        return F.linear(x, *args)

    monkeypatch.setattr(ops, "F", SimpleNamespace(linear=linear, silu=F.silu))
    return rows


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def made(rows: int, inputs: int, outputs: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(rows)
    weights = [torch.randn(n, inputs).to(dtype) / inputs**0.5 for n in outputs]
    return torch.randn(1, rows, inputs).to(dtype), weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_each_output_is_the_single_product(
    dtype: torch.dtype, rows: int, threads: int, in_python: list[int]
) -> None:
    x, weights = made(rows, 96, (40, 1, 65), dtype)
    biases = [torch.randn(40).to(dtype), None, torch.randn(65).to(dtype)]
    with own_products():
        single = [cpu_linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        three = cpu_linears(x, *weights, *biases)
        two = cpu_linears(x, *weights[:2], None, *biases[:2])
    assert not in_python
    assert [y.is_contiguous() for y in three] == [True] * 3
    assert (len(three), len(two)) == (3, 2)
    assert all(map(torch.equal, three, single))
    assert all(map(torch.equal, two, single))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [*ROWS, 420])
@pytest.mark.parametrize("bias", [False, True])
def test_gates_are_rounded_as_outputs_are(
    dtype: torch.dtype, rows: int, bias: bool, threads: int, in_python: list[int]
) -> None:
    """Against float64 of the rounded products: five roundings of float32, then one of the type."""
    x, (gate, up) = made(rows, 64, (37, 37), dtype)
    biases = [torch.randn(37).to(dtype) if bias else None for _ in range(2)]
    with own_products():
        pair = [cpu_linear(x, w, b) for w, b in zip((gate, up), biases, strict=True)]
        own = cpu_gated_linear(x, gate, up, *biases)
    assert not in_python
    expected = F.silu(pair[0].double()) * pair[1].double()
    roundings = 2.5 if dtype is torch.float32 else 1
    torch.testing.assert_close(own.double(), expected, rtol=roundings * torch.finfo(dtype).eps, atol=1e-7)
    if dtype is not torch.float32:
        assert (own == expected.to(dtype)).float().mean() > 0.98


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, -200.0, 200.0, -1e-30, -0.0])
def test_extreme_gates(value: float) -> None:
    x, gate = torch.full((17, 32), value), torch.zeros(16, 32)
    gate[:, 0] = 1.0
    x[:, 1:] = 0.0
    up = torch.zeros(16, 32)
    with own_products():
        own = cpu_gated_linear(x, gate, up, None, torch.ones(16))
    torch.testing.assert_close(
        own, F.silu(F.linear(x, gate)) * F.linear(x, up, torch.ones(16)), equal_nan=True
    )


@pytest.mark.parametrize("rows", [0, 3])
def test_others_are_python_s(rows: int, in_python: list[int]) -> None:
    size = 48 if rows else 64
    x, weights = made(rows, size, (8, 8), torch.float32)
    with own_products():
        cpu_linears(x, *weights)
        cpu_gated_linear(x, *weights)
    assert in_python == [rows] * 4


def test_opcheck_passes() -> None:
    x, weights = made(3, 64, (8, 8, 8), torch.float32)
    with own_products():
        torch.library.opcheck(cpu_linears, (x, *weights))
        torch.library.opcheck(cpu_gated_linear, (x, *weights[:2]))
    mode = fake_mode()
    fakes = [mode.from_tensor(y) for y in (x, weights[0], weights[1][:4])]
    with mode, pytest.raises(ValueError, match=r"\(8, 64\) and \(4, 64\); give equal ones"):
        cpu_gated_linear(*fakes)


# The pass


class Block(nn.Module):
    def __init__(self, size: int = 64, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, n, bias=bias) for n in (64, 32, 32))
        self.gate_proj, self.up_proj = nn.Linear(64, 96), nn.Linear(64, 96, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        mixed = q + torch.cat([k, v], -1)
        return self.up_proj(mixed) * F.silu(self.gate_proj(mixed))


def joined(model: Callable[..., Tensor], *args: Tensor) -> tuple[Tensor, str, list[tuple[str, str]]]:
    """The answer, the report as text, and what became what."""
    compiled = attnbackend.compile(model, compiler="aot_eager", passes=[JoinCPULinears()])
    with torch.inference_mode(), own_products():
        answer = compiled(*args)
    compiler = compiled.attnbackend_compiler
    (report,) = compiler.reports
    return answer, str(compiler), [(change.before, change.after) for change in report.changes]


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_s_products_are_joined(bias: bool) -> None:
    torch.manual_seed(0)
    model, x = Block(bias=bias).eval(), torch.randn(5, 64)
    with torch.inference_mode():
        expected = model(x)
    take_linears(model)
    answer, _, changes = joined(model, x)
    assert changes == [
        ("silu(linear) * linear", "attnbackend::cpu_gated_linear"),
        ("3 x linear", "attnbackend::cpu_linears"),
    ]
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)


X, A, B = (torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (5, 32, 33))
S = A[:, :48].contiguous()


def with_a_write_between(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    first = cpu_linear(x, a)
    x.mul_(2)
    return torch.cat([first, cpu_linear(x, b)], -1)


def of_a_computed_weight(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([cpu_linear(x, a + 1), cpu_linear(x, b)], -1)


def of_odd_size(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    part = x[:, :48]
    return torch.cat([cpu_linear(part, a), cpu_linear(part, a)], -1)


def of_two_inputs(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([cpu_linear(x, a), cpu_linear(x + 1, b)], -1)


def whose_gate_is_read_twice(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    gate = F.silu(cpu_linear(x, a))
    return gate * cpu_linear(x, a) + gate


def written_before_the_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    gate, up = cpu_linear(x, a), cpu_linear(x, a)
    gate = F.silu(gate)
    x.mul_(2)
    return gate * up


@pytest.mark.parametrize(
    ("model", "other", "changes", "reason"),
    [
        (with_a_write_between, A, 0, "may write memory"), (of_two_inputs, A, 0, ""),
        (of_a_computed_weight, A, 0, "is computed in the graph"), (of_odd_size, S, 0, "no multiple of 32"),
        (whose_gate_is_read_twice, A, 1, ""), (written_before_the_product, A, 1, "may write memory"),
    ],
)  # fmt: skip
def test_layers_that_are_left_alone(
    model: Callable[..., Tensor], other: Tensor, changes: int, reason: str
) -> None:
    expected = model(X.clone(), other, B)
    answer, report, found = joined(model, X.clone(), other, B)
    assert len(found) == changes
    assert not any("silu" in before for before, _ in found)
    assert reason in report
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)


def test_more_than_three_are_several_ops() -> None:
    def four(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([cpu_linear(x, w) for w in (a, b, a, b, b)], -1)

    answer, _, changes = joined(four, X, A, B)
    assert [before for before, _ in changes] == ["3 x linear", "2 x linear"]
    torch.testing.assert_close(answer, four(X, A, B), rtol=1e-5, atol=1e-5)
