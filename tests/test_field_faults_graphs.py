"""Faults that people met around CUDA graphs in comparable systems, each with a small input, without a GPU.

Where a fault was reported is said beside its test. What a replay checks is in ``test_cudagraph.py``, replays
themselves are in ``test_triton_graphs.py`` and ``test_engine_graphs.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnbackend import CUDAGraphMode
from attnbackend.backends.flashinfer import wrappers
from attnbackend.cudagraph import (
    BatchDescriptor,
    BatchShape,
    CUDAGraphDispatcher,
    Dispatch,
    capture_sizes,
    decode_sizes,
)
from attnbackend.testing import AttentionCase, make_batch
from attnbackend.testing.conformance import open_subject
from attnbackend.testing.conformance.planned import PersistentBatch, make_builder, plan_tensors

FULL = CUDAGraphMode.FULL


def dispatcher(
    mode: CUDAGraphMode, reqs: int, q: int, sizes: tuple[int, ...] | None = None
) -> CUDAGraphDispatcher:
    sizes = sizes or capture_sizes(reqs, 8192, uniform_query_len=q)
    return CUDAGraphDispatcher(mode, sizes, decode_sizes(sizes, reqs, q), reqs, q)


@pytest.mark.parametrize(("reqs", "q"), [(100, 1), (6, 7)])
def test_the_largest_decode_step_has_a_graph_of_its_own_size(reqs: int, q: int) -> None:
    """vllm #57355: plain grids stopped at 96 of 100 tokens and at 40 of 42."""
    assert capture_sizes(reqs, 8192, uniform_query_len=q)[-1] == reqs * q
    found = dispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, reqs, q).dispatch(
        BatchShape(reqs * q, reqs, q, True)
    )
    assert found == Dispatch(FULL, BatchDescriptor(reqs * q, reqs, True))


def test_a_smaller_piecewise_graph_does_not_win_over_a_full_one() -> None:
    """vllm #57355: 12 tokens of 4 requests ran piecewise in 16, not in full in 18."""
    both = dispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, 8, 3, (1, 2, 4, 8, 16, 24))
    assert both.dispatch(BatchShape(12, 4, 3, True)) == Dispatch(FULL, BatchDescriptor(18, 6, True))


@pytest.mark.parametrize(
    ("batch", "q"),
    [
        (BatchShape(4, 1, 4, False), 4),
        (BatchShape(8, 2, 4, False), 4),
        (BatchShape(1, 1, 1, False), 1),
    ],
    ids=["a prompt as long as a decode", "such a prompt beside a decode", "a prompt of one token"],
)
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_a_prompt_in_the_shape_of_a_decode_is_not_replayed_as_one(
    batch: BatchShape, q: int, mode: CUDAGraphMode
) -> None:
    """vllm #49918: a prompt of K + 1 tokens replayed the graph of decodes."""
    found = dispatcher(mode, 4, q).dispatch(batch)
    assert found.mode is not FULL
    assert not found.descriptor.uniform
    assert dispatcher(mode, 4, q).dispatch(batch._replace(all_decode=True)).mode is FULL


def test_a_larger_workspace_leaves_the_captured_one_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #46067: growing the scratch freed an address that earlier graphs held."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: zeros(size, dtype=dtype))
    wrappers._workspace.cache_clear()
    try:
        captured = wrappers._workspace(1 << 10, 0)
        address = captured.data_ptr()
        del captured
        grown = wrappers._workspace(1 << 11, 0)
        assert grown.data_ptr() != address
        assert wrappers._workspace(1 << 10, 0).data_ptr() == address
    finally:
        wrappers._workspace.cache_clear()


@pytest.mark.parametrize("backend", ["TRITON_ATTN", "TORCH_SDPA"])
def test_every_plan_of_a_step_keeps_its_tensors_and_takes_new_contents(backend: str) -> None:
    """sglang #37975: replays kept the bounds of the capture: one of several wrappers was not planned."""
    case = AttentionCase(query_lens=(1, 1), context_lens=(0, 0), head_size=32)
    first, second = (make_batch(replace(case, context_lens=lens)) for lens in ((0, 0), (4, 8)))
    with open_subject(backend) as subject:
        buffers = PersistentBatch.for_batches([first, second], subject.device)
        layers = [replace(case, sliding_window=window) for window in (4, 8)]
        builders = [make_builder(subject, layer, buffers.limits) for layer in layers]
        before = [dict(plan_tensors(b.build(0, buffers.fill(first)))) for b in builders]
        places = [{name: x.data_ptr() for name, x in plan.items()} for plan in before]
        now = [dict(plan_tensors(b.build(0, buffers.fill(second)))) for b in builders]
    assert [{name: x.data_ptr() for name, x in plan.items()} for plan in now] == places
    for plan in now:
        lens = next(x for name, x in plan.items() if name.endswith("seq_lens"))
        assert lens.tolist() == [5, 9]
