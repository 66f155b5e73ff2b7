"""Encoders, two-part models, prefixes, images and alibi on the ops, against transformers' eager attention.

The truth is the model in float64, the yardstick its float32 error in the same padded batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from backend_claims import require_features
from family_zoo import FAMILIES, LENGTHS, Family, Truth, at_tokens, on_ops, tokens, truth
from model_zoo import CHUNK, VOCAB_SIZE, WINDOW, ZOO, EagerReference, make_model

import attnbackend
from attnbackend import Engine, SamplingParams, set_config
from attnbackend.integrations import dense_cache
from attnbackend.integrations.layer_record import Recorder
from attnbackend.integrations.mask_patterns import LocalMask, fit_ranges, local_mask
from attnbackend.integrations.transformers import ATTN_IMPLEMENTATION
from attnbackend.registry import is_implemented
from attnbackend.selector import AttentionSelectorConfig, backend_verdict
from attnbackend.testing import RuleReport, assert_within_rule
from attnbackend.types import AttentionType

BACKENDS = ("TORCH_SDPA", "CPU_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
PAGE = Path(__file__).parents[1] / "docs" / "model-families.md"


@cache
def model_and_truth(name: str) -> tuple[Any, Truth]:
    model = FAMILIES[name].model()
    return model, truth(model, FAMILIES[name])


def run(model: Any, family: Family, **inputs: Tensor) -> Tensor:
    options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    with torch.no_grad():
        return getattr(model(**(family.inputs() | inputs), **options), family.output)


def judge(name: str, output_BLV: Tensor) -> RuleReport:
    return assert_within_rule(at_tokens(output_BLV, FAMILIES[name]), *model_and_truth(name)[1], what=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_padded_batch_gives_what_eager_attention_gives(name: str, backend: str) -> None:
    family = FAMILIES[name]
    for features in family.needs:
        require_features(backend, **features)
    with set_config(backend=backend):
        judge(name, run(on_ops(model_and_truth(name)[0], family), family))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.compiles])
def test_a_whole_model_compiles_to_one_graph_with_the_backend_s_op_in_it(
    name: str, fresh_compiler: None
) -> None:
    family = FAMILIES[name]
    compiled: Any = attnbackend.compile(
        on_ops(model_and_truth(name)[0], family), backend="TORCH_SDPA", compiler="aot_eager", fullgraph=True
    )
    judge(name, run(compiled, family))
    report = compiled.attnbackend_compiler
    changes = [change for passed in report.reports for change in passed.changes]
    assert report.num_graphs == 1
    assert {change.after for change in changes} == {"attnbackend::torch_sdpa_forward"}
    assert len(changes) == len(calls_in(name))


def calls_in(name: str) -> list[dict[str, Any]]:
    """The op's calls in one forward pass."""
    with pytest.MonkeyPatch.context() as patch:
        seen = change_calls(patch, lambda call: {})
        run(on_ops(model_and_truth(name)[0], FAMILIES[name]), FAMILIES[name])
    return seen


