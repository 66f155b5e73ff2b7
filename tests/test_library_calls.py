"""Calls that C++ hands to a library's op: those that Python would make, as long as nothing says otherwise.

The library is a stand-in with the schema of FlashAttention 3, on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from library_fakes import FakeFlashBackend, FakeProvider
from library_op_fakes import LIBRARY, SCHEMA, OpProvider, storage_of
from op_cases import forward_op
from step_layers import attend, layer, other_layer, planned, twin
from torch import Tensor

from attnbackend import (
    ForwardContext,
    register_backend,
    resolve_backend,
    set_config,
    set_forward_context,
)
from attnbackend.backends.flash_attn import backend as flash_backend
from attnbackend.backends.flash_attn import probe, resolution
from attnbackend.backends.flash_attn.forward_op import ForwardOp
from attnbackend.backends.flash_attn.impl import FlashAttentionImpl
from attnbackend.backends.flash_attn.planning import FlashAttentionMetadata
from attnbackend.kernels import triton
from attnbackend.kernels.cpu import BuildError
from attnbackend.native_calls import python_only
from attnbackend.ops import library_calls
from attnbackend.registry import registry_scope
from attnbackend.testing import PagedBatch, op_kwargs, op_positional

REASON = library_calls.serve_library_calls("FAKE_FLASH", "cpu")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    provider = OpProvider()
    monkeypatch.setattr(probe, "DEVICE", "cpu")
    monkeypatch.setattr(probe, "_FOUND", {})
    for name in ("made", "results"):
        monkeypatch.setattr(OpProvider, name, [])
    monkeypatch.setattr(FakeProvider, "calls", [])
    for module in (resolution, flash_backend):
        monkeypatch.setattr(module, "candidates", lambda: (provider,))
    with registry_scope(), torch.no_grad():
        register_backend("FAKE_FLASH")(FakeFlashBackend)
        resolve_backend("FAKE_FLASH")
        yield


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The outputs of calls that Python served."""
    outputs: list[Tensor] = []
    attend = FlashAttentionImpl.attend

    def watched(self: FlashAttentionImpl, *args: Any) -> None:
        outputs.append(args[5])
        attend(self, *args)

    monkeypatch.setattr(FlashAttentionImpl, "attend", watched)
    return outputs


FEATURES = ("no_lse", "window", "soft_cap", "multi_query", "not_causal", "hnd", "layers_interleaved",
            "keys_before_values", "strided_tensors", "block_size_32", "scale")  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_calls_like_one_before_are_the_library_s_and_equal_python_s(
    feature: str, in_python: list[Tensor]
) -> None:
    batch = layer(feature)
    step, layers = planned(batch), [batch, other_layer(batch, 0.5), other_layer(batch, -2.0)]
    with set_forward_context(step), python_only():
        expected = [attend(x) for x in layers]
    in_python.clear()
    with set_forward_context(step):
        own = [attend(x) for x in layers]
    assert len(in_python) == 1
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
    assert not torch.equal(own[0], own[1])


def test_prompts_without_context_are_read_contiguously_as_in_python(in_python: list[Tensor]) -> None:
    batch = layer("no_lse", "prefill", query_lens=(300, 20), context_lens=(0, 0))
    other = other_layer(batch, 0.5)
    with set_forward_context(planned(batch)):
        attend(batch)
        own = attend(other)
        assert len(in_python) == 1
        assert OpProvider.made[-1].block_table is None
        with python_only():
            assert torch.equal(own, attend(other))


