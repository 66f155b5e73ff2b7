"""`attn_implementation="attnbackend"` in transformers' own forward and generate, against eager attention."""

from __future__ import annotations

import copy
import weakref
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from backend_claims import require_features
from model_zoo import VOCAB_SIZE, WINDOW, ZOO, EagerReference, make_model
from op_cases import require
from transformers import AttentionMaskInterface

from attnbackend import Engine, SamplingParams, set_config
from attnbackend.compiler import make_compiler
from attnbackend.integrations import transformers as integration
from attnbackend.integrations.transformers import ATTN_IMPLEMENTATION, TransformersModel
from attnbackend.testing import assert_within_rule

BACKENDS = ("TORCH_SDPA", "CPU_ATTN")
LENGTHS = (5, 17, 11)


@cache
def eager_model(name: str) -> Any:
    return make_model(name)


@cache
def dense_model(name: str) -> Any:
    model = copy.deepcopy(eager_model(name))
    model.set_attn_implementation(ATTN_IMPLEMENTATION)
    return model


def padded_batch(*, left: bool, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """Prompts of several lengths, filled up with the padding token 0."""
    generator = torch.Generator().manual_seed(5)
    rows, masks, width = [], [], max(lengths)
    for length in lengths:
        tokens = torch.randint(3, VOCAB_SIZE, (length,), generator=generator)
        sides = (width - length, 0) if left else (0, width - length)
        rows.append(torch.nn.functional.pad(tokens, sides))
        masks.append(torch.nn.functional.pad(torch.ones_like(tokens), sides))
    return {"input_ids": torch.stack(rows), "attention_mask": torch.stack(masks)}


def generate(model: Any, **inputs: Any) -> list[list[int]]:
    tokens = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    return tokens[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ZOO)
def test_generate_gives_the_tokens_of_eager_attention_for_a_left_padded_batch(
    name: str, backend: str
) -> None:
    require_features(backend, **ZOO[name].needs)
    inputs = padded_batch(left=True)
    with set_config(backend=backend):
        assert generate(dense_model(name), **inputs) == generate(eager_model(name), **inputs)


def test_the_padded_batch_shows_a_mask_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = AttentionMaskInterface._global_mapping
    monkeypatch.setitem(masks, ATTN_IMPLEMENTATION, lambda **kwargs: None)
    inputs = padded_batch(left=True)
    assert generate(dense_model("llama"), **inputs) != generate(eager_model("llama"), **inputs)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral_window"])
def test_generate_gives_the_tokens_of_eager_attention_without_padding(name: str) -> None:
    inputs = padded_batch(left=True, lengths=(12, 12))
    with_mask = generate(dense_model(name), **inputs)
    assert with_mask == generate(eager_model(name), **inputs)
    assert generate(dense_model(name), input_ids=inputs["input_ids"]) == with_mask


@pytest.mark.parametrize("name", ZOO)
def test_logits_of_a_right_padded_batch_equal_those_of_its_sequences(name: str) -> None:
    """The yardstick is eager attention in the same batch: matrix products round by their shape."""
    inputs = padded_batch(left=False)
    logits = dense_model(name)(**inputs, use_cache=False).logits
    reference = EagerReference(eager_model(name))
    eager = reference.outputs("logits", **inputs).eager
    for row, length in enumerate(LENGTHS):
        exact = reference.logits(inputs["input_ids"][row, :length].tolist()).exact
        assert_within_rule(logits[row, :length], exact, eager[row, :length], what=f"logits of row {row}")


def test_a_cache_that_is_passed_on_gives_the_same_logits_in_parts() -> None:
    """The sliding layers' cache holds fewer tokens than were seen."""
    model, inputs = dense_model("gemma2"), padded_batch(left=True)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = model(**inputs, position_ids=positions).logits
    first = model(input_ids=ids[:, :9], attention_mask=mask[:, :9], position_ids=positions[:, :9])
    second = model(
        input_ids=ids[:, 9:], attention_mask=mask, position_ids=positions[:, 9:],
        past_key_values=first.past_key_values,
    )  # fmt: skip
    assert whole.shape[1] > 9 + WINDOW
    torch.testing.assert_close(
        second.logits[mask[:, 9:].bool()], whole[:, 9:][mask[:, 9:].bool()], rtol=1e-4, atol=1e-4
    )


def test_a_static_cache_is_refused_with_the_alternative() -> None:
    inputs = padded_batch(left=True)
    with pytest.raises(
        ValueError, match=r"static caches are not supported .use a DynamicCache, or attnbackend.Engine"
    ):
        generate(dense_model("llama"), **inputs, cache_implementation="static")


def test_output_attentions_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"output_attentions.*attn_implementation='eager'|eager.*output_attentions"
    ):
        dense_model("llama")(**padded_batch(left=True), output_attentions=True)


