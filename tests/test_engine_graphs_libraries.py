"""Engines whose backends plan on the host, over stand-ins of their libraries.

The model's layers alternate between a window and all keys, so there are two groups with plans of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from library_fakes import FakeFlashBackend, FakeFlashInferBackend, FakeProvider, fake_flashinfer
from model_zoo import make_model
from random_serving import logits_of_all_steps

from attnbackend import CUDAGraphMode, registry_scope
from attnbackend.backends.flash_attn import backend as flash_backend
from attnbackend.backends.flash_attn import probe, resolution
from attnbackend.backends.flashinfer import planning
from attnbackend.backends.flashinfer.wrappers import DecodeGraph
from attnbackend.cudagraph import RecordedGraphs
from attnbackend.kernels import triton as kernels
from attnbackend.registry import register_backend
from attnbackend.runtime.engine_core import EngineCore
from attnbackend.runtime.model_runner import build_runner
from attnbackend.runtime.step_graphs import GraphOptions

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or kernels.unavailable_reason("cpu") is not None,
    reason="needs Triton's interpreter, on a machine without a GPU",
)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("gemma2", head_dim=64, attn_logit_softcapping=None).to(torch.bfloat16)


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
    monkeypatch.setattr(planning, "shared_workspace", lambda *_: torch.zeros(16, dtype=torch.uint8))
    monkeypatch.setattr(probe, "DEVICE", "cpu")
    monkeypatch.setattr(probe, "_FOUND", {})
    for module in (resolution, flash_backend):
        monkeypatch.setattr(module, "candidates", lambda: (FakeProvider(),))
    with registry_scope():
        for backend in (FakeFlashBackend, FakeFlashInferBackend):
            register_backend(backend.get_name())(backend)
        yield


def serve(model: Any, backend: str, mode: CUDAGraphMode) -> EngineCore:
    sizes = None if mode is CUDAGraphMode.NONE else [1, 2, 3, 8, 16]
    runner = build_runner(
        model, backend=backend, num_blocks=40, max_num_seqs=3, max_num_batched_tokens=16, compile=False,
        graphs=GraphOptions(mode=mode, library=lambda device: RecordedGraphs(), sizes=sizes),
    )  # fmt: skip
    assert len(runner.groups) == 2
    return EngineCore(runner, max_num_seqs=3, max_num_batched_tokens=16, eos_token_ids=())


def same_as_without_graphs(model: Any, backend: str, mode: CUDAGraphMode) -> bool:
    without = logits_of_all_steps(serve(model, backend, CUDAGraphMode.NONE), seed=8, steps=24)
    got = logits_of_all_steps(serve(model, backend, mode), seed=8, steps=24)
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(got, without, strict=True))


@pytest.mark.parametrize("backend", ["FAKE_FLASH", "FAKE_FLASHINFER"])
def test_plans_of_both_groups_are_those_of_the_step(model: Any, backend: str) -> None:
    """sglang #37975: one of several wrappers was not planned again, and replays kept to the capture."""
    assert same_as_without_graphs(model, backend, CUDAGraphMode.FULL_AND_PIECEWISE)


def test_a_group_that_is_not_planned_again_would_be_noticed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = DecodeGraph._plan

    def plans_of_one_group(graph: DecodeGraph, pages: Any) -> None:
        if not graph._is_planned or graph.params.sliding_window is None:
            plan(graph, pages)

    monkeypatch.setattr(DecodeGraph, "_plan", plans_of_one_group)
    assert not same_as_without_graphs(model, "FAKE_FLASHINFER", CUDAGraphMode.FULL_DECODE_ONLY)
