"""Bad input: every refusal names the value and what is allowed, and harms nobody else."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from op_cases import DENSE_BACKENDS, case, require
from torch import Tensor

import attnbackend
from attnbackend import Engine, SamplingParams, set_config
from attnbackend.testing import AttentionCase, make_batch, op_kwargs, op_positional

NAMES = ("query", "key", "value", "kv_cache", "output", "query_start_loc", "seq_lens", "block_table")
Change = Callable[[Tensor], Any]


def attend(attention_case: AttentionCase | None = None, **changes: Any) -> Tensor:
    """Calls the agnostic op with some arguments changed: tensors by a function of the right one."""
    batch = make_batch(attention_case or case("no_lse"), "cpu")
    arguments = dict(zip(NAMES, op_positional(batch), strict=True)) | op_kwargs(batch)
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    attnbackend.attention(**arguments)
    return batch.output


def with_gaps(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


def meta(x: Tensor) -> Tensor:
    return x.to("meta")


ATTENTION_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{name} without dimensions": ({name: lambda x: x.flatten()[0]}, rf"shape of {name} is \(\)")
        for name in ("query", "key", "kv_cache", "output", "seq_lens", "block_table")
    },
    "query of two dimensions": (
        {"query": lambda q: q.flatten(1)},
        r"query.* \(24, 256\).*num_tokens, num_heads, head_size",
    ),
    "cache of four dimensions": (
        {"kv_cache": lambda c: c[:, 0]},
        r"kv_cache.* \(13, 16, 2, 64\).*num_blocks, 2, block_size",
    ),
    "another head size than the cache's": (
        {"kv_cache": lambda c: c[..., :32]},
        "kv_cache is 32; expected 64",
    ),
    "heads that do not divide": (
        {"kv_cache": lambda c: torch.cat([c, c[:, :, :, :1]], 3)},
        "num_heads is 4; expected a multiple of num_kv_heads=3",
    ),
    "chunks of nothing": ({"attention_chunk_size": 0}, "attention_chunk_size is 0; expected at least 1"),
    "a window and chunks": (
        {"attention_chunk_size": 8, "sliding_window": 4},
        "sliding_window=4 and attention_chunk_size=8.*one of the two",
    ),
    "ranges of an odd shape": (
        {"bidirectional_ranges": torch.zeros(5, 3, dtype=torch.int32)},
        r"bidirectional_ranges is \(5, 3\); expected \(5, ranges, 2\)",
    ),
    "ranges of int64": (
        {"bidirectional_ranges": torch.zeros(5, 1, 2, dtype=torch.int64)},
        "bidirectional_ranges is torch.int64; expected torch.int32",
    ),
    "ranges where all is seen": (
        {"bidirectional_ranges": torch.zeros(5, 1, 2, dtype=torch.int32), "causal": False},
        "bidirectional_ranges is given, causal=False with attn_type='decoder'; expected a causal decoder",
    ),
    "an encoder with a cache": (
        {"attn_type": "encoder_only", "causal": False},
        "num_blocks of kv_cache is 13 with attn_type='encoder_only'; expected 0",
    ),
    "an encoder without keys": (
        {"attn_type": "encoder", "key": None, "value": None, "kv_cache": lambda c: c[:0]},
        "key is None with attn_type='encoder'; expected the keys",
    ),
    "an encoder with scales": (
        {"attn_type": "encoder", "kv_cache": lambda c: c[:0], "k_scale": torch.ones(1)},
        "k_scale is given with attn_type='encoder'; expected None",
    ),
    "an encoder with a type of cache": (
        {"attn_type": "encoder", "kv_cache": lambda c: c[:0], "kv_cache_dtype": "fp8"},
        "kv_cache_dtype is 'fp8' with attn_type='encoder'; expected 'auto'",
    ),
    "cross attention with new keys": (
        {"attn_type": "encoder_decoder", "causal": False},
        "key is given with attn_type='encoder_decoder'; expected None",
    ),
    "cross attention that is causal": (
        {"attn_type": "encoder_decoder", "key": None, "value": None},
        "causal is True with attn_type='encoder_decoder'; expected False",
    ),
    "cross attention with a window": (
        {"attn_type": "encoder_decoder", "key": None, "value": None, "causal": False, "sliding_window": 3},
        "sliding_window is given with attn_type='encoder_decoder'; expected None",
    ),
    "key without value": ({"value": None}, "key and value.*both or neither"),
    "key of other heads": ({"key": lambda k: k[:, :1]}, r"key is \(24, 1, 64\).*2, 64"),
    "output too short": ({"output": lambda o: o[:-1]}, "output is 23; expected 24"),
    "output that is not contiguous": (
        {"output": lambda o: torch.empty(24, 4, 128)[..., ::2]},
        r"last stride of output is 2.*output\.contiguous\(\)",
    ),
    "query on another device": ({"query": meta}, "kv_cache is cpu; expected meta"),
    "cache on another device": ({"kv_cache": meta}, "kv_cache is meta; expected cpu"),
    "lengths on another device": ({"seq_lens": meta}, "seq_lens is meta; expected cpu"),
    "block table on another device": ({"block_table": meta}, "block_table is meta; expected cpu"),
    "half query on a float cache": (
        {"query": Tensor.half},
        "kv_cache is torch.float32; expected torch.float16.*kv_cache_dtype='auto'",
    ),
    "lengths of int64": ({"seq_lens": Tensor.long}, "seq_lens is torch.int64; expected torch.int32"),
    "block table of int64": (
        {"block_table": Tensor.long},
        "block_table is torch.int64; expected torch.int32",
    ),
    "starts as many as rows": (
        {"query_start_loc": lambda s: s[:-1]},
        r"query_start_loc is 5; expected 5 \+ 1",
    ),
    "block table of other rows": ({"block_table": lambda t: t[:-1]}, r"block_table is \(4, 4\).*5"),
    "scale that is not a number": ({"scale": float("nan")}, "scale is nan; expected a finite number above 0"),
    "scale below 0": ({"scale": -0.1}, r"scale is -0\.1; expected a finite number above 0"),
    "window of 0": ({"sliding_window": 0}, "sliding_window is 0; expected at least 1.*None for no window"),
    "negative soft-cap": ({"logits_soft_cap": -5.0}, r"logits_soft_cap is -5\.0.*0 for none"),
    "misspelt attention type": (
        {"attn_type": "decoderr"},
        "attn_type is 'decoderr'; expected one of decoder, encoder",
    ),
    "unknown cache type": (
        {"kv_cache_dtype": "fp9"},
        "kv_cache_dtype='fp9' is unknown; allowed: auto,.*fp8_e5m2",
    ),
    "cache of another type than said": (
        {"kv_cache_dtype": "fp8"},
        "kv_cache is torch.float32; expected torch.float8_e4m3fn",
    ),
    "slopes for other heads": ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes is \(3,\).*4"),
    "sinks of another type": (
        {"sinks": torch.ones(4, dtype=torch.int32)},
        "sinks is torch.int32; expected torch.float32",
    ),
    "slopes with gaps": (
        {"alibi_slopes": torch.ones(8)[::2]},
        r"last stride of alibi_slopes is 2; expected 1; call alibi_slopes\.contiguous\(\)",
    ),
    "one sink for all": ({"sinks": torch.ones(1).expand(4)}, "last stride of sinks is 0"),
    "lengths with gaps": ({"seq_lens": lambda x: with_gaps(x)}, "last stride of seq_lens is 2"),
    "blocks with gaps": ({"block_table": lambda x: with_gaps(x)}, "last stride of block_table is 2"),
    "scales for other heads": ({"k_scale": torch.ones(3)}, "k_scale is 3; expected 1 or num_kv_heads=2"),
}


@pytest.mark.parametrize("what", ATTENTION_REFUSALS)
def test_attention_refuses_with_the_value_and_what_is_allowed(what: str) -> None:
    changes, message = ATTENTION_REFUSALS[what]
    with pytest.raises(ValueError, match=message):
        attend(**changes)


def test_a_refused_call_does_not_spoil_the_next() -> None:
    expected = attend()
    for changes, _ in ATTENTION_REFUSALS.values():
        with pytest.raises(ValueError, match=r"."):
            attend(**changes)
    assert torch.equal(attend(), expected)


def test_an_unknown_argument_of_an_op_is_refused_by_name() -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"soft_cap"):
        attend(soft_cap=5.0)


def test_tensors_that_are_all_without_data_are_refused_by_their_device() -> None:
    with torch.device("meta"):
        tensors = [torch.empty(3, 4, 64), None, None, torch.empty(5, 2, 16, 2, 64), torch.empty(3, 4, 64)]
        ints = [torch.empty(n, dtype=torch.int32) for n in ((3,), (2,), (2, 4))]
    with pytest.raises(ValueError, match=r"device_type=meta"):
        attnbackend.attention(*tensors, *ints, scale=1.0)


DEBUG_REFUSALS: dict[str, tuple[dict[str, Change], str]] = {
    "block past the cache": (
        {"block_table": lambda t: t + 1000},
        r"block_table\[0, 0\] is 10\d\d; expected 0 to 12",
    ),
    "negative block": ({"block_table": lambda t: -t}, r"block_table\[0, 0\] is -\d+; expected 0 to 12"),
    "longer than the table": (
        {"seq_lens": lambda n: n + 1000},
        r"seq_lens\[0\] is 1041; expected .* at most 64.*width 4",
    ),
}


@pytest.mark.parametrize("how", ["set_config", "environment"])
@pytest.mark.parametrize("what", DEBUG_REFUSALS)
@pytest.mark.parametrize("backend", DENSE_BACKENDS)
def test_debug_mode_finds_blocks_outside_the_cache(
    backend: str, what: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    require(backend, device_type="cpu")
    changes, message = DEBUG_REFUSALS[what]
    if how == "environment":
        monkeypatch.setenv("ATTNBACKEND_DEBUG", "1")
    with (
        set_config(backend=backend, debug=True if how == "set_config" else None),
        pytest.raises(ValueError, match=message),
    ):
        attend(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"query_start_loc": lambda s: s + 100},
        {"query_start_loc": lambda s: s.flip(0).contiguous()},
        {"query_start_loc": lambda s: torch.cat([s[:1] + 1, s[1:]])},
        {"seq_lens": lambda n: n - 100},
    ],
    ids=["past the tokens", "decreasing", "not from 0", "negative lengths"],
)
def test_debug_mode_finds_rows_that_are_no_rows(changes: dict[str, Change]) -> None:
    with (
        set_config(backend="TORCH_SDPA", debug=True),
        pytest.raises(ValueError, match=r"query_start_loc|seq_lens"),
    ):
        attend(**changes)


def test_debug_mode_accepts_garbage_in_blocks_that_no_request_needs() -> None:
    """Padded rows, and columns past a request's last block, may hold anything."""
    attention_case = case("no_lse", "padded")
    lens = torch.tensor(attention_case.seq_lens)
    needed = torch.nn.functional.pad((lens + 15) // 16, (0, attention_case.num_padded_rows))

    def garbage(table: Tensor) -> Tensor:
        unneeded = torch.arange(table.shape[1]) >= needed[:, None]
        return table.masked_fill(unneeded, -7).int()

    with set_config(debug=True, backend="TORCH_SDPA"):
        assert torch.equal(attend(attention_case, block_table=garbage), attend(attention_case))


def write(**changes: Any) -> Tensor:
    """Calls the agnostic cache write, three tokens into blocks 1 and 2, with some arguments changed."""
    arguments: dict[str, Any] = {
        "key": torch.ones(3, 2, 64),
        "value": torch.ones(3, 2, 64),
        "kv_cache": torch.zeros(4, 2, 16, 2, 64),
        "slot_mapping": torch.tensor([16, -1, 40]),
    }
    arguments |= changes
    attnbackend.kv_cache_update(**arguments)
    return arguments["kv_cache"]  # type: ignore[no-any-return]


WRITE_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{name} without dimensions": ({name: torch.tensor(1)}, rf"shape of {name} is \(\)")
        for name in ("key", "value", "kv_cache", "slot_mapping")
    },
    "slots as int32": (
        {"slot_mapping": torch.ones(3, dtype=torch.int32)},
        "slot_mapping is torch.int32; expected torch.int64",
    ),
    "slots with gaps": (
        {"slot_mapping": torch.arange(32, 38)[::2]},
        "last stride of slot_mapping is 2",
    ),
    "fewer slots than tokens": ({"slot_mapping": torch.tensor([16, 17])}, "slot_mapping is 2; expected 3"),
    "fewer values than keys": ({"value": torch.ones(2, 2, 64)}, "value is 2; expected 3"),
    "keys of another type": ({"key": torch.ones(3, 2, 64).half()}, "torch.float16"),
    "keys without data": (
        {"key": torch.ones(3, 2, 64, device="meta")},
        "key is meta; expected cpu|cpu.*expected meta",
    ),
    "keys of other heads": ({"key": torch.ones(3, 4, 64)}, r"key is \(3, 4, 64\).*2, 64"),
    "scale for a cache that is not scaled": ({"k_scale": torch.ones(1)}, "k_scale.*None.*torch.float32"),
}


