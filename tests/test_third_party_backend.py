"""What somebody with a kernel of their own does: one short class, and everything else follows from it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from op_cases import case

import attnbackend
from attnbackend import Engine, SamplingParams, resolve_backend, select_backend
from attnbackend.compiler import make_compiler
from attnbackend.testing import (
    assert_attention_within_rule,
    audit_op,
    kv_update_kwargs,
    kv_update_positional,
    make_batch,
    op_kwargs,
    op_positional,
)

MAX_LINES = 60


def define_my_attn() -> Any:
    """The whole of a third party's code; its lines are counted below."""
    import torch

    from attnbackend import (
        AttentionBackend,
        AttentionImpl,
        AttentionMetadata,
        AttentionMetadataBuilder,
        MultipleOf,
        register_backend,
    )

    class MyBuilder(AttentionMetadataBuilder[AttentionMetadata]):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return AttentionMetadata(common=common_attn_metadata)

    class MyImpl(AttentionImpl):
        def forward(self, query, key, value, kv_cache, attn_metadata, output, tensors):
            output.zero_()
            batch = attn_metadata.common
            starts, lens = batch.host_query_start_loc().tolist(), batch.host_seq_lens().tolist()
            for row, length in enumerate(lens):
                q = query[starts[row] : starts[row + 1]]
                if len(q) and length:
                    pages = batch.block_table[row, : -(-length // self.params.block_size)]
                    k, v = (kv_cache[pages, side].flatten(0, 1)[:length] for side in (0, 1))
                    output[starts[row] : starts[row + 1]] = self.attend(q, k, v)

        def attend(self, q, k, v):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            logits = torch.einsum("nhd,lhd->hnl", q, k) * self.params.scale
            hidden = torch.ones_like(logits[0], dtype=torch.bool).triu(len(k) - len(q) + 1)
            return torch.einsum("hnl,lhd->nhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v)

    @register_backend("MY_ATTN")
    class MyBackend(AttentionBackend):
        supported_dtypes = (torch.float32,)
        supported_head_sizes = (MultipleOf(8),)
        supported_block_sizes = (MultipleOf(1),)
        supported_device_types = ("cpu",)

        @staticmethod
        def get_name():
            return "MY_ATTN"

        @staticmethod
        def get_impl_cls():
            return MyImpl

        @staticmethod
        def get_builder_cls():
            return MyBuilder

        @staticmethod
        def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
            return (num_blocks, 2, block_size, num_kv_heads, head_size)

    return MyBackend


@pytest.fixture(scope="module", autouse=True)
def my_backend() -> Iterator[Any]:
    with attnbackend.registry_scope():
        yield define_my_attn()


def test_the_whole_backend_is_less_than_sixty_lines() -> None:
    body = inspect.getsource(define_my_attn).splitlines()[2:-1]
    assert len(body) < MAX_LINES, f"{len(body)} lines"


def test_it_gets_its_own_op_with_the_schema_of_the_agnostic_one() -> None:
    resolve_backend("MY_ATTN")
    schema = str(torch.ops.attnbackend.my_attn_forward.default._schema)
    assert schema.partition("(")[2] == str(torch.ops.attnbackend.attention.default._schema).partition("(")[2]
    assert not hasattr(torch.ops.attnbackend, "my_attn_kv_cache_update"), "it has no writer of its own"


def test_it_is_selected_by_name_and_never_by_itself(my_backend: Any) -> None:
    config = attention_config()
    assert select_backend(config, backend="MY_ATTN").backend is my_backend
    assert select_backend(config).name != "MY_ATTN"
    with attnbackend.set_config(backend="MY_ATTN"):
        assert select_backend(config).name == "MY_ATTN"


def test_the_environment_selects_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNBACKEND", "my_attn")
    assert select_backend(attention_config()).name == "MY_ATTN"


def attention_config(**changes: Any) -> attnbackend.AttentionSelectorConfig:
    plain = {"device_type": "cpu", "head_size": 64, "num_heads": 4, "num_kv_heads": 2, "dtype": torch.float32}
    return attnbackend.AttentionSelectorConfig.dense(**(plain | {"block_size": 16} | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": 7}, r"sliding_window=7 \(allowed: None"),
        ({"logits_soft_cap": 5.0}, r"logits_soft_cap=5\.0 \(allowed: 0\.0"),
        ({"dtype": torch.bfloat16}, r"dtype=bfloat16 \(allowed: float32\)"),
        ({"has_sinks": True}, r"has_sinks=True \(allowed: False"),
        ({"causal": False}, r"causal=False \(allowed: True"),
        ({"needs_lse": True}, r"needs_lse=True \(allowed: False"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_it_does_not_claim_is_refused_with_the_value(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"'MY_ATTN', named by the caller, cannot serve(.|\n)*{reason}"):
        select_backend(attention_config(**changes), backend="MY_ATTN")


def test_explain_and_the_list_of_backends_show_it() -> None:
    from attnbackend.cli.backend_facts import all_backend_facts

    explanation = attnbackend.explain(attention_config(), backend="MY_ATTN")
    assert explanation.selected == "MY_ATTN"
    assert "attnbackend::my_attn_forward" in explanation.row("MY_ATTN").op_names
    assert "MY_ATTN" in str(explanation)
    assert "MY_ATTN" in attnbackend.backend_names()
    (fact,) = [fact for fact in all_backend_facts() if fact.name == "MY_ATTN"]
    assert fact.status == "ready"
    assert fact.head_sizes == ["multiples of 8"]


CASES = {
    "mixed": case("no_lse"),
    "decode": case("no_lse", "decode"),
    "padded": case("no_lse", "padded"),
    "graph padding requests": case("no_lse", "graph_padding_requests"),
    "multi query": case("multi_query", lse=False),
    "heads before tokens": case("hnd", lse=False),
}


@pytest.mark.parametrize("name", CASES)
def test_its_op_is_within_the_relative_rule(name: str) -> None:
    batch = make_batch(CASES[name], "cpu")
    torch.ops.attnbackend.my_attn_forward(*op_positional(batch), **op_kwargs(batch))
    assert_attention_within_rule(batch)


@pytest.mark.parametrize("name", CASES)
def test_its_op_passes_opcheck_and_the_state_audit(name: str) -> None:
    op, batch = torch.ops.attnbackend.my_attn_forward.default, make_batch(CASES[name], "cpu")
    audit = audit_op(op, op_positional(batch), op_kwargs(batch))
    audit.assert_ok()
    assert audit.written == {"output"}
    for x in (batch.kv_cache, batch.query, batch.key, batch.value, batch.output):
        x.nan_to_num_(0.5)
    torch.library.opcheck(op, op_positional(batch), op_kwargs(batch))


def test_a_cache_write_goes_through_the_shared_writer() -> None:
    batch = make_batch(case("no_lse", new_tokens_written=False), "cpu")
    with attnbackend.set_config(backend="MY_ATTN"):
        op = torch.ops.attnbackend.kv_cache_update.default
        audit_op(op, kv_update_positional(batch), kv_update_kwargs(batch)).assert_ok()
    torch.ops.attnbackend.my_attn_forward(*op_positional(batch), **op_kwargs(batch))
    assert_attention_within_rule(batch)


GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 17, 33, 80], list(range(20, 51)), [9]]


def tokens_on(model: Any, backend: str, *, compile: bool) -> list[list[int]]:
    engine = Engine(
        model, backend=backend, compile=compile, num_blocks=8, max_num_seqs=4, max_num_batched_tokens=16,
        max_model_len=64,
    )  # fmt: skip
    tokens = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
    assert engine.runner.groups[0].backend.get_name() == backend  # type: ignore[attr-defined]
    return tokens


def test_it_serves_a_tiny_llama_eager_and_compiled(
    monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    pytest.importorskip("transformers")
    from model_zoo import make_model

    from attnbackend.integrations import transformers as integration

    monkeypatch.setattr(integration, "make_compiler", partial(make_compiler, compiler="aot_eager"))
    model = make_model("llama")
    expected = tokens_on(model, "TORCH_SDPA", compile=False)
    assert tokens_on(model, "MY_ATTN", compile=False) == expected
    assert tokens_on(model, "MY_ATTN", compile=True) == expected
    compiled = make_compiled_report(model)
    assert "attnbackend::attention -> attnbackend::my_attn_forward (named by the caller)" in compiled


def make_compiled_report(model: Any) -> str:
    engine = Engine(model, backend="MY_ATTN", compile=True, num_blocks=8, max_num_seqs=4, max_model_len=64)
    return str(engine.runner.model.compiler)  # type: ignore[attr-defined]


def test_an_engine_refuses_it_for_a_model_that_needs_more_than_it_claims() -> None:
    pytest.importorskip("transformers")
    from model_zoo import WINDOW, make_model

    with pytest.raises(ValueError, match=f"'MY_ATTN'.*cannot serve(.|\n)*sliding_window={WINDOW}"):
        Engine(make_model("mistral_window"), backend="MY_ATTN", compile=False, num_blocks=8)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_it_serves_a_real_language_model(compile: bool, fresh_compiler: None) -> None:
    from smollm import greedy_reference, smollm

    prompts = ("The capital of France is", "def fibonacci(n):\n    ")
    expected = [greedy_reference(prompt, 12) for prompt in prompts]
    engine = Engine(*smollm(), backend="MY_ATTN", compile=compile, num_blocks=16, max_model_len=64)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    assert [output.token_ids for output in outputs] == expected
