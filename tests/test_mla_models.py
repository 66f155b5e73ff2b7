"""DeepSeek's models served with latent attention, held to transformers' own implementation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from latent_zoo import LATENT_ZOO, make_latent_model
from mla_op_cases import MLA_BACKENDS, require_mla
from model_zoo import EagerReference
from program_steps import greedy
from served_logits import KINDS, judge, make_engine, prompt, serve
from tiny_models import greedy_tokens

from attnbackend import Engine, SamplingParams, set_config
from attnbackend.backends.mla import common
from attnbackend.backends.mla.planning import plan_mla_step
from attnbackend.compiler import make_compiler
from attnbackend.fx_passes import graph_text
from attnbackend.integrations import latent_attention
from attnbackend.integrations import transformers as integration
from attnbackend.integrations.programs import ModelStep, export_model
from attnbackend.layers import MLAAttention
from attnbackend.mla_metadata import MLAMetadata


@cache
def model_and_reference(name: str) -> tuple[Any, EagerReference]:
    model = make_latent_model(name)
    return model, EagerReference(model)


@contextmanager
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MLAMetadata]]:
    """Every plan that is made, with so few context tokens at once that a context of 48 takes three chunks."""
    made: list[MLAMetadata] = []

    def record(*args: Any, **kwargs: Any) -> MLAMetadata:
        made.append(plan_mla_step(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(common, "plan_mla_step", record)
    with set_config(mla_context_tokens=16):
        yield made


@pytest.mark.parametrize("backend", MLA_BACKENDS)
@pytest.mark.parametrize("name", LATENT_ZOO)
def test_served_logits_equal_eager_ones_in_every_kind_of_batch(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_mla(backend, head_size=48, kv_lora_rank=32)
    model, reference = model_and_reference(name)
    with plans(monkeypatch) as made:
        served = serve(make_engine(model, backend), long=50)
    assert {row.kind for row in served.rows} == KINDS
    assert set(judge(served, reference)) == KINDS
    assert max(len(plan.prefill.chunks) for plan in made if plan.prefill) >= 3
    assert any(plan.prefill and plan.num_decodes for plan in made)
    assert any(plan.prefill is None for plan in made)


def test_served_logits_equal_eager_ones_on_interpreted_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    require_mla("TRITON_MLA", head_size=48, kv_lora_rank=32)
    model, reference = model_and_reference("deepseek_v3")
    with plans(monkeypatch), set_config(mla_prefill="TRITON"):
        served = serve(make_engine(model, "TRITON_MLA"), long=36, answer=2)
    assert set(judge(served, reference)) == KINDS


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v2", "deepseek_v3"])
def test_32_greedy_tokens_equal_transformers_own(name: str) -> None:
    model = make_latent_model(name, max_position_embeddings=256)
    prompts = [prompt(48, 1), prompt(3, 2), prompt(70, 3)]
    wanted = [greedy_tokens(model, p, 32) for p in prompts]
    with set_config(mla_context_tokens=16):
        engine = Engine(
            model, compile=False, num_blocks=40, max_num_seqs=3, max_num_batched_tokens=24, max_model_len=128
        )
        outputs = engine.generate(prompts, SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True))
    assert [output.token_ids for output in outputs] == wanted


def test_values_may_be_wider_than_keys() -> None:
    model = make_latent_model("deepseek_v3", v_head_dim=72, num_hidden_layers=1)
    wanted = greedy_tokens(model, prompt(20, 1), 6)
    engine = Engine(model, compile=False, num_blocks=12, max_num_batched_tokens=16, max_model_len=64)
    (output,) = engine.generate(
        [prompt(20, 1)], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    )
    assert output.token_ids == wanted


def test_compiled_models_give_the_same_logits(
    monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:  # fmt: skip
    monkeypatch.setattr(integration, "make_compiler", partial(make_compiler, compiler="aot_eager"))
    model, reference = make_latent_model("deepseek_v3"), model_and_reference("deepseek_v3")[1]
    with plans(monkeypatch):
        engine = make_engine(model, "TORCH_MLA", compile=True)
        served = serve(engine, long=50)
    assert set(judge(served, reference)) == KINDS
    text = str(engine.runner.model.compiler)  # type: ignore[attr-defined]
    assert "attnbackend::torch_mla_forward_mqa" in text
    assert "attnbackend::torch_mla_forward_mixed" in text


@pytest.mark.slow
def test_a_model_compiled_by_inductor_gives_the_same_tokens(fresh_compiler: None) -> None:
    model = make_latent_model("deepseek_v3", num_hidden_layers=1)
    wanted = greedy_tokens(model, prompt(20, 1), 8)
    engine = Engine(model, num_blocks=12, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    output, _ = engine.generate(
        [prompt(20, 1), prompt(5, 2)], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    )
    assert output.token_ids == wanted


def test_an_exported_model_gives_the_same_tokens_over_caches_that_it_is_given(fresh_compiler: None) -> None:
    model = make_latent_model("deepseek_v3")
    wanted = greedy_tokens(model, prompt(12, 1), 8)
    program = export_model(model, backend="TORCH_MLA")
    assert graph_text(program.graph_module).count("torch_mla_forward_mixed") == 2
    caches = ModelStep(model).new_caches(9)
    with set_config(mla_context_tokens=16):
        assert greedy(program.module(), prompt(12, 1), 8, caches) == wanted


def test_the_model_itself_goes_on_working_while_it_is_served_and_afterwards() -> None:
    model, reference = make_latent_model("deepseek_v2"), model_and_reference("deepseek_v2")[1]
    ids = prompt(12, 5)
    wanted = reference.logits(ids).eager
    attention = type(model.model.layers[0].self_attn)
    engine = make_engine(model, "TORCH_MLA")
    assert type(model.model.layers[0].self_attn) is not attention
    for served in (model, copy.deepcopy(model)):
        with torch.no_grad():
            own = served(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)
    assert type(copy.deepcopy(model).model.layers[0].self_attn) is attention
    assert not [name for name in model.state_dict() if "attnbackend" in name]
    engine.runner.model = None  # type: ignore[attr-defined]
    del engine
    assert type(model.model.layers[0].self_attn) is attention


@pytest.mark.parametrize("fault", ["scale", "rotary", "norm"])
def test_a_module_that_computes_something_else_is_refused(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another family's would that looks like DeepSeek's: here the layer is made to differ from it."""
    original = latent_attention._layer_of

    def layer_of(module: Any) -> MLAAttention:
        layer = original(module)
        if fault == "scale":
            layer.scale *= 1.5
        elif fault == "rotary":
            layer.interleaved = not layer.interleaved
        else:
            layer.kv_a_layernorm = nn.Identity()
        return layer

    monkeypatch.setattr(latent_attention, "_layer_of", layer_of)
    with pytest.raises(ValueError, match=r"cannot be served: .*computes something else: its output for two"):
        make_engine(make_latent_model("deepseek_v3"), "TORCH_MLA")


def test_a_module_that_treats_late_positions_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Mistral 4 scales its queries from the trained length on, which no prompt of two tokens shows."""
    model = make_latent_model("deepseek_v3")
    attention = type(model.model.layers[0].self_attn)
    original = attention.forward

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        factor = 1.0 + (kwargs["position_ids"] >= 100).to(hidden_states.dtype)
        return original(self, hidden_states * factor[..., None], *args, **kwargs)

    monkeypatch.setattr(attention, "forward", forward)
    with pytest.raises(ValueError, match=r"cannot be served: .*for two tokens at position 127, .*differs by"):
        make_engine(model, "TORCH_MLA")


def test_a_module_with_another_part_is_refused() -> None:
    """As the indexer of DeepSeek-V3.2 is one: with few tokens it selects all of them."""
    model = make_latent_model("deepseek_v3")
    model.model.layers[1].self_attn.indexer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"cannot be served: .*has indexer besides, which layers.MLAAtt"):
        make_engine(model, "TORCH_MLA")


def test_a_dense_backend_is_refused_for_a_latent_model_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"'TORCH_SDPA'.*cannot serve.*\n  use_mla=True \(allowed: False"):
        make_engine(make_latent_model("deepseek_v3"), "TORCH_SDPA")