@pytest.mark.parametrize("what", WRITE_REFUSALS)
def test_a_cache_write_refuses_with_the_value_and_what_is_allowed(what: str) -> None:
    changes, message = WRITE_REFUSALS[what]
    with pytest.raises(ValueError, match=message):
        write(**changes)


@pytest.mark.parametrize("slot", [64, -2, 2**40], ids=["one past the end", "negative", "huge"])
@pytest.mark.parametrize("backend", DENSE_BACKENDS)
def test_debug_mode_finds_slots_outside_the_cache(backend: str, slot: int) -> None:
    require(backend, device_type="cpu")
    with (
        set_config(backend=backend, debug=True),
        pytest.raises(ValueError, match=rf"slot_mapping\[1\] is {slot}; expected -1 .*0 to 63"),
    ):
        write(slot_mapping=torch.tensor([16, slot, 40]))
    with set_config(backend=backend, debug=True):
        assert write()[:, 0, :, 0, 0].nonzero().tolist() == [[1, 0], [2, 8]]


def test_a_debug_variable_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNBACKEND_DEBUG", "yes")
    with pytest.raises(ValueError, match=r"ATTNBACKEND_DEBUG='yes'; allowed: 0 or 1"):
        attend()


BACKEND_REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a misspelt name": ("TRITON_ATN", {}, "unknown attention backend 'TRITON_ATN'; did you mean TRITON_ATTN"),
    "a name without a class": (
        "FLASH_ATTN_DIFFKV",
        {},
        "'FLASH_ATTN_DIFFKV' is not implemented; register a class.*or choose one of",
    ),
    "Triton on blocks of 8": ("TRITON_ATTN", {"block_size": 8}, r"block_size=8 \(allowed: multiples of 16\)"),
    "C++ on heads of 24": (
        "CPU_ATTN",
        {"head_size": 24},
        r"head_size=24 \(allowed: multiples of 8 from 32 to 256\)",
    ),
}


