"""The engine on graphs: the tokens of the path without, over growing, shrinking and mixed batches.

On a CPU a stand-in takes the place of CUDA's graphs: it sees what a graph would, and nothing else.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from latent_zoo import make_latent_model
from model_zoo import make_model
from random_serving import logits_of_all_steps
from torch import Tensor

from attnbackend import AttentionCGSupport, CUDAGraphMode, Engine, SamplingParams, registry_scope
from attnbackend.backend import AttentionBackend
from attnbackend.backends.standard import BatchMetadataBuilder
from attnbackend.compiler import make_compiler
from attnbackend.cudagraph import RecordedGraphs
from attnbackend.fx_passes import PickRowsEarly
from attnbackend.integrations import transformers as transformers_models
from attnbackend.metadata import CommonAttentionMetadata
from attnbackend.ops import cpu_linear
from attnbackend.registry import register_backend, resolve_backend
from attnbackend.runtime.engine_core import EngineCore
from attnbackend.runtime.model_runner import build_runner
from attnbackend.runtime.step_graphs import GraphOptions
from attnbackend.testing.conformance.honest import HonestBackend, HonestBuilder, HonestImpl, Places

DECODE_ONLY = CUDAGraphMode.FULL_DECODE_ONLY
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def backend_of(
    level: AttentionCGSupport, builder: type[HonestBuilder] = HonestBuilder
) -> type[AttentionBackend]:
    """The honest backend with a builder of this support."""

    class Builder(builder):  # type: ignore[misc,valid-type]
        cudagraph_support = level

    class Backend(HonestBackend):
        @staticmethod
        def get_name() -> str:
            return f"HONEST_{level.name}"

        @staticmethod
        def get_builder_cls() -> type[HonestBuilder]:
            return Builder

    return Backend


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama").to(DEVICE)


def row_by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    result = x.new_empty(*x.shape[:-1], len(weight))
    for row, place in zip(x.reshape(-1, x.shape[-1]), result.view(-1, len(weight)), strict=True):
        place.copy_(torch.nn.functional.linear(row, weight, bias))
    return result


@pytest.fixture(autouse=True)
def scope(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of few rows round otherwise than those of more, and graphs pad batches: each row by itself."""
    monkeypatch.setattr(cpu_linear, "_tell", lambda used: None)
    monkeypatch.setattr(cpu_linear, "F", SimpleNamespace(linear=row_by_row, silu=torch.nn.functional.silu))
    with registry_scope():
        yield


def serve(
    model: Any, backend: str, mode: CUDAGraphMode | None, compile: bool = False, recorded: bool = not ON_GPU,
    **options: Any,
) -> EngineCore:  # fmt: skip
    library = (lambda device: RecordedGraphs()) if recorded else None
    runner = build_runner(
        model, backend=backend, num_blocks=60, max_num_seqs=6, max_num_batched_tokens=24, compile=compile,
        graphs=GraphOptions(mode=mode, library=library, **options),
    )  # fmt: skip
    return EngineCore(
        runner, max_num_seqs=6, max_num_batched_tokens=24, eos_token_ids=(), async_scheduling=False
    )


def without_graphs(model: Any, backend: str, mode: CUDAGraphMode, **options: Any) -> EngineCore:
    """An engine whose steps run without graphs; on a GPU padded as for them, since products of another size
    round otherwise."""
    if ON_GPU:
        return serve(model, backend, mode, recorded=True, **options)
    return serve(model, backend, CUDAGraphMode.NONE, **options)


NEVER, SINGLE, UNIFORM, ALWAYS = AttentionCGSupport
KINDS = {
    CUDAGraphMode.PIECEWISE: {"pieces"},
    CUDAGraphMode.FULL: {"decode", "mixed"},
    CUDAGraphMode.FULL_DECODE_ONLY: {"decode"},
    CUDAGraphMode.FULL_AND_PIECEWISE: {"decode", "pieces"},
}
LEVELS_AND_MODES = [
    (NEVER, CUDAGraphMode.PIECEWISE),
    (ALWAYS, CUDAGraphMode.FULL),
    *((level, mode) for level in (SINGLE, UNIFORM, ALWAYS) for mode in KINDS if mode.name != "FULL"),
]


LAZY = [(*case, case == (ALWAYS, CUDAGraphMode.FULL_AND_PIECEWISE)) for case in LEVELS_AND_MODES]


