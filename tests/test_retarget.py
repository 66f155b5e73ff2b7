"""Another backend for graphs and compiled models, without tracing again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from test_pass_manager import exported
from toy_models import Stack, caches, make_stack, random_batch, reset_caches

import attnbackend
from attnbackend import compile_layers
from attnbackend.backends import cpu_attn, torch_sdpa
from attnbackend.fx_passes import PassManager, SelectBackend, graph_text, retarget
from attnbackend.native_calls import python_only

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Which implementation ran, and what. TORCH_SDPA has no writer of its own: the one before it stays."""
    seen: Counter[str] = Counter()

    def watch(cls: type, name: str, label: str) -> None:
        inner = getattr(cls, name)

        def run(*args: object) -> None:
            seen[label] += 1
            inner(*args)

        monkeypatch.setattr(cls, name, run)

    watch(cpu_attn.CPUAttentionImpl, "forward", "CPU forward")
    watch(cpu_attn.CPUAttentionImpl, "kv_cache_update", "CPU write")
    watch(torch_sdpa.TorchSDPAImpl, "forward", "SDPA forward")
    with python_only():
        yield seen


def eager(stack: Stack) -> torch.Tensor:
    reset_caches(stack)
    return stack(*random_batch(1))


def whole(stack: Stack) -> tuple[Callable[..., torch.Tensor], object]:
    compiled = attnbackend.compile(
        stack, backend="CPU_ATTN", compiler="aot_eager", fullgraph=True, dynamic=True
    )
    return compiled, compiled


def layer_by_layer(stack: Stack) -> tuple[Callable[..., torch.Tensor], object]:
    own = compile_layers(
        list(stack.layers), backend="CPU_ATTN", compiler="aot_eager", fullgraph=True, dynamic=True
    )
    return stack, own


@pytest.mark.parametrize("how", [whole, layer_by_layer])
def test_compiled_code_runs_on_another_backend(how: Callable, calls: Counter[str]) -> None:  # type: ignore[type-arg]
    stack = make_stack(num_layers=2)
    expected = eager(stack)
    calls.clear()
    run, handle = how(stack)
    reset_caches(stack)
    run(*random_batch(1))
    assert calls == {"CPU forward": 2, "CPU write": 2}
    changes = retarget(handle, "TORCH_SDPA")
    assert {change.after for change in changes} == {"TORCH_SDPA"}
    calls.clear()
    reset_caches(stack)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(run(*random_batch(1)), expected, rtol=1e-5, atol=1e-6)
    assert calls == {"SDPA forward": 2, "CPU write": 2}
    assert all(not cache[1:].isnan().all() for cache in caches(stack))
    retarget(handle, "CPU_ATTN")
    calls.clear()
    run(*random_batch(1))
    assert calls == {"CPU forward": 2, "CPU write": 2}


def test_what_is_compiled_later_is_retargeted_too(calls: Counter[str]) -> None:
    compiled, _ = whole(make_stack(num_layers=1))
    compiled(*random_batch(1))
    retarget(compiled, "TORCH_SDPA")
    calls.clear()
    compiled(*random_batch(1, 1))  # another graph: one token
    assert compiled.attnbackend_compiler.num_graphs == 2
    assert calls == {"SDPA forward": 1, "CPU write": 1}
    assert "all of these run on TORCH_SDPA" in str(compiled.attnbackend_compiler)


def test_other_models_stay_where_they_are(calls: Counter[str]) -> None:
    (one, _), (other, _) = whole(make_stack(1)), whole(make_stack(1))
    for compiled in (one, other):
        compiled(*random_batch(1))
    retarget(one, "TORCH_SDPA")
    calls.clear()
    other(*random_batch(1))
    assert set(calls) == {"CPU forward", "CPU write"}


@pytest.mark.parametrize("decompose", [False, True], ids=["as_traced", "functionalised"])
def test_a_graph_is_retargeted(decompose: bool) -> None:
    program = exported(num_layers=2, decompose=decompose)
    PassManager([SelectBackend("CPU_ATTN")]).run_on(program)
    other = graph_text(program.graph_module).replace("cpu_attn_forward", "torch_sdpa_forward")
    changes = retarget(program, "TORCH_SDPA")
    assert len(changes) == 2
    assert graph_text(program.graph_module) == other
    assert not retarget(program.graph_module, "TORCH_SDPA")
    stack = make_stack(2)
    torch.testing.assert_close(program.module()(*random_batch(1)), eager(stack), rtol=1e-5, atol=1e-6)