def test_dropout_is_refused_with_the_remedy() -> None:
    model = make_model("llama", attention_dropout=0.1).train()
    model.set_attn_implementation(ATTN_IMPLEMENTATION)
    with pytest.raises(ValueError, match=r"dropout=0\.1: .*model\.eval\(\)"):
        model(**padded_batch(left=True))


def test_training_is_refused_with_the_remedy() -> None:
    model = make_model("llama").train().requires_grad_(True)
    model.set_attn_implementation(ATTN_IMPLEMENTATION)
    with pytest.raises(RuntimeError, match=r"no backward.*torch\.inference_mode\(\) or torch\.no_grad\(\)"):
        model(**padded_batch(left=True))
    with torch.no_grad():
        assert model(**padded_batch(left=True)).logits.isfinite().all()


def test_sequences_packed_into_one_row_are_refused() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    with pytest.raises(ValueError, match=r"packed sequences.*padded batch"):
        dense_model("llama")(input_ids=torch.arange(3, 10)[None], position_ids=positions, use_cache=False)


def test_a_mask_of_four_dimensions_is_refused() -> None:
    mask = torch.zeros(1, 1, 7, 7)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 1, 7, 7\).*\[batch, tokens\]"):
        dense_model("llama")(input_ids=torch.arange(3, 10)[None], attention_mask=mask)


def test_a_mask_over_the_new_tokens_alone_is_refused() -> None:
    model, ids = dense_model("llama"), torch.arange(3, 10)[None]
    cached = model(input_ids=ids).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask covers 7 tokens and 14 were seen"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cached)


def test_a_decoder_that_looks_ahead_is_refused_alone_and_in_an_engine() -> None:
    model = make_model("llama")
    model.config.is_causal = False
    with pytest.raises(ValueError, match=r"config.is_causal=False"):
        TransformersModel(model)
    model.set_attn_implementation(ATTN_IMPLEMENTATION)
    with pytest.raises(ValueError, match=r"config.is_causal=False"):
        model(input_ids=torch.arange(3, 10)[None])


def make_engine(model: Any, **options: Any) -> Engine:
    return Engine(model, num_blocks=12, max_num_seqs=4, max_model_len=64, **options)