@pytest.mark.parametrize(("level", "mode", "lazy"), LAZY)
def test_logits_from_graphs_are_those_without_bit_for_bit(
    model: Any, level: AttentionCGSupport, mode: CUDAGraphMode, lazy: bool
) -> None:
    name = register_backend(backend_of(level).get_name())(backend_of(level)).get_name()
    without = logits_of_all_steps(without_graphs(model, name, mode), seed=1)
    engine = serve(model, name, mode, lazy=lazy)
    graphs = engine.runner.graphs  # type: ignore[attr-defined]
    with_graphs = logits_of_all_steps(engine, seed=1)
    assert [rows for rows, _ in with_graphs] == [rows for rows, _ in without]
    for (_, got), (_, wanted) in zip(with_graphs, without, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    stats = graphs.stats()
    assert stats.keys() == KINDS[mode]
    assert min(stats.values()) > 3


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "FLEX_ATTENTION"])
def test_pieces_run_attention_with_the_plan_of_the_step(model: Any, backend: str) -> None:
    """These backends loop over lengths that they have on the host: no graph could hold them."""
    without = logits_of_all_steps(without_graphs(model, backend, CUDAGraphMode.PIECEWISE), seed=4)
    engine = serve(model, backend, CUDAGraphMode.PIECEWISE)
    in_pieces = logits_of_all_steps(engine, seed=4)
    for (_, got), (_, wanted) in zip(in_pieces, without, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert engine.runner.graphs.stats().keys() == {"pieces"}  # type: ignore[attr-defined]


def test_compiled_layers_are_captured_in_pieces(
    model: Any, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    """Each decoder layer is cut in two pieces, and both layers share them.

    Padding may change how many tokens are picked as queries, and with that how their sums are rounded.
    """
    monkeypatch.setattr(transformers_models, "PickRowsEarly", partial(PickRowsEarly, picks_queries=False))
    monkeypatch.setattr(transformers_models, "make_compiler", partial(make_compiler, compiler="aot_eager"))
    without = logits_of_all_steps(
        without_graphs(model, "TORCH_SDPA", CUDAGraphMode.PIECEWISE, compile=True), seed=5
    )
    engine = serve(model, "TORCH_SDPA", CUDAGraphMode.PIECEWISE, compile=True)
    compiler = engine.runner.model.compiler  # type: ignore[attr-defined]
    assert compiler.pieces.num_pieces == compiler.pieces.num_compiled == 2 * compiler.num_graphs > 0
    in_pieces = logits_of_all_steps(engine, seed=5)
    for (_, got), (_, wanted) in zip(in_pieces, without, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert not compiler.pieces.left_whole


@pytest.mark.parametrize("mode", KINDS)
def test_replays_are_held_against_the_path_without_graphs(model: Any, mode: CUDAGraphMode) -> None:
    register_backend("HONEST_ALWAYS")(backend_of(ALWAYS))
    without = logits_of_all_steps(without_graphs(model, "HONEST_ALWAYS", mode), seed=6)
    checked = logits_of_all_steps(serve(model, "HONEST_ALWAYS", mode, debug=True), seed=6)
    for (_, got), (_, wanted) in zip(checked, without, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_mixed_batches_of_a_composition_run_from_whole_graphs_unsplit(model: Any) -> None:
    """Where they are not split, sums of fewer tokens are rounded otherwise."""
    register_backend("HONEST_ALWAYS")(backend_of(ALWAYS))
    name = "HONEST_ALWAYS+HONEST_ALWAYS"
    without = logits_of_all_steps(without_graphs(model, name, CUDAGraphMode.FULL), seed=6)
    engine = serve(model, name, None, debug=True)
    for (rows, got), (wanted_rows, wanted) in zip(logits_of_all_steps(engine, seed=6), without, strict=True):
        assert rows == wanted_rows
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert engine.runner.graphs.stats().keys() == KINDS[CUDAGraphMode.FULL]  # type: ignore[attr-defined]


class LengthsOfTheHost(HonestImpl):
    """Takes lengths from the host, as they were at capture."""

    def places(self, batch: CommonAttentionMetadata, num_tokens: int) -> Places:
        assert batch.seq_lens_cpu is not None
        then = batch.seq_lens_cpu.to(batch.seq_lens.device)
        return super().places(batch.replace(seq_lens=then), num_tokens)


class AllOfTheTable(HonestImpl):
    """Lets the padding of the block table into its answer."""

    def finish(self, out_THD: Tensor, *rest: Any) -> None:
        super().finish(out_THD + 1e-3 * self.table.sum(), *rest)

    def blocks(self, table_RW: Tensor, at: Places) -> Tensor:
        self.table = table_RW
        return super().blocks(table_RW, at)


@pytest.mark.parametrize("impl", [LengthsOfTheHost, AllOfTheTable])
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY])
def test_a_backend_that_a_graph_cannot_hold_is_found_out(
    model: Any, impl: type[HonestImpl], mode: CUDAGraphMode
) -> None:
    class Backend(backend_of(ALWAYS)):  # type: ignore[misc]
        @staticmethod
        def get_impl_cls() -> type[HonestImpl]:
            return impl

    register_backend("HONEST_ALWAYS")(Backend)
    # On a GPU, a copy from the host cannot even be captured.
    wrong = r"BatchDescriptor.* gives other logits .* requests \['r|capturing the graph of .* failed"
    with pytest.raises(RuntimeError, match=wrong):
        logits_of_all_steps(serve(model, "HONEST_ALWAYS", mode, debug=True), seed=6)


def test_what_was_captured_is_told_size_by_size(model: Any) -> None:
    register_backend("HONEST_ALWAYS")(backend_of(ALWAYS))
    report = serve(model, "HONEST_ALWAYS", CUDAGraphMode.FULL).runner.graphs.steps.report  # type: ignore[attr-defined]
    lines = str(report).splitlines()
    assert lines[0].split()[:4] == ["FULL", "mixed", "12", "tokens"]
    assert len(lines) == len(report.costs) + 1
    assert report.total == lines[-1]
    assert lines[-1].startswith(f"{len(report.costs)} graphs in ")
    assert report.seconds >= sum(cost.seconds for cost in report.costs) > 0


BY_LEVEL = {
    NEVER: CUDAGraphMode.PIECEWISE,
    SINGLE: CUDAGraphMode.FULL_AND_PIECEWISE,
    UNIFORM: CUDAGraphMode.FULL_AND_PIECEWISE,
    ALWAYS: CUDAGraphMode.FULL,
}


@pytest.mark.parametrize("level", AttentionCGSupport)
def test_left_open_the_mode_is_all_that_the_backend_lets_a_graph_hold(
    model: Any, level: AttentionCGSupport
) -> None:
    name = register_backend(backend_of(level).get_name())(backend_of(level)).get_name()
    engine = serve(model, name, None, lazy=True)
    assert engine.runner.graphs.dispatcher.mode is BY_LEVEL[level]  # type: ignore[attr-defined]


def test_graphs_are_captured_before_serving_and_only_then(model: Any) -> None:
    register_backend("HONEST_ALWAYS")(backend_of(AttentionCGSupport.ALWAYS))
    engine = serve(model, "HONEST_ALWAYS", None)
    graphs = engine.runner.graphs  # type: ignore[attr-defined]
    captured = len(graphs.steps.report.costs)
    assert captured == len(list(graphs.dispatcher.graphs()))
    logits_of_all_steps(engine, seed=2)
    assert len(graphs.steps.report.costs) == captured


def test_nothing_is_compiled_for_graphs_that_are_captured_while_serving(
    monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    """Layers with experts and without compile for many tokens and one, in decodes and other steps, and for a
    single request; the last for few rows too."""
    monkeypatch.setattr(transformers_models, "make_compiler", partial(make_compiler, compiler="aot_eager"))
    monkeypatch.setattr(resolve_backend("TORCH_MLA").get_builder_cls(), "cudagraph_support", SINGLE)
    model = make_latent_model("deepseek_v2_lite").to(DEVICE)
    engine = serve(model, "TORCH_MLA", None, compile=True, recorded=True, lazy=True)
    compiler = engine.runner.model.compiler  # type: ignore[attr-defined]
    assert compiler.num_graphs == 2 * 5 + 1
    logits_of_all_steps(engine, seed=2)
    assert engine.runner.graphs.stats().keys() == {"decode", "pieces"}  # type: ignore[attr-defined]
    assert compiler.num_graphs == 2 * 5 + 1


@pytest.mark.parametrize("limits", [(7, 24), (6, 32), (5, 24)])
def test_an_engine_of_other_limits_than_its_runner_s_is_refused(model: Any, limits: tuple[int, int]) -> None:
    register_backend("HONEST_ALWAYS")(backend_of(ALWAYS))
    runner = serve(model, "HONEST_ALWAYS", None, lazy=True).runner
    with pytest.raises(ValueError, match=r"the engine has max_num_.* and its runner was built for (6|24);"):
        EngineCore(runner, max_num_seqs=limits[0], max_num_batched_tokens=limits[1])


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_caches_go_with_their_engine(model: Any, mode: CUDAGraphMode) -> None:
    """Without a search for cycles, which nobody makes before the next engine asks for memory."""
    register_backend("HONEST_ALWAYS")(backend_of(ALWAYS))
    engine = serve(model, "HONEST_ALWAYS", mode)
    engine.generate([[5, 6, 7], [8] * 9], SamplingParams(max_tokens=3))
    caches = [weakref.ref(x) for x in engine.runner.kv_caches.values()]  # type: ignore[attr-defined]
    gc.disable()
    try:
        del engine
        assert [cache() for cache in caches] == [None] * len(caches)
    finally:
        gc.enable()


class NewTensors(HonestBuilder):
    """Makes its plan's tensors anew at each step."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        common = common_attn_metadata
        return super().build(0, common.replace(seq_lens=common.seq_lens.clone()))


def test_a_plan_in_new_memory_is_refused_by_name(model: Any) -> None:
    register_backend("HONEST_ALWAYS")(backend_of(AttentionCGSupport.ALWAYS, NewTensors))
    engine = serve(model, "HONEST_ALWAYS", None)
    with pytest.raises(RuntimeError, match=r"plan 0 of HONEST_ALWAYS.*seq_lens has address"):
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3))


@pytest.mark.parametrize("overrides", [False, True])
def test_replays_plan_anew_only_where_a_plan_is_more_than_the_batch(
    model: Any, monkeypatch: pytest.MonkeyPatch, overrides: bool
) -> None:
    built, build = 0, BatchMetadataBuilder.build

    def counted(*args: Any) -> Any:
        nonlocal built
        built += 1
        return build(*args)

    class OwnBuild(HonestBuilder):
        build = counted

    if not overrides:
        monkeypatch.setattr(BatchMetadataBuilder, "build", counted)
    register_backend("HONEST_ALWAYS")(backend_of(ALWAYS, OwnBuild if overrides else HonestBuilder))
    engine = serve(model, "HONEST_ALWAYS", None)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
    built = 0
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=9))
    assert built == (9 if overrides else 0)


def test_a_batch_in_other_memory_is_refused_by_name(model: Any) -> None:
    register_backend("HONEST_ALWAYS")(backend_of(ALWAYS))
    engine = serve(model, "HONEST_ALWAYS", None)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
    device = engine.input_batch.buffers.device
    device["seq_lens"] = device["seq_lens"].clone()
    with pytest.raises(RuntimeError, match=r"(?s)cannot be replayed: seq_lens has address"):
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3))


def test_a_mode_above_the_backend_s_support_is_refused(model: Any) -> None:
    register_backend("HONEST_UNIFORM_BATCH")(backend_of(AttentionCGSupport.UNIFORM_BATCH))
    with pytest.raises(ValueError, match=r"(?s)cudagraph_mode=FULL cannot.*HONEST_UNIFORM_BATCH has"):
        serve(model, "HONEST_UNIFORM_BATCH", CUDAGraphMode.FULL)


@pytest.mark.skipif(ON_GPU, reason="needs a machine without a GPU")
def test_a_mode_that_is_named_needs_a_gpu() -> None:
    model = make_model("llama")
    with pytest.raises(
        ValueError, match="cudagraph_mode=FULL_DECODE_ONLY needs a CUDA device; the model is on"
    ):
        Engine(model, cudagraph_mode="full_decode_only", compile=False)


def test_a_replaced_cache_is_noticed(model: Any) -> None:
    register_backend("HONEST_ALWAYS")(backend_of(AttentionCGSupport.ALWAYS))
    engine = serve(model, "HONEST_ALWAYS", None)
    caches = engine.runner.kv_caches  # type: ignore[attr-defined]
    name = next(iter(caches))
    caches[name] = caches[name].clone()
    with pytest.raises(RuntimeError, match=f"the cache of {name} has address"):
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=60))


@pytest.mark.parametrize("level", AttentionCGSupport)
def test_the_runner_says_why_not_every_step_runs_from_a_graph(model: Any, level: AttentionCGSupport) -> None:
    name = register_backend(backend_of(level).get_name())(backend_of(level)).get_name()
    reasons = [str(reason) for reason in serve(model, name, None).runner.graph_reasons]  # type: ignore[attr-defined]
    assert bool(reasons) == (level is not AttentionCGSupport.ALWAYS)
    assert all(f"{name} has {level.name}" in reason for reason in reasons)


def test_own_sizes_below_the_largest_batch_of_decodes_are_named(model: Any) -> None:
    register_backend("HONEST_ALWAYS")(backend_of(AttentionCGSupport.ALWAYS))
    with pytest.warns(UserWarning, match="decodes of 5 to 6 tokens run without a graph") as warned:
        runner = serve(model, "HONEST_ALWAYS", None, sizes=[1, 4]).runner  # type: ignore[attr-defined]
    assert [str(reason) for reason in runner.graph_reasons] == [str(warning.message) for warning in warned]


@pytest.mark.skipif(ON_GPU, reason="needs a machine without a GPU")
def test_without_a_gpu_the_device_is_the_reason(model: Any) -> None:
    (reason,) = build_runner(make_model("llama"), num_blocks=9, compile=False).graph_reasons
    assert str(reason) == "device=cpu (allowed: cuda, for graphs)"
