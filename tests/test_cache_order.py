"""Writes of one memory, and readers, keep their order, whichever form a pass gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from attnbackend.fx_passes import (
    CacheOrderError,
    Change,
    GraphPass,
    PassManager,
    PassReport,
    RemoveNoOps,
    SelectBackend,
    Stage,
    UndoFunctionalization,
)
from attnbackend.fx_passes.nodes import find_ops

HEADS, SIZE, TOKENS, BLOCKS = 2, 16, 3, 4
write, attend = torch.ops.attnbackend.kv_cache_update, torch.ops.attnbackend.attention
Damage = Callable[[Graph], None]


class Told(GraphPass):
    """Does to a graph what it is told."""

    name, stage = "told", Stage.CLEAN

    def __init__(self, act: Damage) -> None:
        self._act = act

    def run(self, graph_module: GraphModule) -> PassReport:
        self._act(graph_module.graph)
        return PassReport(self.name, (Change("a", "b", "c", "d"),))


class Twice(nn.Module):
    """Two keys for the same slots, each read by a query of its own."""

    def __init__(self, second: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._second = second

    def forward(
        self, q: Tensor, k: Tensor, cache: Tensor, slots: Tensor, batch: tuple[Tensor, ...]
    ) -> Tensor:
        one, two = torch.empty_like(q), torch.empty_like(q)
        write(k * 2, k + 1, cache, slots)
        attend(q, None, None, cache, one, *batch, scale=1.0)
        write(k * 3, k + 2, self._second(cache), slots.view(-1))
        attend(q.neg(), None, None, self._second(cache), two, *batch, scale=1.0)
        return one - two


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "the same": lambda cache: cache,
    "a view": lambda cache: cache.view(cache.shape),
    "a part of it that is all": lambda cache: cache[:],
    "another order of dimensions": lambda cache: cache.transpose(2, 3).transpose(2, 3),
}
"""How the second write gets the cache of the first."""


def given() -> tuple[Any, ...]:
    torch.manual_seed(0)
    cache = torch.rand(BLOCKS, 2, 16, HEADS, SIZE)
    starts, lens = torch.tensor([0, TOKENS], dtype=torch.int32), torch.tensor([TOKENS], dtype=torch.int32)
    q, k = torch.rand(TOKENS, HEADS, SIZE), torch.rand(TOKENS, HEADS, SIZE)
    table = torch.ones(1, 1, dtype=torch.int32)
    return q, k, cache, torch.arange(16, 16 + TOKENS), (starts, lens, table)


def program(way: str, decompose: bool = False) -> torch.export.ExportedProgram:
    found = torch.export.export(Twice(WAYS[way]), given())
    return found.run_decompositions() if decompose else found


def calls(graph: Graph, what: Any) -> list[Node]:
    return [op.node for op in find_ops(graph) if op.op is what.default]


def swap_calls(graph: Graph) -> None:
    first, second = calls(graph, write)
    before = first.prev
    second.append(first)
    before.append(second)
    _sort(graph)


def _sort(graph: Graph) -> None:
    """What a call needs, right before it."""
    for node in list(graph.nodes):
        for source in node.all_input_nodes:
            if not source < node:
                node.prepend(source)


def swap_arguments(graph: Graph) -> None:
    first, second = calls(graph, write)
    _sort_before(first, second.args[:2])
    first.args, second.args = (*second.args[:2], *first.args[2:]), (*first.args[:2], *second.args[2:])


def _sort_before(first: Node, nodes: Any) -> None:
    for node in nodes:
        first.prepend(node)


def swap_keys_alone(graph: Graph) -> None:
    first, second = calls(graph, write)
    _sort_before(first, second.args[:1])
    first.args, second.args = (second.args[0], *first.args[1:]), (first.args[0], *second.args[1:])


def swap_what_arguments_are_made_of(graph: Graph) -> None:
    first, second = calls(graph, write)
    for one, other in zip(first.args[:2], second.args[:2], strict=True):
        assert isinstance(one, Node)
        assert isinstance(other, Node)
        one.args, other.args = other.args, one.args


def renew_swapped(graph: Graph) -> None:
    """Calls of other nodes, on copies of the arguments."""
    first, second = calls(graph, write)
    _sort_before(first, second.args[:2])
    for old, source in ((first, second.args), (second, first.args)):
        with graph.inserting_before(old):
            copies = [graph.call_function(torch.ops.aten.clone.default, (x,)) for x in source[:2]]
            for copy, x in zip(copies, source[:2], strict=True):
                copy.meta = dict(x.meta)  # type: ignore[union-attr]
            graph.call_function(write.default, (*copies, *old.args[2:]), dict(old.kwargs))
    for old in (first, second):
        graph.erase_node(old)


def swap_readers(graph: Graph) -> None:
    first, second = calls(graph, attend)
    _sort_before(first, [second.args[0]])
    (q, *one), (r, *two) = first.args, second.args
    first.args, second.args = (r, *one[:3], two[3], *one[4:]), (q, *two[:3], one[3], *two[4:])


DAMAGE: list[Damage] = [
    swap_calls, swap_arguments, swap_keys_alone, swap_what_arguments_are_made_of, renew_swapped, swap_readers,
]  # fmt: skip


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("damage", DAMAGE)
def test_swapped_calls_are_found_out(way: str, damage: Damage) -> None:
    with pytest.raises(CacheOrderError, match=r"'told' changed(.|\n)*moved: cache: "):
        PassManager([Told(damage)]).run_on(program(way))


def renew(graph: Graph) -> None:
    """All calls anew, as a pass makes them that builds a graph of its own."""
    for node in list(graph.nodes):
        if node.op == "call_function":
            with graph.inserting_before(node):
                new = graph.node_copy(node, lambda n: n)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def rename_slots(graph: Graph) -> None:
    """A view of the slots goes, and comes where there was none."""
    first, second = calls(graph, write)
    assert isinstance(second.args[3], Node)
    second.update_arg(3, second.args[3].args[0])
    with graph.inserting_before(first):
        copy = graph.call_function(torch.ops.aten.clone.default, (first.args[3],))
        copy.meta = dict(first.args[3].meta)  # type: ignore[union-attr]
    first.update_arg(3, copy)


def rewrite_one_key(graph: Graph) -> None:
    """What one of the writes is given is computed in another way."""
    key = calls(graph, write)[0].args[0]
    assert isinstance(key, Node)
    with graph.inserting_before(key):
        new = graph.call_function(torch.ops.aten.add.Tensor, (key.args[0], key.args[0]))
    new.meta = dict(key.meta)
    key.replace_all_uses_with(new)


@pytest.mark.parametrize("change", [renew, rename_slots, rewrite_one_key])
def test_calls_that_stay_in_their_places_are_let_pass(way: str, change: Damage) -> None:
    PassManager([Told(change)]).run_on(program(way))


@pytest.mark.parametrize("decompose", [False, True], ids=["as_traced", "functionalised"])
def test_our_own_passes_keep_the_order(way: str, decompose: bool) -> None:
    found, arguments, expected = program(way, decompose), given(), given()
    PassManager([UndoFunctionalization(), SelectBackend("TORCH_SDPA"), RemoveNoOps()]).run_on(found)
    torch.testing.assert_close(found.module()(*arguments), Twice(WAYS[way])(*expected))
    torch.testing.assert_close(arguments[2], expected[2])


@pytest.mark.parametrize("decompose", [False, True], ids=["as_traced", "functionalised"])
def test_caches_that_a_graph_makes_itself(decompose: bool) -> None:
    """Nobody sees what is in them when the graph ends; what is written and read before counts."""

    class Own(Twice):
        def forward(self, q: Tensor, k: Tensor, cache: Tensor, *rest: Any) -> Tensor:
            return super().forward(q, k, cache * 2, *rest)

    found = torch.export.export(Own(WAYS["the same"]), given())
    found = found.run_decompositions() if decompose else found
    undone, _ = PassManager([UndoFunctionalization(), SelectBackend("TORCH_SDPA")]).run_on(found)
    assert len(undone.changes) == 4 * decompose
    torch.testing.assert_close(found.module()(*given()), Own(WAYS["the same"])(*given()))


def test_caches_that_share_memory_are_one() -> None:
    """Inputs of one storage, as Dynamo sees layers that share an allocation."""

    def two(k: Tensor, one: Tensor, other: Tensor, slots: Tensor) -> None:
        write(k * 2, k, one, slots)
        write(k * 3, k, other, slots)

    def swap(graph: Graph) -> None:
        first, second = calls(graph, write)
        second.append(first)

    def run(act: Damage) -> None:
        _, k, cache, slots, _ = given()
        torch._dynamo.reset()
        torch.compile(two, backend=lambda gm, _: PassManager([Told(act)]).run(gm) and gm.forward)(
            k, cache.view(-1)[: cache.numel()].view(cache.shape), cache, slots
        )

    run(lambda graph: None)
    with pytest.raises(Exception, match="moved"):
        run(swap)


def gather_late(graph: Graph) -> None:
    """Elements that were picked before a write are picked after it."""
    picked = next(n for n in graph.nodes if n.target is torch.ops.aten.index.Tensor)
    calls(graph, write)[0].append(picked)
    _sort(graph)


def test_elements_that_are_picked_are_a_read() -> None:
    class Pick(nn.Module):
        def forward(self, k: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
            old = cache.view(-1, HEADS, SIZE)[slots]
            write(k, k, cache, slots)
            return old + 1

    _, k, cache, slots, _ = given()
    found = torch.export.export(Pick(), (k, cache, slots))
    with pytest.raises(CacheOrderError, match="read by aten"):
        PassManager([Told(gather_late)]).run_on(found)
