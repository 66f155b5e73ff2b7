"""CUDA graphs without a GPU: modes, sizes, dispatch, and what is checked at a replay."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from attnbackend import AttentionCGSupport, CUDAGraphMode
from attnbackend.cudagraph import (
    BatchDescriptor,
    BatchShape,
    CUDAGraphDispatcher,
    Dispatch,
    GraphedSteps,
    GraphSupport,
    LongLivedTensors,
    PreparedStep,
    RecordedGraphs,
    capture_sizes,
    decode_sizes,
    lowest_support,
    module_tensors,
    plan_tensors,
    resolve_cudagraph_mode,
)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
NEVER, SINGLE, UNIFORM, ALWAYS = AttentionCGSupport

# What can run for (support, split at attention, tokens a request of a decode): decode, mixed.
POSSIBLE = {
    (NEVER, False, 1): (NONE, NONE),
    (NEVER, True, 1): (PIECEWISE, PIECEWISE),
    (NEVER, False, 4): (NONE, NONE),
    (NEVER, True, 4): (PIECEWISE, PIECEWISE),
    (SINGLE, False, 1): (FULL, NONE),
    (SINGLE, True, 1): (FULL, PIECEWISE),
    (SINGLE, False, 4): (NONE, NONE),
    (SINGLE, True, 4): (PIECEWISE, PIECEWISE),
    (UNIFORM, False, 1): (FULL, NONE),
    (UNIFORM, True, 1): (FULL, PIECEWISE),
    (UNIFORM, False, 4): (FULL, NONE),
    (UNIFORM, True, 4): (FULL, PIECEWISE),
    (ALWAYS, False, 1): (FULL, FULL),
    (ALWAYS, True, 1): (FULL, FULL),
    (ALWAYS, False, 4): (FULL, FULL),
    (ALWAYS, True, 4): (FULL, FULL),
}


def resolve(requested: CUDAGraphMode | None, level: AttentionCGSupport, split: bool, q: int) -> CUDAGraphMode:
    return resolve_cudagraph_mode(
        requested, GraphSupport(level, "TOY"), splits_attention=split, uniform_query_len=q
    ).mode


@pytest.mark.parametrize(("level", "split", "q"), POSSIBLE)
def test_left_open_the_mode_is_all_that_is_possible(level: AttentionCGSupport, split: bool, q: int) -> None:
    mode = resolve(None, level, split, q)
    assert (mode.decode_mode, mode.mixed_mode) == POSSIBLE[level, split, q]


def can_run(mode: CUDAGraphMode, level: AttentionCGSupport, split: bool, q: int) -> bool:
    """The rule in words: pieces need a cut, whole decodes their support, whole mixed batches ALWAYS."""
    if PIECEWISE in (mode.decode_mode, mode.mixed_mode) and not split:
        return False
    if mode.decode_mode is FULL and level < (SINGLE if q == 1 else UNIFORM):
        return False
    return not (mode.mixed_mode is FULL and level < ALWAYS)


COMBINATIONS = list(itertools.product(CUDAGraphMode, AttentionCGSupport, (False, True), (1, 4)))


@pytest.mark.parametrize(("mode", "level", "split", "q"), COMBINATIONS)
def test_a_mode_that_is_named_runs_as_it_is_or_is_refused_with_what_can(
    mode: CUDAGraphMode, level: AttentionCGSupport, split: bool, q: int
) -> None:
    if can_run(mode, level, split, q):
        assert resolve(mode, level, split, q) is mode
        return
    with pytest.raises(ValueError, match=f"cudagraph_mode={mode.name} cannot run here") as error:
        resolve(mode, level, split, q)
    possible = CUDAGraphMode[str(error.value).partition("What can is ")[2].partition(";")[0]]
    assert can_run(possible, level, split, q)
    assert possible.decode_mode.value <= mode.decode_mode.value


@pytest.mark.parametrize(("level", "split", "q"), POSSIBLE)
def test_each_step_down_has_a_reason_that_names_the_backend_or_the_cut(
    level: AttentionCGSupport, split: bool, q: int
) -> None:
    found = resolve_cudagraph_mode(
        None, GraphSupport(level, "TOY"), splits_attention=split, uniform_query_len=q
    )
    assert bool(found.reasons) == (found.mode is not FULL)
    assert all("TOY has" in str(reason) or "not cut" in str(reason) for reason in found.reasons)


def test_the_refusal_says_what_is_missing_and_whose_it_is() -> None:
    with pytest.raises(ValueError, match="cannot run here") as error:
        resolve(FULL, UNIFORM, True, 1)
    assert str(error.value) == (
        "cudagraph_mode=FULL cannot run here:\n"
        "  mixed_mode=FULL (allowed: PIECEWISE, since FULL needs ALWAYS support for mixed batches; TOY has "
        "UNIFORM_BATCH)\n"
        "What can is FULL_AND_PIECEWISE; leave cudagraph_mode out to have what is possible chosen."
    )


def test_the_lowest_of_all_groups_decides_and_is_named() -> None:
    groups = [GraphSupport(ALWAYS, "A"), GraphSupport(SINGLE, "B"), GraphSupport(SINGLE, "C")]
    assert lowest_support(groups) == GraphSupport(SINGLE, "B")
    assert lowest_support([]).level is ALWAYS


@pytest.mark.parametrize("name", ["FULL", "full", FULL])
def test_modes_are_named_in_any_case(name: str | CUDAGraphMode) -> None:
    assert CUDAGraphMode.parse(name) is FULL


@pytest.mark.parametrize("name", ["SOMETIMES", "", 2])
def test_an_unknown_mode_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"cudagraph_mode=.* is unknown; allowed: NONE, PIECEWISE, FULL"):
        CUDAGraphMode.parse(name)


# Sizes.


@pytest.mark.parametrize("reqs", [1, 2, 3, 7, 8, 9, 63, 64, 255, 256, 257, 300])
@pytest.mark.parametrize("q", [1, 4])
def test_no_batch_of_decodes_is_larger_than_every_size(reqs: int, q: int) -> None:
    sizes = decode_sizes(capture_sizes(reqs, 8192, uniform_query_len=q), reqs, q)
    assert sizes[-1] == reqs * q
    assert list(sizes) == sorted(set(sizes))
    assert not [n for n in sizes if n % q]


def test_256_requests_have_35_sizes() -> None:
    assert len(capture_sizes(256, 8192)) == 35


def test_own_sizes_are_sorted_and_checked() -> None:
    assert capture_sizes(64, 2048, sizes=[8, 2, 8]) == (2, 8)
    for wrong in ([], [0], [2049], [1.5], [-1]):
        with pytest.raises(ValueError, match=r"cudagraph_capture_sizes=.*1\.\.2048"):
            capture_sizes(64, 2048, sizes=wrong)  # type: ignore[arg-type]


def test_sizes_that_hold_no_decode_step_are_refused() -> None:
    with pytest.raises(ValueError, match="leave no decode step of 4 tokens a request and at most 2 requests"):
        decode_sizes([100], 2, 4)


# Dispatch.


def dispatcher(mode: CUDAGraphMode, q: int = 1) -> CUDAGraphDispatcher:
    sizes = (1, 2, 4, 8, 16)
    return CUDAGraphDispatcher(mode, sizes, decode_sizes(sizes, 8 // q, q), 8, q)


def decode(reqs: int, q: int = 1) -> BatchShape:
    return BatchShape(reqs * q, reqs, q, True)


def mixed(tokens: int, reqs: int) -> BatchShape:
    return BatchShape(tokens, reqs, tokens - reqs + 1, False)


DISPATCHED = [
    (FULL, decode(3), Dispatch(FULL, BatchDescriptor(4, 4, True))),
    (FULL, mixed(3, 2), Dispatch(FULL, BatchDescriptor(4, 4))),
    (FULL, mixed(9, 2), Dispatch(FULL, BatchDescriptor(16, 8))),
    (FULL, mixed(17, 2), Dispatch(NONE, BatchDescriptor(17))),
    (DECODE_ONLY, decode(8), Dispatch(FULL, BatchDescriptor(8, 8, True))),
    (DECODE_ONLY, mixed(8, 2), Dispatch(NONE, BatchDescriptor(8))),
    (BOTH, decode(1), Dispatch(FULL, BatchDescriptor(1, 1, True))),
    (BOTH, mixed(5, 5), Dispatch(PIECEWISE, BatchDescriptor(8))),
    (PIECEWISE, decode(5), Dispatch(PIECEWISE, BatchDescriptor(8))),
    (NONE, decode(5), Dispatch(NONE, BatchDescriptor(5))),
]


@pytest.mark.parametrize(("mode", "batch", "expected"), DISPATCHED)
def test_a_batch_runs_from_the_smallest_graph_that_holds_it(
    mode: CUDAGraphMode, batch: BatchShape, expected: Dispatch
) -> None:
    assert dispatcher(mode).dispatch(batch) == expected
    assert expected.mode is NONE or expected in list(dispatcher(mode).graphs())


WHY_NOT_WHOLE = [
    (FULL, mixed(17, 2), ["num_tokens=17 (allowed: at most 16, the largest graph)"]),
    (PIECEWISE, decode(3), ["cudagraph_mode=PIECEWISE (allowed: one with FULL, for whole steps)"]),
    (NONE, decode(3), ["cudagraph_mode=NONE (allowed: one with FULL, for whole steps)"]),
    (
        BOTH,
        mixed(3, 2),
        ["all_decode=False (allowed: True: the whole graphs of FULL_AND_PIECEWISE hold decodes)"],
    ),
    (
        DECODE_ONLY,
        BatchShape(9, 9, 1, True),
        ["num_tokens=9 (allowed: at most 8, the largest graph)"],
    ),
    (
        BOTH,
        BatchShape(3, 2, 2, True),
        ["query lengths=3 of 2 requests (allowed: 1 of each request, as in the graphs of decodes)"],
    ),
]


@pytest.mark.parametrize(("mode", "batch", "reasons"), WHY_NOT_WHOLE)
def test_a_step_without_a_whole_graph_has_its_reasons(
    mode: CUDAGraphMode, batch: BatchShape, reasons: list[str]
) -> None:
    assert list(map(str, dispatcher(mode).reasons(batch))) == reasons


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_reasons_are_given_exactly_where_there_is_no_whole_graph(mode: CUDAGraphMode) -> None:
    for tokens, reqs, q in itertools.product(range(1, 20), range(1, 9), (1, 2)):
        for all_decode in (False, True):
            batch = BatchShape(tokens, min(reqs, tokens), min(q, tokens), all_decode)
            whole = dispatcher(mode).dispatch(batch).mode is FULL
            assert bool(dispatcher(mode).reasons(batch)) == (not whole)


def test_prompts_of_one_token_look_like_decodes_and_are_none() -> None:
    one_token_prompts = BatchShape(3, 3, 1, False)
    assert dispatcher(DECODE_ONLY).dispatch(one_token_prompts).mode is NONE
    assert dispatcher(FULL).dispatch(one_token_prompts).descriptor.uniform is False


def test_decodes_of_several_tokens_are_whole_requests() -> None:
    assert dispatcher(FULL, q=4).dispatch(decode(1, 4)).descriptor == BatchDescriptor(4, 1, True)
    some_without_drafts = BatchShape(5, 2, 4, True)
    assert dispatcher(FULL, q=4).dispatch(some_without_drafts).descriptor == BatchDescriptor(8, 8)


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_the_largest_graphs_of_each_kind_come_first(mode: CUDAGraphMode) -> None:
    kinds = itertools.groupby(dispatcher(mode).graphs(), key=lambda d: (d.mode, d.descriptor.uniform))
    for _, group in kinds:
        sizes = [d.descriptor.num_tokens for d in group]
        assert sizes == sorted(sizes, reverse=True)


# What a replay checks.


@dataclass
class ToyPlan:
    lengths: Tensor
    parts: tuple[Tensor, ...]
    lengths_cpu: Tensor
    longest: int


KEY = Dispatch(FULL, BatchDescriptor(4, 4, True))


def captured(long_lived: LongLivedTensors | None = None) -> tuple[GraphedSteps, dict[str, Tensor]]:
    tensors = {"x": torch.arange(4.0), "y": torch.ones(4)}
    steps = GraphedSteps(RecordedGraphs(), long_lived or LongLivedTensors({}))
    steps.capture(KEY, PreparedStep(tensors, lambda: tensors["x"] * 2))
    return steps, tensors


def replay(steps: GraphedSteps, tensors: dict[str, Tensor]) -> Tensor:
    return steps.replay(KEY, PreparedStep(tensors, lambda: torch.empty(0)))


def test_a_replay_computes_on_what_the_tensors_hold_now_at_one_address() -> None:
    steps, tensors = captured()
    tensors["x"].fill_(3.0)
    first = replay(steps, tensors)
    assert first.tolist() == [6.0] * 4
    tensors["x"].fill_(4.0)
    assert replay(steps, tensors).data_ptr() == first.data_ptr()
    assert first.tolist() == [8.0] * 4
    assert steps.num_replays == {KEY: 2}


MOVED = {
    "another address": (lambda x: x.clone(), "y has address"),
    "another shape": (lambda x: x[:3], r"y has shape \(3,\), \(4,\) when"),
    "another stride": (lambda x: x.as_strided((4,), (0,)), r"y has stride \(0,\)"),
    "gone": (lambda x: None, "y is gone"),
}


@pytest.mark.parametrize("change", MOVED)
def test_a_tensor_that_is_not_where_the_graph_reads_it_is_refused_by_name(change: str) -> None:
    steps, tensors = captured()
    function, message = MOVED[change]
    with pytest.raises(RuntimeError, match=message):
        replay(steps, {**tensors, "y": function(tensors["y"])})  # type: ignore[dict-item]


def test_a_tensor_that_was_not_there_at_capture_is_refused() -> None:
    steps, tensors = captured()
    with pytest.raises(RuntimeError, match="extra was not there when the graph was captured"):
        replay(steps, {**tensors, "extra": torch.ones(1)})


def test_an_equal_view_of_the_same_memory_is_the_same_tensor() -> None:
    steps, tensors = captured()
    output = replay(steps, {**tensors, "y": tensors["y"][:]})
    assert output.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_replaced_weight_is_noticed_within_one_round_of_replays() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    steps, tensors = captured(LongLivedTensors(module_tensors(model)))
    for _ in range(20):
        replay(steps, tensors)
    model[13].bias = nn.Parameter(torch.zeros(2))
    one_round = [lambda: replay(steps, tensors)] * -(-40 // 4)
    with pytest.raises(RuntimeError, match=r"13\.bias has address"):
        [replay() for replay in one_round]


def test_a_weight_written_in_place_is_no_fault() -> None:
    model = nn.Linear(2, 2)
    steps, tensors = captured(LongLivedTensors(module_tensors(model)))
    with torch.no_grad():
        model.weight.zero_()
    replay(steps, tensors)
    steps.long_lived.check_all(KEY)


def test_a_plan_s_tensors_are_found_by_path_and_the_host_s_left_out() -> None:
    plan = ToyPlan(torch.ones(1), (torch.ones(2), torch.ones(3)), torch.ones(4), 5)
    found = {name: len(x) for name, x in plan_tensors({"a": plan}, "plans")}
    assert found == {"plans['a'].lengths": 1, "plans['a'].parts[0]": 2, "plans['a'].parts[1]": 3}


def test_work_that_cannot_be_captured_says_for_which_batch() -> None:
    def fails() -> Tensor:
        raise ValueError("no")

    steps = GraphedSteps(RecordedGraphs(), LongLivedTensors({}))
    with pytest.raises(
        RuntimeError, match=r"capturing the graph of BatchDescriptor\(num_tokens=4.* failed: no"
    ):
        steps.capture(KEY, PreparedStep({}, fails))
    assert KEY not in steps
