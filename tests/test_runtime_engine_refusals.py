from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from runtime_toys import ByteTokenizer, ToyRunner, check_invariants, greedy_reference, toy_engine

from attnbackend.cudagraph import CUDAGraphMode
from attnbackend.runtime import Engine, EngineCore, SamplingParams
from attnbackend.runtime.step_graphs import GraphOptions

GREEDY = SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "has no tokens"),
        ("", GREEDY, "has no tokens"),
        ([1, 2, 50], GREEDY, "token id 50 at position 2 .*allowed are 0 to 49"),
        ([1, -1], GREEDY, "token id -1 at position 1"),
        ([2**70], GREEDY, "at position 0"),
        ([1] * 61, GREEDY, r"needs 65 tokens \(prompt 61 \+ max_tokens 4\).*allows 64"),
        ([1] * 30, GREEDY, r"needs 9 cache blocks .*the cache has 8 .*at least 10"),
        ([1], SamplingParams(stop_token_ids=[3, 50]), "stop_token_ids 50 at position 1"),
    ],
    ids=["empty", "empty string", "too large", "negative", "huge", "too long", "blocks", "stop id"],
)
def test_a_request_that_cannot_be_served_is_refused_and_others_go_on(
    prompt: Any, params: SamplingParams, message: str
) -> None:
    runner = ToyRunner(num_blocks=9)
    tokenizer = ByteTokenizer() if isinstance(prompt, str) else None
    engine = EngineCore(runner, tokenizer, eos_token_ids=[])
    kept = engine.add_request([5, 6], GREEDY, "kept")
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, params, "refused")
    check_invariants(engine)
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert outputs[-1].output is not None
    assert outputs[-1].request_id == kept
    assert outputs[-1].output.token_ids == greedy_reference([5, 6], 4)
    assert engine.add_request([1], GREEDY, "refused") == "refused", "the id was not taken"


@pytest.mark.parametrize("prompt", [5, None, [1.5], ["a"], [[1]], b"12", {1: 2}, {1}], ids=repr)
def test_a_prompt_of_another_type_is_refused(prompt: Any) -> None:
    with pytest.raises(TypeError, match="neither a string nor a sequence of integer"):
        toy_engine().add_request(prompt, GREEDY)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        toy_engine().add_request("hello", GREEDY)
    with pytest.raises(ValueError, match="no tokenizer; give Engine a tokenizer or use stop_token"):
        toy_engine().add_request([1], SamplingParams(stop="x"))


def test_sampling_params_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match="must be SamplingParams"):
        toy_engine().add_request([1], {"max_tokens": 3})  # type: ignore[arg-type]


def test_a_duplicate_id_is_refused_until_the_first_has_finished() -> None:
    engine = toy_engine()
    engine.add_request([1], GREEDY, "a")
    with pytest.raises(ValueError, match="'a' belongs to an unfinished request"):
        engine.add_request([2], GREEDY, "a")
    engine.abort("a")
    assert engine.add_request([2], GREEDY, "a") == "a"


def test_made_ids_avoid_given_ones() -> None:
    engine = toy_engine()
    engine.add_request([1], GREEDY, "request-0")
    assert len({"request-0", *(engine.add_request([1], GREEDY) for _ in range(3))}) == 4


def test_abort_of_an_unknown_or_finished_id_is_refused() -> None:
    engine = toy_engine()
    engine.add_request([1], GREEDY, "here")
    with pytest.raises(ValueError, match=r"'gone'; unfinished are \['here'\]"):
        engine.abort("gone")


def test_generate_refuses_before_anything_runs_and_names_the_prompt() -> None:
    runner = ToyRunner()
    engine = toy_engine(runner)
    with pytest.raises(ValueError, match="generate: prompt 1: prompt token id 99 at position 0"):
        engine.generate([[1], [99]], GREEDY)
    with pytest.raises(TypeError, match=r"generate: prompt 1: prompt \[1.5\] is neither"):
        engine.generate([[1], [1.5]], GREEDY)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="2 prompts and 1 sampling_params"):
        engine.generate([[1], [2]], [GREEDY])
    assert runner.num_steps == 0
    assert not engine.has_unfinished()


@pytest.mark.parametrize("wrong", [5, ["a"], None], ids=repr)
def test_an_abort_of_what_is_no_id_is_refused_like_an_unknown_one(wrong: Any) -> None:
    with pytest.raises(ValueError, match="no unfinished request"):
        toy_engine().abort(wrong)


def test_a_request_id_that_is_no_string_is_refused_before_it_is_queued() -> None:
    engine = toy_engine()
    with pytest.raises(TypeError, match="request_id=5 must be a string, or None"):
        engine.add_request([1], GREEDY, 5)  # type: ignore[arg-type]
    assert not engine.has_unfinished()


