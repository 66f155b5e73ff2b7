"""SelectBackend on the graphs of Dynamo, export and Inductor, pinned before and after."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from toy_models import make_stack, random_batch, reset_caches

import attnbackend
from attnbackend import AttentionSelectorConfig, ops
from attnbackend.fx_passes import PassManager, SelectBackend, graph_text
from attnbackend.layers import BatchTensors

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _exported(features: dict[str, object] | None = None, decompose: bool = False):  # type: ignore[no-untyped-def]
    stack = make_stack(num_layers=1, **(features or {}))
    x, batch = random_batch(1)
    tokens = torch.export.Dim("tokens", min=2, max=512)
    dynamic = ({0: tokens}, BatchTensors({0: tokens}, None, None, None))  # type: ignore[arg-type]
    program = torch.export.export(stack, (x, batch), dynamic_shapes=dynamic)
    return stack, (program.run_decompositions() if decompose else program)


def _attention_lines(program) -> str:  # type: ignore[no-untyped-def]
    lines = graph_text(program.graph_module).splitlines()
    return "\n".join(line for line in lines if "attnbackend::" in line)


def test_the_graph_before_and_after() -> None:
    _, program = _exported()
    assert_expected_inline(
        _attention_lines(program),
        """\
kv_cache_update = attnbackend::kv_cache_update(view, view_1, !b_layers_0_attention_kv_cache, batch_slot_mapping)
attention = attnbackend::attention(view_2, view, view_1, b_layers_0_attention_kv_cache, !new_empty, batch_query_start_loc, batch_seq_lens, batch_block_table, scale=0.1767766952966369)""",
    )
    PassManager([SelectBackend("CPU_ATTN")]).run(program.graph_module)
    assert_expected_inline(
        _attention_lines(program),
        """\
kv_cache_update = attnbackend::cpu_attn_kv_cache_update(view, view_1, !b_layers_0_attention_kv_cache, batch_slot_mapping)
attention = attnbackend::cpu_attn_forward(view_2, view, view_1, b_layers_0_attention_kv_cache, !new_empty, batch_query_start_loc, batch_seq_lens, batch_block_table, scale=0.1767766952966369)""",
    )


@pytest.mark.parametrize("decompose", [False, True], ids=["as_traced", "functionalised"])
@pytest.mark.parametrize("backend", [None, "TORCH_SDPA", "CPU_ATTN"])
def test_an_exported_program_runs_on_the_selected_backend(backend: str | None, decompose: bool) -> None:
    stack, program = _exported(decompose=decompose)
    x, batch = random_batch(1)
    reset_caches(stack)
    expected = stack(x, batch)
    reports = PassManager([SelectBackend(backend)]).run(program.graph_module)
    assert {change.after for change in reports[0].changes} >= {
        f"attnbackend::{(backend or 'CPU_ATTN').lower()}_forward"
    }
    torch.testing.assert_close(program.module()(x, batch), expected, rtol=1e-5, atol=1e-6)


def test_the_number_of_cache_writes_never_changes() -> None:
    for decompose in (False, True):
        _, program = _exported(decompose=decompose)
        before = _attention_lines(program).count("kv_cache_update")
        PassManager([SelectBackend("TORCH_SDPA"), SelectBackend()]).run(program.graph_module)
        assert _attention_lines(program).count("kv_cache_update") == before > 0


def test_each_node_may_get_another_backend() -> None:
    def by_window(config: AttentionSelectorConfig) -> str | None:
        return "TORCH_SDPA" if config.sliding_window else None

    for window, expected in ((8, "torch_sdpa_forward"), (None, "cpu_attn_forward")):
        _, program = _exported({"sliding_window": window})
        PassManager([SelectBackend(by_window)]).run(program.graph_module)
        assert expected in _attention_lines(program)


@pytest.mark.parametrize("backend", [5, ["TORCH_SDPA"]], ids=repr)
def test_what_names_no_backend_is_refused_before_anything_is_traced(backend: Any) -> None:
    for make in (SelectBackend, partial(attnbackend.compile, torch.nn.Identity())):
        with pytest.raises(TypeError, match=r"backend=.* must be a name, such as 'TRITON_ATTN'"):
            make(backend=backend)


def test_a_graph_that_names_a_backend_already_is_left_alone() -> None:
    _, program = _exported()
    PassManager([SelectBackend("TORCH_SDPA")]).run(program.graph_module)
    before = graph_text(program.graph_module)
    (report,) = PassManager([SelectBackend("CPU_ATTN")]).run(program.graph_module)
    assert [change.after for change in report.changes] == ["attnbackend::cpu_attn_kv_cache_update"]
    assert graph_text(program.graph_module).replace("cpu_attn_kv_cache_update", "kv_cache_update") == before


def test_a_graph_without_attention_is_left_alone() -> None:
    graph_module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    (report,) = PassManager([SelectBackend()]).run(graph_module)
    assert report.changes == ()


def test_a_graph_without_fake_tensors_is_refused() -> None:
    graph = torch.fx.Graph()
    args = [graph.placeholder(name) for name in "qkvcosrt"]
    graph.call_function(ops.attention, tuple(args), {"scale": 1.0})
    graph.output(None)
    with pytest.raises(ValueError, match="carries neither 'val' nor 'example_value'"):
        PassManager([SelectBackend()]).run(torch.fx.GraphModule({}, graph))


def test_it_works_as_an_inductor_pass() -> None:
    import torch._inductor.config as inductor_config

    stack = make_stack(num_layers=1)
    x, batch = random_batch(2)
    expected = stack(x, batch)
    reset_caches(stack)
    manager = PassManager([SelectBackend("TORCH_SDPA")])
    with inductor_config.patch(post_grad_custom_pre_pass=manager.as_inductor_pass()):
        actual = torch.compile(stack, fullgraph=True)(x, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert "torch_sdpa_forward" in str(manager)


def test_export_saves_loads_and_runs(tmp_path) -> None:  # type: ignore[no-untyped-def]
    stack, program = _exported()
    reset_caches(stack)
    x, batch = random_batch(4)
    expected = stack(x, batch)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(loaded(x, batch), expected, rtol=1e-5, atol=1e-6)
