"""Queries that become float8 in the graph, for backends whose ops would make them so.

Shape legend: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graph_lines import renumbered
from torch import Tensor

import attnbackend
from attnbackend import ops
from attnbackend.backends.torch_sdpa import TorchSDPABackend
from attnbackend.fx_passes import (
    GraphPass,
    PassManager,
    PassReport,
    QuantizeQueries,
    SelectBackend,
    UndoFunctionalization,
    graph_text,
)

T, H, K, D = 4, 4, 2, 32
E4M3 = torch.float8_e4m3fn
pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def _sdpa_quantises_its_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FLASH_ATTN says of itself, which only runs on a GPU."""
    kinds = {"fp8": E4M3}
    monkeypatch.setattr(TorchSDPABackend, "query_dtype", classmethod(lambda cls, name: kinds.get(name)))


def attend(q: Tensor, k: Tensor, cache: Tensor, kv_cache_dtype: str = "fp8", **options: Any) -> Tensor:
    """Two requests of three and one tokens."""
    given = {"key": k, "value": k, "output": torch.empty_like(k.repeat_interleave(H // K, 1))} | options
    starts, lens = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([20, 9], dtype=torch.int32)
    table = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    key, value, out = (given.pop(name) for name in ("key", "value", "output"))
    ops.attention(
        q, key, value, cache, out, starts, lens, table, scale=0.2, kv_cache_dtype=kv_cache_dtype, **given
    )
    return out


def given(fp8: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    cache = torch.randn(4, 2, 16, K, D)
    return [torch.randn(T, H, D) * 300, torch.randn(T, K, D), cache.to(E4M3) if fp8 else cache]


def step(q: Tensor, k: Tensor, cache: Tensor) -> Tensor:
    return attend(q * 2, k, cache)


def run(step: Any, tensors: list[Tensor], *passes: GraphPass) -> tuple[Tensor, str, str]:
    """Result, report of the pass, graph after it."""
    seen: list[str] = []

    class Look(GraphPass):
        name = "look"
        stage = QuantizeQueries.stage

        def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
            seen.append(graph_text(graph_module))
            return PassReport(self.name)

    all_passes = [*passes, QuantizeQueries(), Look()]
    compiled: Any = attnbackend.compile(step, passes=all_passes, compiler="aot_eager", fullgraph=True)
    result = compiled(*tensors)
    reports = compiled.attnbackend_compiler.reports
    return result, str(next(r for r in reports if r.pass_name == "quantize_queries")), seen[0]


def test_the_query_is_quantised_in_the_graph() -> None:
    q, k, cache = given()
    with attnbackend.set_config(backend="TORCH_SDPA"):
        expected = attend((q * 2).clamp(-448, 448).to(E4M3), k, cache)
        unlike = attend(q * 2, k, cache)
    actual, report, text = run(step, [q, k, cache], SelectBackend("TORCH_SDPA"))
    assert "1 changes" in report, report
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, unlike), "rounding the query changes nothing: a weak test"
    assert bool((q * 2).abs().max() > 448), "nothing saturates: a weak test"
    assert_expected_inline(
        "\n".join(renumbered(text).splitlines()[-5:]),
        """\
%5 = tensor([[1, 2], [3, 0]], dtype=torch.int32)
%6 = aten::clamp(%0, -448.0, 448.0)
%7 = aten::_to_copy(%6, dtype=torch.float8_e4m3fn)
%8 = attnbackend::torch_sdpa_forward(%7, l_k_, l_k_, l_cache_, !%2, %3, %4, %5, scale=0.2, kv_cache_dtype='fp8')
return [%2]""",
    )


def test_what_is_left_alone_with_the_reason() -> None:
    def model_type(q: Tensor, k: Tensor, cache: Tensor) -> Tensor:
        return attend(q, k, cache, "auto")

    def stored(q: Tensor, k: Tensor, cache: Tensor) -> Tensor:
        return attend(q.to(E4M3), k, cache)

    def quantised(q: Tensor, k: Tensor, cache: Tensor) -> Tensor:
        """Neither key nor output is of the model's type; an argument that is None is none."""
        out = torch.empty(T, H, D, dtype=E4M3)
        scales = torch.empty(T, H * D // 16)
        attend(q, k, cache, key=None, value=None, output=out, output_scale=None, output_block_scale=scales)
        return out

    _, report, _ = run(quantised, given(), SelectBackend("TORCH_SDPA"))
    assert "neither key nor output" in report, report
    _, report, _ = run(model_type, given(fp8=False), SelectBackend("TORCH_SDPA"))
    assert "TORCH_SDPA takes queries as they are for a cache of 'auto'" in report, report
    _, report, _ = run(stored, given(), SelectBackend("TORCH_SDPA"))
    assert "the query is quantised already" in report, report
    with attnbackend.set_config(backend="TORCH_SDPA"):
        _, report, _ = run(step, given())
    assert "run SelectBackend first" in report, report
    assert QuantizeQueries().run(_functionalised()).near_misses[0].reasons[0].startswith("the call is inside")


def test_a_backend_that_takes_no_such_query_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchSDPABackend, "supports_quantized_query", False)
    with attnbackend.registry_scope():
        _, report, _ = run(step, given(), SelectBackend("TORCH_SDPA"))
    assert "TORCH_SDPA: has_quantized_query=True (allowed: False" in report, report


class Module(torch.nn.Module):
    def forward(self, *args: Any) -> Any:
        return step(*args)


def _functionalised() -> torch.fx.GraphModule:
    with attnbackend.set_config(backend="TORCH_SDPA"):
        return torch.export.export(Module(), tuple(given())).run_decompositions().graph_module


def test_an_undone_program_is_rewritten() -> None:
    with attnbackend.set_config(backend="TORCH_SDPA"):
        program = torch.export.export(Module(), tuple(given())).run_decompositions()
    passes = [UndoFunctionalization(), SelectBackend("TORCH_SDPA"), QuantizeQueries()]
    reports = PassManager(passes).run_on(program)
    assert len(reports[-1].changes) == 1, reports
    q, k, cache = given()
    with attnbackend.set_config(backend="TORCH_SDPA"):
        expected = attend((q * 2).clamp(-448, 448).to(E4M3), k, cache)
    assert torch.equal(program.module()(q, k, cache), expected)


def test_which_backends_ask_for_it() -> None:
    flash, triton = (attnbackend.resolve_backend(name) for name in ("FLASH_ATTN", "TRITON_ATTN"))
    assert flash.query_dtype("fp8_e4m3") is E4M3
    assert flash.query_dtype("auto") is triton.query_dtype("fp8") is None
    both = attnbackend.resolve_backend("FLASH_ATTN+TRITON_ATTN")
    assert both.query_dtype("fp8") is None, "one of its two parts takes queries as they are"
