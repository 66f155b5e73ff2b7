"""Rows that are picked at the end of a computation are picked before it.

Shape legend: T tokens, R rows that are picked, H hidden size.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from graph_lines import renumbered
from latent_zoo import make_latent_model
from model_zoo import ZOO, make_model
from torch import Tensor, nn

from attnbackend import Engine, SamplingParams
from attnbackend.compiler import make_compiler
from attnbackend.fx_passes import PickRowsEarly, graph_text
from attnbackend.integrations import transformers as transformers_models
from attnbackend.integrations.compiled_layers import why_not_picked
from attnbackend.integrations.transformers import TransformersModel, _decoder_layers
from attnbackend.ops.cpu_linear import cpu_linear
from attnbackend.ops.merged_linear import merged_linear

T, H = 6, 8
ROWS_R = torch.tensor([4, 1, 1])
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def given(seed: int = 0) -> Tensor:
    return torch.randn(1, T, H, generator=torch.Generator().manual_seed(seed))


WEIGHT = torch.randn(H, H, generator=torch.Generator().manual_seed(7))
GAIN = torch.randn(H, generator=torch.Generator().manual_seed(8))


def run(step: Callable[..., Any], *tensors: Tensor, dynamic: bool = False) -> tuple[Any, str, str]:
    """Result, report of the pass, graph after it; the result is that of ``step`` itself."""
    reports, texts = [], []

    def backend(graph_module: torch.fx.GraphModule, _: object) -> object:
        reports.append(PickRowsEarly().run(graph_module))
        graph_module.graph.lint()
        texts.append(graph_text(graph_module))
        return graph_module

    copies = [x.clone() for x in tensors]
    if dynamic:
        torch._dynamo.mark_dynamic(tensors[0], 1)
        torch._dynamo.mark_dynamic(tensors[1], 0)
    with torch.no_grad():
        torch.manual_seed(0)
        result = torch.compile(step, backend=backend, fullgraph=True)(*tensors)
        torch.manual_seed(0)
        torch.testing.assert_close(result, step(*copies))
    assert len(reports) == 1
    return result, str(reports[0]), texts[0]


def test_a_layer_behind_its_last_write_runs_on_picked_rows() -> None:
    def layer(x_1TH: Tensor, cache_TH: Tensor, rows_R: Tensor, weight: Tensor) -> Tensor:
        cache_TH.copy_(x_1TH[0] * 2)
        attended = F.linear(cache_TH.view(T, 2, H // 2).unsqueeze(0).reshape(1, T, -1), weight)
        hidden = x_1TH + attended
        normed = weight[0] * hidden * (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        gate, up = cpu_linear(normed, weight), F.linear(normed, weight)
        return (hidden + F.silu(gate) * up).index_select(1, rows_R)

    _, report, text = run(layer, given(), torch.zeros(T, H), ROWS_R, WEIGHT)
    assert_expected_inline(
        report,
        """\
pick_rows_early: 1 changes
  index_select: of add_2 -> of l_cache_th_, l_x_1th_ (16 calls go row by row)""",
    )
    assert_expected_inline(
        renumbered(text),
        """\
