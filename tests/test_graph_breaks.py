"""Captures in pieces: what is cut out, in which order the parts run, and what a call between them sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attnbackend.cudagraph.aliases import alias_of
from attnbackend.cudagraph.graphs import CUDAPieces, RecordedGraphs
from attnbackend.forward_context import ForwardContext, get_forward_context, set_forward_context
from attnbackend.graph_breaks import run_between, set_breaks


class Call(NamedTuple):
    x: Tensor
    out: Tensor
    factor: float = 2.0


def scale(call: Call) -> None:
    call.out.copy_(call.x * call.factor)


class FakeGraph:
    def __init__(self, events: list[str], name: str) -> None:
        self.events, self.name = events, name

    def replay(self) -> None:
        self.events.append(f"replay {self.name}")

    def capture_end(self) -> None:
        self.events.append(f"give up {self.name}")


def pieces() -> tuple[CUDAPieces, list[str]]:
    events: list[str] = []
    names = iter("abc")

    def begin() -> Any:
        graph = FakeGraph(events, next(names))
        events.append(f"begin {graph.name}")
        return graph

    return CUDAPieces(begin, lambda graph: events.append(f"end {graph.name}")), events


def test_a_capture_is_ended_before_a_call_between_and_begun_again_behind_it() -> None:
    parts, events = pieces()
    x = torch.ones(2)
    with parts, set_breaks(parts):
        run_between(lambda call: events.append("call 1"), (x,))
        run_between(lambda call: events.append("call 2"), (x,))
    assert events == ["begin a", "end a", "call 1", "begin b", "end b", "call 2", "begin c", "end c"]
    events.clear()
    for part in parts.parts:
        part()
    assert events == ["replay a", "call 1", "replay b", "call 2", "replay c"]


def test_calls_within_a_call_are_part_of_it() -> None:
    parts, events = pieces()

    def outer(arguments: tuple[Tensor]) -> None:
        run_between(lambda inner: events.append("inner"), arguments)

    with parts, set_breaks(parts):
        run_between(outer, (torch.ones(1),))
    assert events == ["begin a", "end a", "inner", "begin b", "end b"]


def test_a_capture_that_fails_shows_its_own_error() -> None:
    parts, events = pieces()

    def fails(arguments: object) -> None:
        raise ValueError("of the call")

    with pytest.raises(ValueError, match="of the call"), parts, set_breaks(parts):
        run_between(fails, (torch.ones(1),))
    assert events == ["begin a", "end a", "give up a"]


def test_outside_of_captures_a_call_just_runs() -> None:
    call = Call(torch.ones(2), torch.zeros(2))
    run_between(scale, call)
    assert call.out.tolist() == [2.0, 2.0]


class Work:
    """Adds 1, calls between pieces, adds 10: over a tensor of its own that a step fills."""

    def __init__(self, between: Callable[[Call], None], device: str = "cpu") -> None:
        self.x, self.between = torch.ones(2, device=device), between

    def __call__(self) -> Tensor:
        call = Call(self.x + 1, torch.empty_like(self.x))
        run_between(self.between, call)
        return call.out + 10


def test_the_stand_in_gives_calls_what_pieces_computed_and_pieces_what_calls_wrote() -> None:
    work = Work(scale)
    graph = RecordedGraphs().capture(work, in_pieces=True)
    work.x.fill_(5.0)
    graph.replay()
    assert graph.output.tolist() == [22.0, 22.0]


def test_calls_between_pieces_keep_their_tensors_and_see_the_context_of_the_step() -> None:
    seen: list[tuple[int, ForwardContext | None]] = []

    def between(call: Call) -> None:
        seen.append((call.out.data_ptr(), get_forward_context()))
        scale(call)

    work, step = Work(between), ForwardContext()
    with set_forward_context(ForwardContext()) as captured:
        graph = RecordedGraphs().capture(work, in_pieces=True)
    with set_forward_context(step):
        graph.replay()
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] is captured
    assert seen[1][1] is step


def test_whole_graphs_have_no_breaks() -> None:
    work = Work(scale)
    graph = RecordedGraphs().capture(work)
    with set_breaks(pieces()[0]):
        graph.replay()
    assert graph.output.tolist() == [14.0, 14.0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn])
def test_an_alias_is_the_same_memory_and_does_not_keep_it(dtype: torch.dtype) -> None:
    whole = torch.arange(24, device="cuda").view(2, 3, 4).to(dtype)
    part = whole[:, 1:, ::2]
    alias = alias_of(part)
    assert (alias.data_ptr(), alias.shape, alias.stride()) == (part.data_ptr(), part.shape, part.stride())
    assert torch.equal(alias.float(), part.float())
    held = torch.cuda.memory_allocated()
    del whole, part
    assert torch.cuda.memory_allocated() < held


def test_what_has_no_memory_on_a_gpu_is_its_own_alias() -> None:
    for value in (None, 2.0, "auto", torch.ones(2)):
        assert alias_of(value) is value


@pytest.mark.gpu
def test_pieces_replay_on_new_contents_and_share_memory() -> None:
    from attnbackend.cudagraph import CUDAGraphs

    library = CUDAGraphs(torch.device("cuda"))
    works = [Work(scale, "cuda") for _ in range(3)]
    graphs = [library.capture(work, in_pieces=True, is_first=i == 0) for i, work in enumerate(works)]
    for round in range(3):
        for i, (work, graph) in enumerate(zip(works, graphs, strict=True)):
            work.x.fill_(float(10 * round + i))
            graph.replay()
            assert graph.output.tolist() == [2.0 * (10 * round + i + 1) + 10] * 2
