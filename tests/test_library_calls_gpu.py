"""Calls that C++ hands to the libraries themselves, equal to Python's bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from step_layers import attend, layer, other_layer, planned
from torch import Tensor

from attnbackend import resolve_backend, set_forward_context
from attnbackend.backends.flash_attn.impl import FlashAttentionImpl
from attnbackend.backends.flashinfer.compiled_call import wrapping_problem
from attnbackend.backends.flashinfer.impl import FlashInferImpl
from attnbackend.native_calls import python_only
from attnbackend.ops.library_calls import serve_library_calls
from attnbackend.testing import PagedBatch, assert_attention_within_rule

pytestmark = pytest.mark.gpu
BACKENDS = ("FLASH_ATTN", "FLASHINFER")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The outputs of calls that Python served."""
    outputs: list[Tensor] = []

    def watch(cls: Any) -> None:
        inner = cls.attend

        def watched(self: Any, *args: Any) -> None:
            outputs.append(args[5])
            inner(self, *args)

        monkeypatch.setattr(cls, "attend", watched)

    watch(FlashAttentionImpl)
    watch(FlashInferImpl)
    return outputs


def require(backend: str) -> None:
    if reason := resolve_backend(backend).unavailable_reason("cuda"):
        pytest.skip(reason)
    assert serve_library_calls(backend, "cuda") is None
    assert backend == "FLASH_ATTN" or wrapping_problem() is None


LENS: dict[str, dict[str, Any]] = {
    "decode": {"query_lens": (1, 1, 1), "context_lens": (0, 33, 70)},
    "mixed": {"query_lens": (1, 5, 17, 1), "context_lens": (40, 0, 20, 0)},
    "long_prompts": {"query_lens": (300, 20), "context_lens": (0, 0)},
}


def batch_of(name: str, **changes: Any) -> PagedBatch:
    return layer("no_lse", "decode", "cuda", **{"head_size": 128, **LENS[name], **changes})


@pytest.mark.parametrize("name", LENS)
@pytest.mark.parametrize(
    "changes", [{}, {"layout": "HND"}, {"num_layers": 2}, {"sliding_window": 7}], ids=str
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_layers_of_a_step(
    backend: str, name: str, changes: dict[str, Any], in_python: list[Tensor]
) -> None:
    require(backend)
    if backend == "FLASHINFER" and "sliding_window" in changes:
        pytest.skip("a kernel that takes a minute to compile, for nothing that is called differently")
    batch = batch_of(name, **changes)
    layers = [batch, other_layer(batch, 0.5), other_layer(batch, -2.0)]
    with set_forward_context(planned(batch, backend)):
        with python_only():
            expected = [attend(x, backend) for x in layers]
        in_python.clear()
        own = [attend(x, backend) for x in layers]
        torch.cuda.synchronize()
        assert len(in_python) == 1
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
        attend(batch, backend)
        assert_attention_within_rule(batch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_holds_calls_that_skip_python(backend: str, in_python: list[Tensor]) -> None:
    require(backend)
    batch = batch_of("decode")
    layers = [batch, other_layer(batch, 0.5), other_layer(batch, -2.0)]
    with set_forward_context(planned(batch, backend, captured=True)):
        with python_only():
            expected = [attend(x, backend) for x in layers]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        in_python.clear()
        with torch.cuda.graph(graph):
            for x in layers:
                attend(x, backend)
        assert len(in_python) == 1
    for x in layers:
        x.poison_outputs()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x.output, y) for x, y in zip(layers, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_go_to_the_current_stream(backend: str, in_python: list[Tensor]) -> None:
    require(backend)
    batch = batch_of("decode")
    with set_forward_context(planned(batch, backend)):
        expected = attend(batch, backend)
        attend(batch, backend)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        batch.query.mul_(2.0)
        doubled = attend(batch, backend)
        batch.query.mul_(0.5)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            batch.query.mul_(2.0)  # seen only by what waits for it
            own = attend(batch, backend)
        torch.cuda.synchronize()
    assert len(in_python) == 1
    assert torch.equal(own, doubled)
    assert not torch.equal(own, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_plan_is_learned(backend: str, in_python: list[Tensor]) -> None:
    require(backend)
    for lens in ((0, 33, 70), (5, 90, 2)):
        batch = batch_of("decode", context_lens=lens)
        with set_forward_context(planned(batch, backend)):
            for _ in range(3):
                attend(batch, backend)
            assert_attention_within_rule(batch)
    assert len(in_python) == 2