l_cache_th_: input
l_x_1th_: input
l_weight_: input
l_rows_r_: input
%0 = getitem(l_x_1th_, 0)
%1 = mul(%0, 2)
%2 = copy_(l_cache_th_, %1)
%3 = getitem(l_weight_, 0)
%4 = aten::index_select(l_cache_th_, 0, l_rows_r_)
%5 = aten::reshape(%4, [-1, 2, 4])
%6 = aten::reshape(%5, [1, -1, 2, 4])
%7 = aten::reshape(%6, [1, -1, 8])
%8 = linear(%7, l_weight_)
%9 = aten::index_select(l_x_1th_, 1, l_rows_r_)
%10 = add(%9, %8)
%11 = mul(%3, %10)
%12 = pow(%10, 2)
%13 = mean(%12, -1, keepdim=True)
%14 = add(%13, 1e-06)
%15 = rsqrt(%14)
%16 = mul(%11, %15)
%17 = attnbackend::cpu_linear(%16, l_weight_)
%18 = linear(%16, l_weight_)
%19 = silu(%17)
%20 = mul(%19, %18)
%21 = add(%10, %20)
return [%21]""",
    )


ROW_BY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, WEIGHT),
    "cpu_linear": lambda x: cpu_linear(x, WEIGHT),
    "merged_linear": lambda x: merged_linear(x, [WEIGHT, WEIGHT], []),
    "a factor of its own": lambda x: x * GAIN + torch.ones(x.shape[1], 1),
    "conversion": lambda x: x.to(torch.float64).float(),
    "conversion to another's type": lambda x: x.half().to(WEIGHT).type_as(WEIGHT),
    "layer_norm": lambda x: F.layer_norm(x, (H,), GAIN),
    "softmax": lambda x: x.softmax(-1),
    "mean": lambda x: x.mean(2, keepdim=True) + x.sum(-1)[..., None],
    "heads": lambda x: (
        x.unflatten(2, (2, 4)).permute(0, 2, 1, 3).exp().transpose(1, 2).reshape(1, x.shape[1], H)
    ),
    "halves": lambda x: torch.cat([x[..., 4:], -x[..., :4]], -1),
    "parts": lambda x: x.chunk(2, -1)[0] * x.split([4, 4], -1)[1],
    "dropout while serving": lambda x: F.dropout(x, 0.5, False),
    "a transposed result": lambda x: (x.transpose(0, 2) * 2).transpose(0, 2),
}


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_what_goes_row_by_row_is_computed_of_picked_rows(name: str) -> None:
    def step(x: Tensor, rows_R: Tensor) -> Tensor:
        return ROW_BY_ROW[name](x + 1).index_select(1, rows_R)

    result, report, text = run(step, given(), ROWS_R.clone(), dynamic=True)
    assert "1 changes" in report, report
    assert set(re.findall(r"index_select\((\w+)", text)) <= {"l_x_", "ones"}, text
    assert result.is_contiguous()


def test_parts_of_what_is_wanted_whole_are_picked_of() -> None:
    def step(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        one, other = (x * 2).chunk(2, -1)
        return F.silu(one).index_select(1, rows), other

    _, report, text = run(step, given(), ROWS_R)
    assert "of one" in report, report
    assert text.count("index_select(") == 1


def _picked(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Any]:
    return lambda x, rows: function(x).index_select(1, rows)


def _kept(x: Tensor, rows: Tensor) -> Any:
    hidden = x * 2
    return hidden.index_select(1, rows), hidden


def _written(x: Tensor, rows: Tensor) -> Any:
    hidden = x * 2
    x.add_(1)
    return hidden.index_select(1, rows)


def _used(x: Tensor, rows: Tensor) -> Any:
    return (x * 2).index_select(1, rows) + 1


LEFT: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "running sum": (_picked(lambda x: x.cumsum(1)), "cumsum is cumsum, which may mix rows"),
    "attention": (_picked(lambda x: x @ x.mT @ x), "matmul_1 is matmul, which may mix rows"),
    "softmax over rows": (_picked(lambda x: x.softmax(1)), "softmax mixes rows: it is over dimension 1"),
    "norm over rows": (_picked(lambda x: F.layer_norm(x, (T, H))), "they lie in its 2 last dimensions"),
    "rows that are merged": (
        _picked(lambda x: x.view(1, T // 2, 2 * H)),
        "has rows that are no rows of l_x_",
    ),
    "rows joined": (_picked(lambda x: torch.cat([x, x], 1)), "cat mixes rows: it is over dimension 1"),
    "random numbers": (_picked(lambda x: F.dropout(x, 0.5)), "dropout draws random numbers"),
    "rows by the same rows": (
        lambda x, rows: F.linear(y := x[0] * 2, y).index_select(0, rows),
        "takes all rows of y beside the one",
    ),
    "one row for all": (
        lambda x, rows: (x[:, :1] * 2).index_select(1, rows * 0),
        "has no rows, or one for all",
    ),
    "another reader": (_kept, "output reads all rows of hidden"),
    "a write behind it": (_written, "writes memory"),
    "not returned": (_used, "0 changes"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_may_not_move_stays_and_says_why(name: str) -> None:
    step, reason = LEFT[name]
    _, report, text = run(step, given(), torch.tensor([2, 0, 1]))
    assert "0 changes" in report, report
    assert reason in report
    assert text.count("index_select(") == 1


@pytest.mark.parametrize("name", [*ZOO, "deepseek_v3"])
def test_models_behind_their_last_layer_go_row_by_row(name: str) -> None:
    served = TransformersModel(make_model(name) if name in ZOO else make_latent_model(name))
    layers = _decoder_layers(served._modules, served.model)
    reason = why_not_picked(layers, served._logits_of, served.device)
    assert reason == {"gemma3n_text": "ValueError: rows are no tokens of [2, 1, 5, 64]"}.get(name)


class _Mixes(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) - x.mean(1, keepdim=True)


def test_a_model_that_mixes_rows_behind_its_last_layer_is_served_as_before() -> None:
    model = make_model("llama")
    model.model.norm = _Mixes(model.model.norm)
    served = TransformersModel(model)
    layers = _decoder_layers(served._modules, model)
    reason = why_not_picked(layers, served._logits_of, served.device)
    assert reason == "what follows the last layer does not go row by row"
    reason = why_not_picked(layers[::-1], served._logits_of, served.device)
    assert reason == "its layers do not run once each, in order"


def test_no_number_of_wanted_rows_is_compiled_for_while_an_engine_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = partial(make_compiler, compiler="aot_eager")
    monkeypatch.setattr(transformers_models, "make_compiler", compiler)
    engine = Engine(make_model("llama"), num_blocks=40, max_num_seqs=4, max_num_batched_tokens=24)
    compiled = engine.runner.model.compiler  # type: ignore[attr-defined]
    before = compiled.num_graphs
    for lengths in ([5], [20], [9, 7], [8, 3, 7, 2], [30, 1]):
        engine.generate([[7] * length for length in lengths], SamplingParams(max_tokens=3))
    assert compiled.num_graphs == before


_STEPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b * 0.5,
    lambda a, b: F.silu(a) * b,
    lambda a, b: F.linear(a, WEIGHT),
    lambda a, b: torch.cat([b[..., 4:], a[..., :4]], -1),
    lambda a, b: a * (b.pow(2).mean(-1, keepdim=True) + 1).rsqrt(),
    lambda a, b: a.view(T, H).unsqueeze(0) * GAIN,
    lambda a, b: a.unflatten(-1, (2, 4)).transpose(1, 2).softmax(-1).transpose(1, 2).reshape(1, T, H),
    lambda a, b: torch.cat(a.split([2, 6], -1)[::-1], -1),
    lambda a, b: a.cumsum(1) * 0.1,
    lambda a, b: a.roll(1, 1),
    lambda a, b: a + b.mean(1, keepdim=True),
    lambda a, b: torch.where(a[..., :1] > 0, a, b),
    lambda a, b: a.mul_(0.5),
    lambda a, b: F.linear(a, a[0] * 0.1).sum(-1, keepdim=True) + b,
    lambda a, b: a[:, :1] + torch.zeros_like(b),
]


@pytest.mark.parametrize("seed", range(8))
def test_random_computations_keep_their_meaning(seed: int) -> None:
    choose = random.Random(seed)
    steps = [(choose.choice(_STEPS), choose.random(), choose.random()) for _ in range(9)]
    returned, dim = choose.random() < 0.3, choose.choice((1, 1, 1, 2))

    def step(x: Tensor, rows: Tensor) -> Any:
        values = [x * 1, x + 1]
        for call, one, other in steps:
            recent = values[-3:]
            values.append(call(recent[int(one * len(recent))], recent[int(other * len(recent))]))
        result = values[-1].index_select(dim, rows)
        return (result, values[-2]) if returned else result

    run(step, given(seed), ROWS_R)