def test_a_served_model_goes_on_working_by_itself(
    monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    """Compiled layers serve the engine alone: generate would hit Dynamo's recompile limit in them."""
    monkeypatch.setattr(integration, "make_compiler", partial(make_compiler, compiler="aot_eager"))
    model, inputs = make_model("llama"), padded_batch(left=True)
    prompt, expected = inputs["input_ids"][1].tolist(), generate(eager_model("llama"), **inputs)
    engine = make_engine(model, backend="TORCH_SDPA", compile=True)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    for _ in range(2):
        assert engine.generate([prompt], params)[0].token_ids == expected[1]
        assert generate(model, **inputs) == expected
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()


def test_engines_of_one_model_do_not_share_what_they_compiled(
    monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:  # fmt: skip
    """Five engines of three graphs each stay within Dynamo's recompile limit; an eager one compiles none."""
    require("CPU_ATTN", device_type="cpu")
    monkeypatch.setattr(integration, "make_compiler", partial(make_compiler, compiler="aot_eager"))
    model, params = make_model("llama"), SamplingParams(max_tokens=3, ignore_eos=True)
    answers = []
    for number in range(5):
        engine = make_engine(model, backend=BACKENDS[number % 2], compile=True)
        compiler = engine.runner.model.compiler  # type: ignore[attr-defined]
        warm = compiler.num_graphs
        answers.append(engine.generate([[5, 6, 7]], params)[0].token_ids)
        assert compiler.num_graphs == warm == 3
        picks = [r for r in compiler.reports if r.pass_name == "pick_rows_early" and r.changes]
        assert len(picks) == 1, "prompts have a graph of the last layer"
        fused = [r for r in compiler.reports if r.pass_name == "fuse_rope_cache_write"]
        assert [len(r.changes) for r in fused].count(1) == 2, "in which queries are other tokens than keys"
    eager = make_engine(model, backend="TORCH_SDPA", compile=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert all(answer == eager.generate([[5, 6, 7]], params)[0].token_ids for answer in answers)
    assert compiler.num_graphs == 3
    with pytest.raises(RuntimeError, match=r"given to another engine since; make a new Engine"):
        engine.generate([[5, 6, 7]], params)


def test_an_engine_that_cannot_be_made_leaves_the_one_before_it_in_service() -> None:
    model, params = make_model("llama"), SamplingParams(max_tokens=6, ignore_eos=True)
    engine = make_engine(model, backend="TORCH_SDPA", compile=False)
    expected = engine.generate([[5, 6, 7]], params)[0].token_ids
    with pytest.raises(ValueError, match=r"'TORCH_SPDA'.*did you mean TORCH_SDPA"):
        make_engine(model, backend="TORCH_SPDA")
    assert engine.generate([[5, 6, 7]], params)[0].token_ids == expected


def test_caches_go_with_their_engine() -> None:
    model = make_model("llama")
    first = make_engine(model, compile=False)
    second = make_engine(model, compile=False)
    caches = [[weakref.ref(c) for c in e.runner.kv_caches.values()] for e in (first, second)]  # type: ignore[attr-defined]
    del first
    assert [ref() is None for ref in caches[0]] == [True, True]
    assert all(ref() is not None for ref in caches[1]), "the second engine's caches went with the first"
    del second
    assert [ref() is None for ref in caches[1]] == [True, True]
    make_engine(model, compile=False).generate([[5, 6, 7]], SamplingParams(max_tokens=2))


def test_an_engine_notices_that_its_model_s_attention_was_changed() -> None:
    """Another implementation would attend to all tokens of the batch, whatever request they belong to."""
    model, params = make_model("llama"), SamplingParams(max_tokens=4, ignore_eos=True)
    engine = make_engine(model, compile=False)
    expected = engine.generate([[5, 6, 7]], params)[0].token_ids
    model.set_attn_implementation("sdpa")
    with pytest.raises(
        RuntimeError, match=r"was set to 'sdpa' since.*set_attn_implementation\('attnbackend'\)"
    ):
        engine.generate([[5, 6, 7]], params)
    model.set_attn_implementation(ATTN_IMPLEMENTATION)
    assert engine.generate([[5, 6, 7]], params)[0].token_ids == expected


def test_padding_between_tokens_under_a_window_is_refused() -> None:
    model = make_model("mistral_window")
    model.set_attn_implementation("attnbackend")
    ids, mask = torch.tensor([[5, 6, 7, 0, 0, 8, 9]]), torch.tensor([[1, 1, 1, 0, 0, 1, 1]])
    with torch.no_grad(), pytest.raises(ValueError, match="padding between tokens"):
        model(ids, attention_mask=mask)


def test_a_failed_engine_leaves_the_model_s_attention_as_it_was() -> None:
    model = make_model("llama")
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="unknown attention backend"):
        make_engine(model, backend="NOPE_NOPE")
    assert model.config._attn_implementation == before


def test_a_model_put_in_training_mode_is_not_served() -> None:
    model = make_model("llama")
    engine = make_engine(model, compile=False)
    model.train()
    with pytest.raises(RuntimeError, match=r"model\.eval\(\)"):
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))


def test_copies_and_pickles_of_a_served_model_hold_no_cache() -> None:
    model = make_model("llama")
    engine = make_engine(model, compile=False)
    twin = copy.deepcopy(model)
    caches = [m.attnbackend_layer for m in twin.modules() if hasattr(m, "attnbackend_layer")]
    assert caches
    assert set(caches) == {None}
    assert engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].finish_reason == "length"


def test_longrope_models_are_served_up_to_their_original_length() -> None:
    config = make_model("llama").config
    config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 24,
        "short_factor": [1.0] * (config.head_dim // 2), "long_factor": [4.0] * (config.head_dim // 2),
    }  # fmt: skip
    model = type(make_model("llama"))(config).eval()
    assert Engine(model, num_blocks=12, compile=False).runner.max_model_len == 24
    with pytest.raises(ValueError, match=r"max_model_len=25 is outside 1\.\.24"):
        Engine(model, num_blocks=12, compile=False, max_model_len=25)