@pytest.mark.parametrize("prompts", [5, None, [1, 2, 3]], ids=repr)
def test_generate_names_what_prompts_must_be(prompts: Any) -> None:
    with pytest.raises(TypeError, match=r"prompts=.* one prompt of token ids is \[\[1, 2, 3\]\]"):
        toy_engine().generate(prompts)


def test_a_tokenizer_without_its_methods_is_refused() -> None:
    with pytest.raises(TypeError, match="tokenizer='gpt2' has no decode; give a tokenizer of"):
        EngineCore(ToyRunner(), "gpt2")  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{"max_tokens": 3}, "greedy", 5], ids=repr)
def test_generate_names_what_sampling_params_must_be(params: Any) -> None:
    with pytest.raises(TypeError, match=r"sampling_params=.* must be SamplingParams\(...\), or a list"):
        toy_engine().generate([[1]], params)
    with pytest.raises(TypeError, match="prompt 0: sampling_params must be SamplingParams, not"):
        toy_engine().generate([[1]], [params])


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", ["4", 1.5, None, True], ids=repr)
def test_limits_of_another_type_are_refused(limit: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{limit}={value!r} must be a whole number"):
        EngineCore(ToyRunner(), **{limit: value})


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        *((name, "a whole number") for name in ("block_size", "num_blocks", "max_model_len")),
        *((name, "a name, such as") for name in ("backend", "kv_cache_dtype")),
        *((name, "True or False") for name in ("compile", "cudagraph_lazy_capture", "cudagraph_debug")),
        ("cudagraph_capture_sizes", "a list of sizes"),
    ],
)
def test_options_of_another_type_are_refused_by_name(option: str, wanted: str) -> None:
    with pytest.raises(TypeError, match=f"{option}=7.5 must be {wanted}"):
        Engine(None, **{option: 7.5})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["no", 1], ids=repr)
def test_a_word_is_no_answer_to_yes_or_no(value: Any) -> None:
    with pytest.raises(TypeError, match=f"async_scheduling={value!r} must be True or False"):
        EngineCore(ToyRunner(), async_scheduling=value)


@pytest.mark.parametrize(
    ("option", "name"),
    [({"sizes": [1]}, "capture_sizes"), ({"lazy": True}, "lazy_capture"), ({"debug": True}, "debug")],
)
def test_what_is_asked_of_graphs_that_are_not_wanted_is_refused(option: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"cudagraph_mode=NONE leaves no graph for cudagraph_{name}:"):
        GraphOptions(mode=CUDAGraphMode.NONE, **option)


def test_end_of_sequence_ids_that_are_no_list_are_refused() -> None:
    with pytest.raises(TypeError, match="eos_token_ids=5 must be a list"):
        EngineCore(ToyRunner(), eos_token_ids=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="end-of-sequence id='2' must be a whole number"):
        EngineCore(ToyRunner(), eos_token_ids="12"[1:])  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens"])
def test_limits_below_one_are_refused(limit: str) -> None:
    with pytest.raises(ValueError, match=f"{limit}=0"):
        EngineCore(ToyRunner(), **{limit: 0})  # type: ignore[arg-type]


def test_a_tokenizer_of_another_model_is_noticed_by_its_end_of_sequence_id() -> None:
    with pytest.raises(ValueError, match=r"end-of-sequence id 256 .*allowed are 0 to 49"):
        EngineCore(ToyRunner(), ByteTokenizer())


def test_unknown_keyword_arguments_are_type_errors() -> None:
    with pytest.raises(TypeError, match="max_sequences"):
        EngineCore(ToyRunner(), max_sequences=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="dtype"):
        Engine(None, dtype="bf16")  # type: ignore[call-arg]


def test_engine_passes_every_option_to_the_runner_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def build_runner(model: Any, **options: Any) -> ToyRunner:
        seen.update(options, model=model)
        return ToyRunner(vocab_size=300)

    module = ModuleType("attnbackend.runtime.model_runner")
    module.build_runner = build_runner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7, 8]))
    options = {
        "backend": "TORCH_SDPA",
        "block_size": 8,
        "num_blocks": 12,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 20,
        "max_model_len": 40,
        "kv_cache_dtype": "fp8",
        "compile": False,
    }
    graphs = {"cudagraph_mode": "full", "cudagraph_capture_sizes": [1, 2], "cudagraph_lazy_capture": True}
    engine = Engine(model, ByteTokenizer(), **options, **graphs)  # type: ignore[arg-type]
    assert seen.pop("graphs") == GraphOptions(mode=CUDAGraphMode.FULL, sizes=[1, 2], lazy=True)
    assert seen == {"model": model, "num_drafts": 0, **options}
    assert engine.eos_token_ids == {7, 8, 256}
    assert engine.scheduler.max_num_seqs == 3
    assert engine.scheduler.max_num_batched_tokens == 20