def test_agnostic_ops_are_retargeted_to() -> None:
    assert [(c.before, c.after) for c in retarget(exported(), "CPU_ATTN")] == [
        ("attnbackend::kv_cache_update", "attnbackend::cpu_attn_kv_cache_update"),
        ("attnbackend::attention", "attnbackend::cpu_attn_forward"),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FLASHINFER", r"nothing was changed:(.|\n)*attention(_default)?: device_type=cpu"),
        ("NO_SUCH", "NO_SUCH"),
        ("OTHER_SHAPE", r"its cache has shape \(2, 16, 2, 2, 32\) where the graph's has \(2, 2, 16, 2, 32\)"),
    ],
)
def test_a_backend_that_cannot_take_over_is_refused_and_nothing_changes(
    name: str, message: str, calls: Counter[str]
) -> None:
    class OtherShape(torch_sdpa.TorchSDPABackend):
        @staticmethod
        def get_name() -> str:
            return "OTHER_SHAPE"

        @staticmethod
        def get_kv_cache_shape(
            n: int, size: int, heads: int, head_size: int, dtype: str = "auto"
        ) -> tuple[int, ...]:
            return (n, size, 2, heads, head_size)

    with attnbackend.registry_scope():
        attnbackend.register_backend("OTHER_SHAPE")(OtherShape)
        compiled, _ = whole(make_stack(1))
        compiled(*random_batch(1))
        program = exported()
        before = graph_text(program.graph_module)
        for target in (compiled, program):
            with pytest.raises(ValueError, match=message):
                retarget(target, name)
        assert graph_text(program.graph_module) == before
        calls.clear()
        compiled(*random_batch(1))
        assert set(calls) == {"CPU forward", "CPU write"}


def test_other_things_cannot_be_retargeted() -> None:
    with pytest.raises(TypeError, match=r"expected a GraphModule, an ExportedProgram"):
        retarget(torch.compile(torch.nn.Linear(2, 2)), "TORCH_SDPA")


def rotate(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x) @ x


def latent(*given: torch.Tensor) -> None:
    torch.ops.attnbackend.mla_kv_cache_update(*given)


def without_attention() -> list[tuple[object, str]]:
    """What has no attention that could go elsewhere, and what is found there instead."""
    square = torch.ones(2, 2)
    given = (torch.ones(2, 8), torch.ones(2, 4), torch.ones(3, 16, 12), torch.arange(2))
    graph = torch.fx.symbolic_trace(rotate)
    program = torch.export.export(module_of(latent), given).run_decompositions()
    compiled = attnbackend.compile(rotate, compiler="eager")
    compiled(square)
    own = compile_layers([layer := module_of(rotate)], compiler="eager")
    layer(square)
    return [
        (graph, "2 x matmul, 1 x relu"), (torch.fx.GraphModule({}, torch.fx.Graph()), "none at all"),
        (program, "1 x attnbackend::mla_kv_cache_update"), (compiled, "2 x matmul, 1 x relu"),
        (own, "2 x matmul, 1 x relu"),
    ]  # fmt: skip


def module_of(function: Callable[..., object]) -> torch.nn.Module:
    module = torch.nn.Module()
    module.forward = function  # type: ignore[method-assign]
    return module


def test_what_has_no_attention_is_refused_with_what_it_has() -> None:
    for target, found in without_attention():
        with pytest.raises(ValueError, match=r"looked for attnbackend::attention, .*found none") as raised:
            retarget(target, "TORCH_SDPA")
        assert found in str(raised.value)
        assert "retargeted" not in str(getattr(target, "attnbackend_compiler", ""))


def test_what_is_not_compiled_yet_is_retargeted(calls: Counter[str]) -> None:
    compiled, _ = whole(make_stack(num_layers=1))
    assert not retarget(compiled, "TORCH_SDPA")
    calls.clear()
    compiled(*random_batch(1))
    assert calls == {"SDPA forward": 1, "CPU write": 1}


def test_graphs_inside_of_a_graph_are_retargeted() -> None:
    program = exported()
    graph = torch.fx.Graph()
    graph.output(graph.call_module("inner"))
    outer = torch.fx.GraphModule({"inner": program.graph_module}, graph)
    assert len(retarget(outer, "CPU_ATTN")) == 2
    assert "cpu_attn_forward" in program.graph_module.code


def test_retargeting_takes_less_than_a_tenth_of_compiling() -> None:
    """Even of the quickest compilation there is; `benchmarks/compile_time.py` has Inductor's figures."""
    stack = make_stack(num_layers=8)
    compiled, _ = whole(stack)
    started = time.perf_counter()
    compiled(*random_batch(1))
    compiling = time.perf_counter() - started
    started = time.perf_counter()
    retarget(compiled, "TORCH_SDPA")
    assert time.perf_counter() - started < compiling / 10