@pytest.mark.parametrize("what", BACKEND_REFUSALS)
def test_an_op_on_a_backend_that_cannot_serve_says_why(what: str) -> None:
    backend, changes, message = BACKEND_REFUSALS[what]
    with set_config(backend=backend), pytest.raises(ValueError, match=f"(.|\n)*{message}"):
        attend(case("no_lse", **changes))


# The engine


@cache
def tiny_llama() -> Any:
    pytest.importorskip("transformers")
    from model_zoo import make_model

    return make_model("llama")


ENGINE_OPTIONS = {
    "backend": "TORCH_SDPA",
    "compile": False,
    "num_blocks": 8,
    "max_num_seqs": 4,
    "max_model_len": 64,
}
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
GOOD_PROMPT = [5, 17, 33]

REQUEST_REFUSALS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "an empty prompt": ([], {}, r"prompt \[\] has no tokens; at least one"),
    "a prompt longer than the model": (
        list(range(3, 73)),
        {},
        "needs 76 tokens .*70.*max_model_len allows 64; shorten the prompt",
    ),
    "an answer longer than the model": (
        [5],
        {"max_tokens": 64},
        r"needs 65 tokens .*max_tokens 64.*lower max_tokens",
    ),
    "a token past the vocabulary": ([5, 96], {}, "prompt token id 96 at position 1.*allowed are 0 to 95"),
    "a negative token": ([-1], {}, "prompt token id -1 at position 0.*allowed are 0 to 95"),
    "text without a tokenizer": ("hello", {}, "'hello' is a string.*no tokenizer; give Engine a tokenizer"),
    "a stop token past the vocabulary": ([5], {"stop_token_ids": [96]}, "stop_token_ids 96.*0 to 95"),
}