def change_calls(
    patch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Every call of the op in dense attention, changed as ``change`` says; noted as it was."""
    original, seen = dense_cache.attention, []
    names = [argument.name for argument in original._schema.arguments]

    def attention(*args: Any, **kwargs: Any) -> None:
        call = dict(zip(names, args, strict=False)) | kwargs
        seen.append(call)
        with set_config(backend="TORCH_SDPA"):
            original(**(call | change(call)))

    patch.setattr(dense_cache, "attention", attention)
    return seen


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_asks_for_what_its_entry_says(name: str) -> None:
    asked = [_asked(call) for call in calls_in(name)]
    for features in FAMILIES[name].needs:
        assert any(features.items() <= call.items() for call in asked), (features, asked)


def _asked(call: dict[str, Any]) -> dict[str, Any]:
    return {
        "attn_type": AttentionType(call["attn_type"]), "causal": call["causal"],
        "sliding_window": call["sliding_window"], "logits_soft_cap": call["logits_soft_cap"],
        "has_alibi": call.get("alibi_slopes") is not None,
        "has_bidirectional_ranges": call.get("bidirectional_ranges") is not None,
    }  # fmt: skip


def widened(by: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda call: {"sliding_window": call["sliding_window"] and call["sliding_window"] + by}


def decoder_lengths(call: dict[str, Any]) -> dict[str, Any]:
    is_cross = call["attn_type"] == AttentionType.ENCODER_DECODER
    room = call["block_table"].shape[1] * 16
    return {"seq_lens": call["query_start_loc"].diff().int().clamp(max=room)} if is_cross else {}


def full_lengths(call: dict[str, Any]) -> dict[str, Any]:
    is_cross = call["attn_type"] == AttentionType.ENCODER_DECODER
    return {"seq_lens": torch.full_like(call["seq_lens"], int(call["seq_lens"].max()))} if is_cross else {}


def shortened(call: dict[str, Any]) -> dict[str, Any]:
    ranges = call["bidirectional_ranges"].clone()
    ranges[..., 1] = torch.maximum(ranges[..., 1] - 1, ranges[..., 0])
    return {"bidirectional_ranges": ranges}


MUTANTS: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "bert made causal": ("bert", lambda call: {"causal": True}),
    "modernbert's window one too wide": ("modernbert", widened(1)),
    "modernbert's window one too narrow": ("modernbert", widened(-1)),
    "modernbert without its windows": ("modernbert", lambda call: {"sliding_window": None}),
    "embedding gemma's window one too narrow": ("embedding_gemma", widened(-1)),
    "t5gemma's windows as its modules pass them on": (
        "t5gemma", lambda call: {} if call["causal"] else widened(-1)(call),
    ),
    "t5gemma without its soft-cap": ("t5gemma", lambda call: {"logits_soft_cap": 0.0}),
    "bart's cross attention with the decoder's lengths": ("bart", decoder_lengths),
    "bart's cross attention without the encoder's padding": ("bart", full_lengths),
    "whisper's cross attention with the decoder's lengths": ("whisper", decoder_lengths),
    "images that do not see ahead": ("gemma3_images", lambda call: {"bidirectional_ranges": None}),
    "images without their last token": ("gemma3_images", shortened),
    "a prefix that does not see ahead": ("paligemma", lambda call: {"bidirectional_ranges": None}),
    "a prefix without its last token": ("paligemma", shortened),
    "mpt without alibi": ("mpt", lambda call: {"alibi_slopes": None}),
    "mpt's slopes 0.1% off": ("mpt", lambda call: {"alibi_slopes": call["alibi_slopes"] * 1.001}),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_rule_notices_a_feature_that_is_ignored_or_off(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = MUTANTS[mutant]
    change_calls(monkeypatch, change)
    output = run(on_ops(model_and_truth(name)[0], FAMILIES[name]), FAMILIES[name])
    with pytest.raises(AssertionError, match="ratio"):
        judge(name, output)


@pytest.mark.parametrize("name", ["bart", "whisper", "t5gemma", "gemma3_images", "paligemma"])
def test_generate_gives_the_tokens_of_eager_attention(name: str) -> None:
    """With transformers' own caches: the encoder's keys are written once, ranges lie in the prompt."""
    model, family = model_and_truth(name)[0], FAMILIES[name]
    inputs = {key: x for key, x in family.inputs().items() if not key.startswith("decoder_")}
    if "token_type_ids" in inputs:
        inputs = {key: x[1:2] for key, x in inputs.items()}
    options: dict[str, Any] = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    expected = model.generate(**inputs, **options)
    with set_config(backend="TORCH_SDPA"):
        assert on_ops(model, family).generate(**inputs, **options).tolist() == expected.tolist()


def test_padding_on_the_left_of_encoders_and_ranges_is_served() -> None:
    for name in ("bert", "modernbert", "paligemma"):
        family = FAMILIES[name]
        model, inputs = model_and_truth(name)[0], family.inputs() | tokens(left=True)
        if "token_type_ids" in inputs:
            inputs["token_type_ids"] = (torch.arange(max(LENGTHS)) > 12).long().expand(3, -1)
        flipped = family._replace(inputs=lambda inputs=inputs: inputs)
        with set_config(backend="TORCH_SDPA"):
            output = run(on_ops(model, family), flipped)
        assert_within_rule(at_tokens(output, flipped), *truth(model, flipped), what=name)


def test_padding_between_tokens_under_a_window_fails_compiled_too(fresh_compiler: None) -> None:
    family = FAMILIES["modernbert"]
    holes = family.inputs()["attention_mask"]
    holes[1, 4:6] = 0
    model = on_ops(model_and_truth("modernbert")[0], family)
    with (
        set_config(backend="TORCH_SDPA"),
        pytest.raises(ValueError, match=r"padding between tokens together with a sliding window of 7"),
    ):
        run(model, family, attention_mask=holes)
    compiled = attnbackend.compile(model, backend="TORCH_SDPA", compiler="aot_eager", fullgraph=True)
    judge("modernbert", run(compiled, family))
    with pytest.raises(RuntimeError, match=r"padding between tokens together with a sliding window of 7"):
        run(compiled, family, attention_mask=holes)


def test_an_encoder_without_padding_brings_no_mask() -> None:
    family = FAMILIES["bert"]
    model, ids = model_and_truth("bert")[0], family.inputs()["input_ids"][1:2]
    with set_config(backend="TORCH_SDPA"), torch.no_grad():
        output = on_ops(model, family)(input_ids=ids).logits
    one = family._replace(inputs=lambda: {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert_within_rule(at_tokens(output, one), *truth(model, one))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an image longer than the window": (
        "gemma3_images",
        {"token_type_ids": (torch.arange(17) < WINDOW + 3).long().expand(3, -1)},
        rf"ranges longer than the window of {WINDOW}.*token {WINDOW} of sequence 0 sees keys 1 to "
        rf"{WINDOW + 2}",
    ),
    "a mask of four dimensions": (
        "bert", {"attention_mask": torch.zeros(3, 1, 17, 17)},
        r"attention_mask has shape \(3, 1, 17, 17\) and dtype torch.float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_mask_that_cannot_be_expressed_is_refused_with_what_it_holds(what: str) -> None:
    name, inputs, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        run(on_ops(model_and_truth(name)[0], FAMILIES[name]), FAMILIES[name], **inputs)


def test_t5_is_refused_for_its_learned_bias() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes)).eval()
    model.set_attn_implementation(ATTN_IMPLEMENTATION)
    if model.encoder.config._attn_implementation != ATTN_IMPLEMENTATION:
        pytest.skip("this version of transformers does not set the implementation of T5's two parts")
    with pytest.raises(ValueError, match=r"T5Attention passes position_bias, which .* does not support"):
        model(input_ids=torch.tensor([[3, 4]]), decoder_input_ids=torch.tensor([[1]]))


ENGINE_REFUSALS = {
    "bart": r"is an encoder-decoder; only decoders can be served",
    "paligemma": r"is_causal=False: it looks ahead.*run the model itself",
}


@pytest.mark.parametrize("name", ENGINE_REFUSALS)
def test_an_engine_refuses_what_it_cannot_serve_and_leaves_the_model_as_it_was(name: str) -> None:
    model = FAMILIES[name].model()
    with pytest.raises(ValueError, match=ENGINE_REFUSALS[name]):
        Engine(model, num_blocks=12)
    assert model.config._attn_implementation == "eager"


def test_an_engine_serves_a_model_of_images_as_text_and_refuses_what_stands_for_an_image() -> None:
    model, params = FAMILIES["gemma3_images"].model(), SamplingParams(max_tokens=6, ignore_eos=True)
    prompt = tokens()["input_ids"][1:2]
    expected = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, 17:]
    engine = Engine(model, backend="TORCH_SDPA", num_blocks=12, compile=False)
    assert engine.generate([prompt[0].tolist()], params)[0].token_ids == expected.tolist()
    with pytest.raises(ValueError, match=r"prompt token id 95 at position 1 is the model's image_token_id"):
        engine.add_request([5, VOCAB_SIZE - 1], params)


@pytest.mark.parametrize("name", ["gemma2", "llama4_text", "gemma3n_text"])
def test_a_decoder_compiles_as_a_whole_for_a_padded_batch(name: str, fresh_compiler: None) -> None:
    model = make_model(name)
    both = EagerReference(model).outputs("logits", **tokens())
    model.set_attn_implementation(ATTN_IMPLEMENTATION)
    compiled: Any = attnbackend.compile(model, backend="TORCH_SDPA", compiler="aot_eager", fullgraph=True)
    with torch.no_grad():
        logits = compiled(**tokens(), use_cache=False).logits
    valid = tokens()["attention_mask"].bool()
    assert_within_rule(logits[valid], both.exact[valid], both.eager[valid])


def test_a_layer_whose_mask_says_something_else_than_the_layer_is_not_served() -> None:
    """Eager attention honours the mask; a module that passes on another window is found out."""
    recorder, layer, x = Recorder(), torch.nn.Identity(), torch.zeros(1, 2, 3, 32)
    features: dict[str, Any] = {
        "scale": 1.0, "causal": True, "sliding_window": WINDOW + 1, "attention_chunk_size": None,
        "logits_soft_cap": 0.0, "sinks": None,
    }  # fmt: skip
    mask = recorder.note(LocalMask(True, WINDOW, None))
    with pytest.raises(ValueError, match=rf"Identity asks for .*={WINDOW + 1}, and its mask is .*={WINDOW};"):
        recorder.ask(layer, x, x, x, mask, features)
    recorder.ask(layer, x, x, x, mask, features | {"sliding_window": WINDOW})
    with pytest.raises(ValueError, match="computes an attention mask of its own"):
        recorder.ask(torch.nn.Identity(), x, x, x, torch.zeros(1, 1, 3, 3), features)


def test_layers_that_share_keys_share_a_cache_and_only_the_first_writes_it() -> None:
    runner: Any = Engine(
        make_model("gemma3n_text"), backend="TORCH_SDPA", num_blocks=12, compile=False
    ).runner
    owners = {name: owner for group in runner.groups for name, owner in group.owners.items()}
    names = [f"model.layers.{i}.self_attn" for i in range(5)]
    assert owners == {names[3]: names[1], names[4]: names[2]}
    assert [runner.kv_caches[name].data_ptr() for name in owners] == [
        runner.kv_caches[owner].data_ptr() for owner in owners.values()
    ]
    assert len({cache.data_ptr() for cache in runner.kv_caches.values()}) == 3


def chunked(size: int) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (q // size == k // size) & (k <= q)


LOCAL_MASKS: dict[str, tuple[Callable[..., Tensor], int | None, tuple[int | None, int | None]]] = {
    "none": (lambda b, h, q, k: k <= q, None, (None, None)),
    "an exclusive window": (lambda b, h, q, k: (k <= q) & (k > q - 6), 6, (6, None)),
    "an inclusive window": (lambda b, h, q, k: (q - k).abs() <= 6, 6, (7, None)),
    "a window of one": (lambda b, h, q, k: (k <= q) & (k > q - 1), 1, (1, None)),
    "chunks": (chunked(CHUNK), CHUNK, (None, CHUNK)),
    "chunks of two": (chunked(2), 2, (None, 2)),
}


@pytest.mark.parametrize("what", LOCAL_MASKS)
def test_local_masks_are_told_apart(what: str) -> None:
    function, size, expected = LOCAL_MASKS[what]
    assert local_mask(function, size, causal=True, device="cpu")[1:] == expected


def test_a_local_mask_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"neither a window nor chunks: it sees distances \[1, 6, 7\]"):
        local_mask(lambda b, h, q, k: (q - k).abs() != 5, 6, causal=True, device="cpu")


def test_ranges_are_found_beside_each_other_and_past_a_cache() -> None:
    q_N1, k_L = torch.arange(4, 12).unsqueeze(1), torch.arange(2, 12)
    ids_L = torch.tensor([-1, -1, -1, 0, 0, 0, 1, 1, -1, -1])
    ids_N1 = ids_L[2:].unsqueeze(1)
    visible_NL = (k_L <= q_N1) | ((ids_N1 == ids_L) & (ids_N1 >= 0))
    found = fit_ranges(visible_NL[None], 4, 2, (None,))
    assert isinstance(found, Tensor)
    assert found.tolist() == [ids_L.tolist()]
    hole_NL = visible_NL.clone()
    hole_NL[6, 3] = False
    assert fit_ranges(hole_NL[None], 4, 2, (None, WINDOW)) == (0, 5) or fit_ranges(
        hole_NL[None], 4, 2, (None,)
    ) == (0, 6)


def page_rows() -> dict[str, list[str]]:
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


def test_the_page_lists_the_families_of_the_zoos_and_no_others() -> None:
    assert list(page_rows()) == [*ZOO, *FAMILIES]


@pytest.mark.parametrize("name", [*ZOO, *FAMILIES])
def test_the_page_names_the_backends_that_claim_what_a_family_needs(name: str) -> None:
    needs = FAMILIES[name].needs if name in FAMILIES else (ZOO[name].needs,)
    listed = {backend.strip() for backend in page_rows()[name][-1].split(",")}
    assert listed <= set(BACKENDS)
    for backend in filter(is_implemented, BACKENDS):
        assert (backend in listed) is _claims(backend, needs), backend


def _claims(backend: str, needs: tuple[dict[str, Any], ...]) -> bool:
    fields: dict[str, Any] = {
        "device_type": "cpu", "head_size": 64, "num_heads": 4, "num_kv_heads": 2, "dtype": torch.float32
    }  # fmt: skip
    configs = [AttentionSelectorConfig.dense(**(fields | features)) for features in needs]
    return not any(backend_verdict(backend, config).constraints for config in configs)
