"""A short run of the soak on a CPU, and that it notices what it is there to notice."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from attnbackend import registry_scope
from attnbackend.cudagraph import RecordedGraphs
from attnbackend.registry import register_backend
from attnbackend.runtime import EngineCore, batch_buffers
from attnbackend.runtime.model_runner import build_runner
from attnbackend.runtime.step_graphs import GraphOptions
from attnbackend.testing.conformance.honest import HonestBackend
from benchmarks.soak import TOLERANCES, Oracle, SoakResult, Traffic, small_llama, soak, soak_engine

TRAFFIC = Traffic(
    requests=80, vocab_size=64, longest_prompt=60, longest_output=40, waiting=12, cancelled=0.1, checked=0.3
)


@pytest.fixture(scope="module")
def model() -> Any:
    return small_llama("cpu", torch.float32, vocab_size=64, num_hidden_layers=2, hidden_size=64)


@pytest.fixture(autouse=True)
def fresh_stance() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")


def run(model: Any, **options: Any) -> SoakResult:
    served = copy.deepcopy(model)
    engine = soak_engine(served, max_num_seqs=8, block_size=4, compile=False, **options)
    return soak(engine, TRAFFIC, Oracle(model, TOLERANCES[torch.float32]), warm_up=20)


@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": True}, {"speculative": "ngram", "num_speculative_tokens": 2}],
    ids=["plain", "ahead", "speculative"],
)
def test_no_fault_in_a_short_soak(model: Any, options: dict[str, Any]) -> None:
    result = run(model, **options)
    assert result.faults == []
    assert result.preemptions > 0
    assert {"refused", "abort", "length", "stop"} <= result.ended.keys()
    assert sum(result.ended.values()) == TRAFFIC.requests
    assert result.checked_tokens > 100


def test_no_fault_with_steps_from_graphs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory apart from the host's, as on a GPU: only what changed is copied, and graphs feed it."""
    monkeypatch.setattr(batch_buffers, "device_twin", lambda host, _: torch.zeros_like(host))
    with registry_scope():
        register_backend("HONEST")(HonestBackend)
        runner = build_runner(
            copy.deepcopy(model), backend="HONEST", max_num_seqs=4, max_num_batched_tokens=16, num_blocks=19,
            max_model_len=256, compile=False, graphs=GraphOptions(library=lambda device: RecordedGraphs()),
        )  # fmt: skip
        engine = EngineCore(runner, max_num_seqs=4, max_num_batched_tokens=16, async_scheduling=True)
        traffic = replace(TRAFFIC, requests=25, longest_output=12, waiting=3)
        result = soak(engine, traffic, Oracle(model, TOLERANCES[torch.float32]), warm_up=5)
    assert result.faults == []
    assert engine.steps_by_graph()["decode"] > 10


def test_a_wrong_token_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnbackend.runtime import started_step

    right, calls = started_step.sample, 0

    def spoiled(logits: Tensor, plan: Any, out: Any) -> None:
        nonlocal calls
        calls += 1
        right(logits, plan, out)
        if calls % 10 == 0:
            out.ids.add_(1).remainder_(64)

    monkeypatch.setattr(started_step, "sample", spoiled)
    assert any("behind the best" in fault for fault in run(model).faults)


def test_a_leak_of_blocks_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnbackend.runtime import BlockAllocator

    free, calls = BlockAllocator.free, 0

    def leaking(allocator: BlockAllocator, block_ids: list[int]) -> None:
        nonlocal calls
        calls += 1
        free(allocator, block_ids[1:] if calls == 50 else block_ids)

    monkeypatch.setattr(BlockAllocator, "free", leaking)
    assert any("blocks are not free" in fault for fault in run(model).faults)