@pytest.mark.parametrize("what", REQUEST_REFUSALS)
def test_the_engine_refuses_a_request_and_serves_the_others(what: str) -> None:
    prompt, changes, message = REQUEST_REFUSALS[what]
    params = SamplingParams(**({"max_tokens": 6, "ignore_eos": True} | changes))
    _refuse_while_serving(lambda engine: engine.add_request(prompt, params), message)


def test_a_request_that_the_cache_can_never_hold_is_refused_with_the_number_of_blocks() -> None:
    message = r"needs 3 cache blocks of 16 .*cache has 2 \(num_blocks=3.*raise num_blocks to at least 4"
    _refuse_while_serving(
        lambda engine: engine.add_request(list(range(3, 38)), GREEDY), message, num_blocks=3, max_model_len=64
    )


def test_a_request_given_twice_is_refused() -> None:
    def add_twice(engine: Engine) -> None:
        engine.abort(engine.add_request([7], GREEDY, request_id="same"))
        engine.add_request([7], GREEDY, request_id="same")
        engine.add_request([7], GREEDY, request_id="same")

    _refuse_while_serving(add_twice, "request id 'same' belongs to an unfinished request")


def _refuse_while_serving(act: Callable[[Engine], Any], message: str, **options: Any) -> None:
    """The act fails with the message while a request is being served, whose tokens stay as they would be."""
    engine = Engine(tiny_llama(), **(ENGINE_OPTIONS | options))
    expected = engine.generate([GOOD_PROMPT], GREEDY)[0].token_ids
    served = engine.add_request(GOOD_PROMPT, GREEDY)
    engine.step()
    with pytest.raises(ValueError, match=message):
        act(engine)
    finished = {}
    while engine.has_unfinished():
        finished |= {step.request_id: step.output for step in engine.step() if step.output}
    assert finished[served].token_ids == expected
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_usable