@pytest.mark.parametrize(
    ("feature", "batch"),
    [("plain", "decode"), ("sinks", "decode"), ("no_lse", "padded"), ("no_lse", "graph_padding_requests")],
)
def test_what_needs_more_than_the_library_is_python_s(
    feature: str, batch: str, in_python: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[Tensor] = []
    monkeypatch.setattr(triton, "finish_attention", lambda output, *args, **more: finished.append(output))
    asked = layer(feature, batch, lse=feature == "plain")
    with set_forward_context(planned(asked)):
        for _ in range(3):
            attend(asked)
    assert len(in_python) == len(finished) == 3


def test_a_call_without_a_plan_is_python_s_each_time(in_python: list[Tensor]) -> None:
    batch = layer()
    with set_forward_context(planned(batch)):
        attend(batch)
        attend(batch)
        assert len(in_python) == 1
        for _ in range(2):
            attend(batch, group=1)
            attend(batch, group=-1)
            attend(batch, seq_lens=batch.seq_lens.clone())
        assert len(in_python) == 7
    attend(batch)
    attend(batch)
    assert len(in_python) == 9


def test_each_step_has_its_own_plan(in_python: list[Tensor]) -> None:
    batch = layer()
    for longest in (103, 150, 151):
        with set_forward_context(planned(batch, max_seq_len=longest)):
            for _ in range(3):
                attend(batch)
                assert OpProvider.made[-1].max_seq_len == longest
    assert len(in_python) == 3


def test_a_step_inside_a_step_has_its_own_plan(in_python: list[Tensor]) -> None:
    batch = layer()
    with set_forward_context(planned(batch, max_seq_len=150)):
        attend(batch)
        with set_forward_context(planned(batch, max_seq_len=160)):
            attend(batch)
            assert OpProvider.made[-1].max_seq_len == 160
        attend(batch)
        assert OpProvider.made[-1].max_seq_len == 150
    assert len(in_python) == 3


def _strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], 1)[:, 0]


CHANGES: dict[str, Callable[[PagedBatch], dict[str, Any]]] = {
    "padding tokens": lambda b: {
        name: torch.cat([getattr(b, name)] * 2) for name in ("query", "key", "value", "output")
    },
    "strides of the query": lambda b: {"query": _strided(b.query)},
    "strides of the output": lambda b: {"output": _strided(b.output)},
    "no new tokens": lambda b: {"key": None, "value": None},
    "a smaller cache": lambda b: {"kv_cache": twin(b.kv_cache, 1.0)[:-1]},
    "another cache layout": lambda b: {"kv_cache": b.kv_cache.transpose(2, 3).contiguous().transpose(2, 3)},
    "scale": lambda b: {"scale": 0.75},
    "not causal": lambda b: {"causal": False},
    "a window": lambda b: {"sliding_window": 5},
    "a soft cap": lambda b: {"logits_soft_cap": 5.0},
    "another name of the cache's type": lambda b: {"kv_cache_dtype": "bfloat16"},
    "another group": lambda b: {"group": 3},
    "lengths elsewhere": lambda b: {"seq_lens": b.seq_lens.clone()},
    "a table elsewhere": lambda b: {"block_table": b.block_table.clone()},
    "starts elsewhere": lambda b: {"query_start_loc": b.query_start_loc.clone()},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_differs_in_more_than_addresses_is_python_s(
    change: str, in_python: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "finish_attention", lambda *args, **more: None)
    batch = layer()
    with set_forward_context(planned(batch)):
        attend(batch)
        attend(batch, **CHANGES[change](batch))
        assert len(in_python) == 2
        attend(batch)
    assert len(in_python) == 2


def test_another_type_is_another_call(in_python: list[Tensor]) -> None:
    batch = layer()
    other = other_layer(batch, 1.0)
    names = ("query", "key", "value", "kv_cache", "output")
    tensors: dict[str, Any] = {name: getattr(other, name).half() for name in names}
    with set_forward_context(planned(batch)):
        attend(batch)
        attend(replace(other, **tensors))
    assert len(in_python) == 2


def test_choices_and_the_registry_count_at_once(
    in_python: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, calls = layer(), 0

    def expect_python(more: int = 1) -> None:
        nonlocal calls
        attend(batch)
        calls += more
        assert len(in_python) == calls

    with set_forward_context(planned(batch)):
        expect_python()
        expect_python(0)
        with set_config(flash_attn="vllm_fa3"):
            expect_python()
            expect_python(0)
        expect_python()
        with set_config(debug=True):
            expect_python()
            expect_python()
        expect_python()
        for variable, value in (("ATTNBACKEND_FLASH_ATTN", "3"), ("ATTNBACKEND_FLASH_ATTN_FP8", "1")):
            monkeypatch.setenv(variable, value)
            expect_python()
            expect_python(0)
        monkeypatch.setenv("ATTNBACKEND_DEBUG", "1")
        expect_python()
        expect_python()
        monkeypatch.setenv("ATTNBACKEND_DEBUG", "0")
        expect_python(0)
        with registry_scope():
            pass
        expect_python()
        with torch.enable_grad():
            expect_python()
            expect_python()
        expect_python(0)


def test_what_is_done_around_an_implementation_is_done_each_time() -> None:
    batch, scale = layer(), torch.tensor([0.5])
    stored = torch.empty_like(batch.output, dtype=torch.float8_e4m3fn)
    with set_forward_context(planned(batch)):
        expected = (attend(batch).float() / scale).to(torch.float8_e4m3fn)
        for _ in range(3):
            stored.view(torch.uint8).fill_(1)
            attend(batch, output=stored, output_scale=scale)
            assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))


