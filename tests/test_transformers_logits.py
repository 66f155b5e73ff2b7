"""Logits of served models against transformers' own eager attention, under the relative error rule.

One run serves prompts so that whole prefills, prefills in chunks, decodes and mixed batches all occur. The
rule compares with the same model in float64; the yardstick is its eager attention in float32. Mutants show
that each feature decides the logits.

Shape legend: L tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import gc
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from backend_claims import require_features
from model_zoo import CHUNK, WINDOW, ZOO, EagerReference, make_model
from op_cases import require
from served_logits import KINDS, judge, make_engine, serve

from attnbackend._torch_compat import compiled_call
from attnbackend.compiler import make_compiler
from attnbackend.integrations import transformers as integration


@cache
def model_and_reference(name: str) -> tuple[Any, EagerReference]:
    model = make_model(name)
    return model, EagerReference(model)


BACKENDS = [
    "TORCH_SDPA",
    "CPU_ATTN",
    "FLEX_ATTENTION",
    pytest.param("TRITON_ATTN", marks=pytest.mark.slow),  # interpreted
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ZOO)
def test_served_logits_equal_eager_ones_in_every_kind_of_batch(name: str, backend: str) -> None:
    require_features(backend, **ZOO[name].needs)
    model, reference = model_and_reference(name)
    served = serve(make_engine(model, backend))
    assert {row.kind for row in served.rows} == KINDS
    assert max(served.chunks.values()) == 3
    assert set(judge(served, reference)) == KINDS


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_served_logits_equal_eager_ones_on_interpreted_triton(name: str) -> None:
    require("TRITON_ATTN", device_type="cpu")
    model, reference = model_and_reference(name)
    served = serve(make_engine(model, "TRITON_ATTN"), long=20, answer=2)
    assert {row.kind for row in served.rows} == KINDS
    assert set(judge(served, reference)) == KINDS


MUTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral without its window": ("mistral_window", {"sliding_window": None}),
    "mistral's window one too wide": ("mistral_window", {"sliding_window": WINDOW + 1}),
    "mistral's window one too narrow": ("mistral_window", {"sliding_window": WINDOW - 1}),
    "gemma2 without its windows": ("gemma2", {"sliding_window": None}),
    "gemma2 with a window in every layer": ("gemma2", {"sliding_window": WINDOW}),
    "gemma2 without its soft-cap": ("gemma2", {"logits_soft_cap": 0.0}),
    "gemma2's soft-cap 1% off": ("gemma2", {"logits_soft_cap": 3.03}),
    "gemma2 scaled by its head size": ("gemma2", {"scale": 32**-0.5}),
    "gpt_oss without its sinks": ("gpt_oss", {"sinks": None}),
    "gpt_oss without its windows": ("gpt_oss", {"sliding_window": None}),
    "llama's scale 0.1% off": ("llama", {"scale": 32**-0.5 * 1.001}),
    "llama4's chunks one too long": ("llama4_text", {"attention_chunk_size": CHUNK + 1}),
    "llama4's chunks one too short": ("llama4_text", {"attention_chunk_size": CHUNK - 1}),
    "llama4 without its chunks": ("llama4_text", {"attention_chunk_size": None}),
    "gemma3's windows one too narrow": ("gemma3_text", {"sliding_window": WINDOW - 1}),
    "granite scaled by its head size": ("granite", {"scale": 32**-0.5}),
}
_ONLY_WHERE_THERE_IS_ONE = ("llama4", "gemma3's")
"""Of chunks and windows: other layers stay as they are."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_rule_notices_a_feature_that_is_ignored_or_off(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, changed = MUTANTS[mutant]
    model, reference = model_and_reference(name)
    original = integration.write_and_attend

    def write_and_attend(*args: Any, **features: Any) -> Tensor:
        local = mutant.startswith(_ONLY_WHERE_THERE_IS_ONE)
        own = {key: x for key, x in changed.items() if not local or features[key] is not None}
        return original(*args, **(features | own))

    monkeypatch.setattr(integration, "write_and_attend", write_and_attend)
    with pytest.raises(AssertionError, match="ratio"):
        judge(serve(make_engine(model, "TORCH_SDPA")), reference)


def test_the_rule_notices_a_layer_that_reads_another_layer_s_cache_than_it_shares() -> None:
    model, reference = make_model("gemma3n_text"), model_and_reference("gemma3n_text")[1]
    engine = make_engine(model, "TORCH_SDPA")
    layers = [layer.self_attn for layer in model.model.layers]
    shared = layers[3].attnbackend_layer
    assert shared.kv_cache is layers[1].attnbackend_layer.kv_cache
    layers[3].attnbackend_layer = shared._replace(kv_cache=layers[0].attnbackend_layer.kv_cache)
    with pytest.raises(AssertionError, match="ratio"):
        judge(serve(engine), reference)


def test_the_rule_notices_positions_counted_from_a_token_s_place_in_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Llama 4 scales queries by their position, which its layers count from the cache's length."""
    monkeypatch.setattr(integration, "_cache_argument", lambda model: None)
    model, reference = model_and_reference("llama4_text")
    with pytest.raises(AssertionError, match="ratio"):
        judge(serve(make_engine(model, "TORCH_SDPA")), reference)


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("llama", "gemma2", "gpt_oss", "llama4_text", "gemma3n_text")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in ZOO
    ],
)
def test_compiled_models_give_the_same_logits(
    name: str, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:  # fmt: skip
    monkeypatch.setattr(integration, "make_compiler", partial(make_compiler, compiler="aot_eager"))
    model, reference = make_model(name), model_and_reference(name)[1]
    engine = make_engine(model, "TORCH_SDPA", compile=True)
    engine.runner.model.compile_ends("aot_eager")  # type: ignore[attr-defined]
    assert set(judge(serve(engine), reference)) == KINDS


def test_what_stands_beside_the_layers_is_compiled_for_served_batches_alone(fresh_compiler: None) -> None:
    graphs = []

    def counted(graph_module: Any, inputs: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    model = make_model("llama")
    engine = make_engine(model, "TORCH_SDPA")
    engine.runner.model.compile_ends(counted)  # type: ignore[attr-defined]
    model(torch.tensor([[3, 4, 5]]))
    assert not graphs
    serve(engine)
    assert 2 <= len(graphs) <= 4, "norm and angles, of one token and of several"
    del engine
    gc.collect()
    assert not any(compiled_call(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "CPU_ATTN"])
def test_a_model_compiled_by_inductor_gives_the_same_logits(backend: str, fresh_compiler: None) -> None:
    require(backend, device_type="cpu")
    model, reference = make_model("gemma2"), model_and_reference("gemma2")[1]
    served = serve(make_engine(model, backend, compile=True))
    assert set(judge(served, reference)) == KINDS