ENGINE_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt backend": (
        {"backend": "TORCH_SPDA"},
        "unknown attention backend 'TORCH_SPDA'; did you mean TORCH_SDPA",
    ),
    "a backend without a class": ({"backend": "FLASH_ATTN_DIFFKV"}, "'FLASH_ATTN_DIFFKV' is not implemented"),
    "Triton on blocks of 8": (
        {"backend": "TRITON_ATTN", "block_size": 8},
        r"block_size=8 \(allowed: multiples of 16\)",
    ),
    "blocks of nothing": ({"block_size": 0}, "block_size=0 must be at least 1"),
    "one block": ({"num_blocks": 1}, "num_blocks=1 must be at least 2, since block 0 is reserved"),
    "more positions than the model has": ({"max_model_len": 129}, r"max_model_len=129 is outside 1\.\.128"),
    "no requests": ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
    "no tokens": ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0 must be at least 1"),
    "an unknown cache type": ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype=fp9 .allowed: auto.*fp8_e5m2"),
    "an unknown graph mode": ({"cudagraph_mode": "SOMETIMES"}, "cudagraph_mode='SOMETIMES'"),
}


@pytest.mark.parametrize("what", ENGINE_REFUSALS)
def test_an_engine_is_refused_with_the_value_and_the_one_before_it_serves_on(what: str) -> None:
    changes, message = ENGINE_REFUSALS[what]
    _refuse_while_serving(lambda _: Engine(tiny_llama(), **(ENGINE_OPTIONS | changes)), f"(.|\n)*{message}")


def test_unknown_options_are_type_errors() -> None:
    with pytest.raises(TypeError, match=r"max_sequences"):
        Engine(tiny_llama(), max_sequences=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"max_length"):
        SamplingParams(max_length=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"backnd"), set_config(backnd="TORCH_SDPA"):
        pass


def test_what_is_no_model_is_refused_with_its_type() -> None:
    for thing in (None, "a/path", torch.nn.Linear(2, 2)):
        with pytest.raises(
            TypeError, match=f"{type(thing).__name__} is neither a transformers causal language model"
        ):
            Engine(thing)


def test_a_compiled_model_is_refused_with_the_remedy() -> None:
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    with pytest.raises(TypeError, match=r"what torch\.compile returned.*the model from before"):
        Engine(compiled)


def test_a_model_in_training_mode_is_refused_with_the_remedy() -> None:
    pytest.importorskip("transformers")
    from model_zoo import make_model

    with pytest.raises(ValueError, match=r"training mode; call model\.eval\(\)"):
        Engine(make_model("llama").train(), **ENGINE_OPTIONS)


def test_debug_mode_serves_as_usual() -> None:
    engine = Engine(tiny_llama(), **ENGINE_OPTIONS)
    expected = engine.generate([GOOD_PROMPT], GREEDY)[0].token_ids
    with set_config(debug=True):
        assert engine.generate([GOOD_PROMPT], GREEDY)[0].token_ids == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.add_request([5], request_id=5), "request_id=5 must be a string"),
        (lambda e: e.generate([[5]], {"max_tokens": 3}), r"must be SamplingParams\(\.\.\.\), or a list"),
        (lambda e: SamplingParams(stop_token_ids=5), "stop_token_ids=5 must be a list"),
    ],
    ids=["request_id", "sampling_params", "stop_token_ids"],
)
def test_a_wrong_type_is_named_with_what_is_wanted(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(Engine(tiny_llama(), **ENGINE_OPTIONS))