def test_a_class_that_adds_to_another_s_work_is_called() -> None:
    class More(FakeFlashBackend):
        @staticmethod
        def get_impl_cls() -> type[FlashAttentionImpl]:
            return MoreImpl

    class MoreImpl(FlashAttentionImpl):
        def forward(self, *args: Any) -> None:
            super().forward(*args)
            args[5].add_(3.0)

    batch = layer()
    with set_forward_context(planned(batch)):
        expected = attend(batch).add_(3.0)
        with registry_scope():
            register_backend("FAKE_FLASH", override=True)(More)
            for _ in range(3):
                assert torch.equal(attend(batch), expected)


def test_another_class_under_the_name_is_called() -> None:
    class Other(FakeFlashBackend):
        @staticmethod
        def get_impl_cls() -> type[FlashAttentionImpl]:
            return OtherImpl

    class OtherImpl(FlashAttentionImpl):
        def forward(self, *args: Any) -> None:
            args[5].fill_(3.0)

    batch = layer()
    with set_forward_context(planned(batch)):
        attend(batch)
        with registry_scope():
            register_backend("FAKE_FLASH", override=True)(Other)
            for _ in range(2):
                assert torch.all(attend(batch) == 3.0)
        assert not torch.any(attend(batch) == 3.0)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("on fire"),
        LookupError("gone"),
        torch.OutOfMemoryError("10 GiB"),
        KeyboardInterrupt("now"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_library_raises_is_raised(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = layer()
    with set_forward_context(planned(batch)):
        attend(batch)
        expected = attend(batch)

        def fail(*args: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(FakeProvider, "attend", fail)
            with pytest.raises(type(error)) as raised:
                attend(batch)
        assert raised.value is error
        assert torch.equal(attend(batch), expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_interrupts_a_call_once_is_not_tried_again(
    error: type[BaseException], in_python: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = layer()
    with set_forward_context(planned(batch)):
        attend(batch)
        with monkeypatch.context() as patch:
            patch.setattr(FakeProvider, "attend", Mock(side_effect=[error, None]))
            with pytest.raises(error):
                attend(batch)
        attend(batch)
    assert len(in_python) == 1


def test_refusals_are_those_of_python(in_python: list[Tensor]) -> None:
    batch = layer()
    with set_forward_context(planned(batch)):
        attend(batch)
        for changes, message in (
            ({"query": batch.query[..., :32]}, "head size of kv_cache is 64"),
            ({"output": batch.output[:1]}, "rows of output is 1"),
            ({"sliding_window": 0}, "sliding_window is 0"),
        ):
            with pytest.raises(ValueError, match=message):
                attend(batch, **changes)


def test_nothing_is_kept_longer_than_a_step() -> None:
    batch = layer()
    context = planned(batch)
    plan = context.plans[0, "FAKE_FLASH"]
    assert isinstance(plan, FlashAttentionMetadata)
    assert plan.schedule is not None
    schedule = storage_of(plan.schedule)
    attend(batch)
    tried = len(OpProvider.results)
    with set_forward_context(context):
        for _ in range(5):
            attend(batch)
    assert len(OpProvider.results) == tried + 5
    assert all(result.expired() for result in OpProvider.results)
    del context, plan
    with set_forward_context(ForwardContext()):
        attend(batch)  # the next call forgets
    for kept in (OpProvider.made, FakeProvider.calls):
        kept.clear()
    assert schedule.expired()


def test_arguments_are_let_go(in_python: list[Tensor]) -> None:
    batch = layer()
    with set_forward_context(planned(batch)):
        attend(batch)
        other = other_layer(batch, 1.0)
        gone = [storage_of(getattr(other, name)) for name in ("query", "key", "kv_cache", "output")]
        attend(other)
        assert len(in_python) == 1
        for kept in (OpProvider.made, FakeProvider.calls, in_python):
            kept.clear()
        del other
        assert all(x.expired() for x in gone)


def test_opcheck_passes_under_a_plan(in_python: list[Tensor]) -> None:
    batch = layer()
    for x in (batch.kv_cache, batch.query, batch.key, batch.value, batch.output):
        x.copy_(x.nan_to_num(0.5))
    with set_forward_context(planned(batch)):
        attend(batch)
        torch.library.opcheck(forward_op("FAKE_FLASH"), op_positional(batch), op_kwargs(batch) | {"group": 0})


def test_compiled_and_exported_code_is_served_alike(in_python: list[Tensor]) -> None:
    batch = layer()
    op, others = forward_op("FAKE_FLASH"), op_positional(batch)[1:]

    class Layers(torch.nn.Module):
        def forward(self, query: Tensor, output: Tensor) -> Tensor:
            for _ in range(2):
                op(query, *others[:3], output, *others[4:], scale=batch.case.softmax_scale, group=0)
                query = query + output
            return query

    with set_forward_context(planned(batch)), python_only():
        expected = Layers()(batch.query, torch.empty_like(batch.query))
    exported = torch.export.export(Layers(), (batch.query, torch.empty_like(batch.query)), strict=False)
    for model in (torch.compile(Layers(), backend="aot_eager", fullgraph=True), exported.module()):
        in_python.clear()
        with set_forward_context(planned(batch)):
            for _ in range(2):
                assert torch.equal(model(batch.query, torch.empty_like(batch.query)), expected)
        assert len(in_python) == 1


def test_threads_have_steps_of_their_own() -> None:
    batches = [layer(seed=seed) for seed in range(3)]
    with python_only():
        expected = [attend(batch) for batch in batches]

    def work(batch: PagedBatch, own: list[Tensor]) -> None:
        with torch.no_grad():
            for _ in range(10):
                with set_forward_context(planned(batch)):
                    own.extend(attend(batch) for _ in range(3))

    results: list[list[Tensor]] = [[] for _ in batches]
    threads = [threading.Thread(target=work, args=pair) for pair in zip(batches, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own, exact in zip(results, expected, strict=True):
        assert len(own) == 30
        assert all(torch.equal(x, exact) for x in own)


def test_an_unknown_schema_is_left_to_the_library_s_function() -> None:
    for name, schema in (
        ("one_more", SCHEMA.replace("int cp_rank", "int cp_rank, int unheard_of")),
        ("one_less", SCHEMA.replace("Tensor? s_aux, ", "")),
    ):
        LIBRARY.define(f"{name}{schema}")
        op = getattr(torch.ops.attnbackend_fake_fa3, name).default
        assert ForwardOp.of(op) is None
    LIBRARY.define(f"optional{SCHEMA.replace('int cp_rank', 'int cp_rank, Tensor? unheard_of')}")
    assert ForwardOp.of(torch.ops.attnbackend_fake_fa3.optional.default) is not None


def test_where_it_does_not_build_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise BuildError("no headers")

    monkeypatch.setattr(library_calls, "load_library_calls", load)
    monkeypatch.setattr(library_calls, "_loaded", library_calls._loaded.__wrapped__)
    assert library_calls._served.__wrapped__("FAKE_FLASH", "cpu") == "no headers"
