"""Functionalised calls undone, views and copies removed: only where nobody can tell."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graph_lines import renumbered
from test_pass_manager import exported
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from toy_models import make_stack, random_batch

import attnbackend
from attnbackend.fx_passes import (
    GraphPass,
    PassManager,
    PassReport,
    RemoveNoOps,
    UndoFunctionalization,
    graph_text,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")

_LIBRARY = torch.library.Library("cleanuptest", "DEF")
_LIBRARY.define("add_one(Tensor(a!) x) -> ()")
_LIBRARY.define("add_both(Tensor x, Tensor(a!) y, Tensor(b!)? z=None) -> Tensor")


def _add_one(x: Tensor) -> None:
    x.add_(1)


def _add_both(x: Tensor, y: Tensor, z: Tensor | None = None) -> Tensor:
    y.add_(x)
    if z is not None:
        z.add_(y)
    return x * 2


_LIBRARY.impl("add_one", _add_one, "CompositeExplicitAutograd")
_LIBRARY.impl("add_both", _add_both, "CompositeExplicitAutograd")
torch.library.register_fake("cleanuptest::add_one", lambda x: None, lib=_LIBRARY)
torch.library.register_fake("cleanuptest::add_both", lambda x, y, z=None: torch.empty_like(x), lib=_LIBRARY)
add_one = torch.ops.cleanuptest.add_one.default
add_both = torch.ops.cleanuptest.add_both.default
TABLE = {add_one: ("x",), add_both: ("y", "z")}


def _aot(compile_graph: Callable[..., Any]) -> Any:
    """As Inductor has it: writes of inputs are in the graph."""
    return aot_autograd(fw_compiler=compile_graph, keep_inference_input_mutations=True)


def compiled_with(
    function: Callable[..., Any], passes: list[GraphPass]
) -> tuple[Callable[..., Any], list[Any]]:
    """The function compiled to the graph that AOTAutograd makes, passes run on that; reports, and texts after."""
    seen: list[Any] = []

    def compile_graph(graph_module: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        seen.extend(PassManager(passes).run(graph_module))
        seen.append(graph_text(graph_module))
        return graph_module.forward

    return torch.compile(function, backend=_aot(compile_graph), fullgraph=True), seen


def check(function: Callable[..., Any], passes: list[GraphPass], *arguments: Tensor) -> list[Any]:
    """Same results and same inputs afterwards, compiled with passes and eagerly. Returns reports and text."""
    wanted, given = ([a.clone() for a in arguments] for _ in range(2))
    expected = function(*wanted)
    compiled, seen = compiled_with(function, passes)
    actual = compiled(*given)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(given, wanted)
    return seen


def in_place(x: Tensor, y: Tensor) -> Tensor:
    add_one(x)
    z = y * 0
    doubled = add_both(x, y, z)
    return doubled + z


def part_of_an_input(x: Tensor, y: Tensor) -> Tensor:
    add_one(x[1:])
    add_one(y.t()[0])
    return x * 2


def twice(x: Tensor, y: Tensor) -> Tensor:
    add_one(x)
    a = x * 2
    add_one(x)
    return a + x


@pytest.mark.parametrize(("function", "undone"), [(in_place, 2), (part_of_an_input, 2), (twice, 2)])
def test_calls_whose_old_values_nobody_needs_are_undone(function: Callable[..., Any], undone: int) -> None:
    report, text = check(function, [UndoFunctionalization(TABLE)], torch.ones(3, 3), torch.ones(3, 3))
    assert len(report.changes) == undone, str(report)
    assert "auto_functionalized" not in text
    assert "copy_" not in text


def test_the_graph_before_and_after() -> None:
    seen = check(in_place, [Look(), UndoFunctionalization(TABLE)], torch.ones(2, 2), torch.ones(2, 2))
    assert_expected_inline(
        renumbered(Look.text),
        """\
arg0_1: input
arg1_1: input
%0 = auto_functionalized_v2(cleanuptest::add_one, _x_base_index=0, _all_bases=[arg0_1])
%1 = getitem(%0, 1)
%2 = aten::mul.Tensor(arg1_1, 0)
%3 = auto_functionalized_v2(cleanuptest::add_both, x=%1, _y_base_index=0, _z_base_index=1, _all_bases=[arg1_1, %2])
%4 = getitem(%3, 0)
%5 = getitem(%3, 1)
%6 = getitem(%3, 2)
%7 = aten::add.Tensor(%4, %6)
%8 = aten::copy_(!arg0_1, %1)
%9 = aten::copy_(!arg1_1, %5)
return [%7]""",
    )
    assert_expected_inline(
        renumbered(seen[-1]),
        """\
arg0_1: input
arg1_1: input
%0 = cleanuptest::add_one(!arg0_1)
%1 = aten::mul.Tensor(arg1_1, 0)
%2 = cleanuptest::add_both(arg0_1, !arg1_1, !%1)
%3 = aten::add.Tensor(%2, %1)
return [%3]""",
    )


class Look(GraphPass):
    name, stage, text = "look", UndoFunctionalization.stage, ""

    def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
        Look.text = graph_text(graph_module)
        return PassReport(self.name)


def old_value_returned(x: Tensor, y: Tensor) -> Tensor:
    before = x.clone()
    add_one(x)
    return before + x


def lost_clone(x: Tensor, y: Tensor) -> Tensor:
    """``op(y, x)`` that writes x, of which y is a copy: the copy was lost once (measured on torch 2.13)."""
    copy = x.clone()
    return add_both(copy, x) + copy


def view_of_the_old_value(x: Tensor, y: Tensor) -> Tensor:
    fresh = y * 2
    part = fresh[0] * 1
    kept = fresh.view(-1)[:2].clone()
    add_one(fresh)
    return fresh[0] + part + kept.sum()


@pytest.mark.parametrize("function", [old_value_returned, lost_clone, view_of_the_old_value])
@pytest.mark.parametrize("others", [[], [RemoveNoOps()]], ids=["alone", "with RemoveNoOps"])
def test_an_old_value_that_is_read_later_stays(function: Callable[..., Any], others: list[GraphPass]) -> None:
    check(function, [UndoFunctionalization(TABLE), *others], torch.ones(3, 3), torch.full((3, 3), 2.0))


def _manual_graph(use_old: bool) -> torch.fx.GraphModule:
    """A functional graph that reads the old value after the call, as no tracer orders it."""

    def function(x: Tensor) -> Tensor:
        fresh = x * 2
        add_one(fresh)
        return fresh + 1

    compiled: dict[str, torch.fx.GraphModule] = {}

    def keep(graph_module: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        compiled["graph"] = graph_module
        return graph_module.forward

    torch.compile(function, backend=_aot(keep))(torch.ones(2))
    graph_module = compiled["graph"]

    if use_old:
        graph = graph_module.graph
        old = next(n for n in graph.nodes if n.name == "mul")
        add = next(n for n in graph.nodes if n.name == "add")
        add.args = (add.args[0], old)
    return graph_module


@pytest.mark.parametrize("use_old", [False, True])
def test_a_later_reader_of_the_old_value_forbids_it(use_old: bool) -> None:
    graph_module = _manual_graph(use_old)
    (report,) = PassManager([UndoFunctionalization(TABLE)]).run(graph_module)
    assert len(report.changes) == (0 if use_old else 1)
    assert ("add needs mul as it was before" in str(report)) == use_old


def test_ops_that_nobody_put_in_the_table_stay() -> None:
    report, _ = check(in_place, [UndoFunctionalization()], torch.ones(2, 2), torch.ones(2, 2))
    assert not report.changes
    assert "cleanuptest::add_one is not in the table" in str(report)


def test_a_table_that_contradicts_the_schema_is_refused() -> None:
    with pytest.raises(ValueError, match=r"add_both writes \['y', 'z'\] by its schema, and the table says"):
        UndoFunctionalization({add_both: ("y",)})


def test_a_program_comes_back_to_the_form_in_which_it_was_traced() -> None:
    program, traced = exported(num_layers=2, decompose=True), exported(num_layers=2)
    (report,) = PassManager([UndoFunctionalization()]).run_on(program)
    assert len(report.changes) == 4, str(report)

    def calls(p: torch.export.ExportedProgram) -> list[str]:
        lines = graph_text(p.graph_module).splitlines()
        return [line.split(" = ")[1].split("(")[0] for line in lines if "attnbackend::" in line]

    assert calls(program) == calls(traced)
    stack = make_stack(2)
    x, batch = random_batch(1)
    torch.testing.assert_close(program.module()(x, batch), stack(x, batch), rtol=1e-5, atol=1e-6)


def test_an_input_that_is_not_handed_back_is_not_written() -> None:
    program = exported(decompose=True)
    (report,) = PassManager([UndoFunctionalization()]).run(program.graph_module)  # its signature unknown
    assert "is an input, and nothing says that it is written" in str(report)
    assert [c.after for c in report.changes] == ["attnbackend::attention"], "its output is the graph's own"


def views(x: Tensor, y: Tensor) -> Tensor:
    a = x.view(3, 4).contiguous().expand(3, 4).reshape(3, 4)[:, :]
    b, c = a.split(2, dim=1)
    d, e = a.split(2, dim=1)
    return (b + e) * (c - d) + y.transpose(0, 1).clone().sum()


def test_no_ops_and_second_splits_go() -> None:
    report, text = check(views, [RemoveNoOps()], torch.rand(3, 4), torch.rand(3, 3))
    assert sum("same parts" in change.because for change in report.changes) <= 1
    assert text.count("aten::split") == 1
    assert "view" not in text
    assert "slice" not in text


def copy_before_a_write(x: Tensor, y: Tensor) -> Tensor:
    copy = y.clone()
    add_one(copy)
    return copy + y


def returned_view(x: Tensor, y: Tensor) -> Tensor:
    return x.view(3, 3)


def transposed_copy(x: Tensor, y: Tensor) -> Tensor:
    """Another layout, which a caller can see."""
    return x.t().contiguous() + 0


@pytest.mark.parametrize("function", [copy_before_a_write, returned_view, transposed_copy])
def test_copies_that_somebody_could_miss_stay(function: Callable[..., Any]) -> None:
    both = [UndoFunctionalization(TABLE), RemoveNoOps()]
    seen = check(function, both, torch.rand(3, 3), torch.rand(3, 3))
    assert not seen[1].changes


def written_by_out(x: Tensor) -> Tensor:
    copy = x.clone()
    torch.add(torch.ones(3, 3), 1, out=copy)
    return copy + x


def written_by_option(x: Tensor) -> Tensor:
    copy = x.clone()
    torch.nn.functional.relu(copy, inplace=True)
    return copy + x


def written_in_a_list(x: Tensor) -> Tensor:
    copy = x.clone()
    torch._foreach_mul_([copy], 2.0)
    return copy + x


def view_of_a_copy(x: Tensor) -> Tensor:
    return x.clone().view(9)


@pytest.mark.parametrize("function", [written_by_out, written_by_option, written_in_a_list, view_of_a_copy])
def test_copies_of_a_model_s_own_stay(function: Callable[[Tensor], Tensor]) -> None:
    """In Dynamo's graph, where writes have many spellings; what is returned is not the caller's input."""
    compiled: Any = attnbackend.compile(function, passes=[RemoveNoOps()], compiler="eager", fullgraph=True)
    x = torch.randn(3, 3)
    before = x.clone()
    result = compiled(x)
    torch.testing.assert_close(result, function(before))
    result.zero_()
    assert torch.equal(x, before)
    assert not compiled.attnbackend_compiler.reports[0].changes


def test_what_keeps_gradients_away_stays() -> None:
    x = torch.ones(3, requires_grad=True)
    step: Any = attnbackend.compile(
        lambda x: (x.detach() * x).sum(), passes=[RemoveNoOps()], compiler="aot_eager"
    )
    step(x).backward()
    assert torch.equal(x.grad, torch.ones(3))  # type: ignore[arg-type]


def test_splits_in_another_grad_mode_are_not_joined() -> None:
    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            apart = x.split(2)[0] * 2
        return apart, x.split(2)[0] * 3

    x = torch.ones(4, requires_grad=True)
    attnbackend.compile(parts, passes=[RemoveNoOps()], compiler="eager")(x)[1].sum().backward()
    assert torch.equal(x.grad, torch.tensor([3.0, 3.0, 0.0, 0.0]))  # type: ignore[arg-type]


def random_program(seed: int) -> Callable[..., Any]:
    """A few calls on a few tensors: views, copies, sums, writes in place, in any order."""
    choose = random.Random(seed)
    steps = [(choose.randrange(8), choose.randrange(6), choose.randrange(6)) for _ in range(9)]

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x, y, x * 2, y + 1]
        for kind, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            if kind == 0:
                add_one(a)
            elif kind == 1:
                values.append(add_both(a + 0, b, None))
            elif kind == 2:
                values.append(a.clone())
            elif kind == 3:
                values.append(a.view(3, 3))
            elif kind == 4:
                values.append(a.t())
            elif kind == 5:
                values.append(a + b)
            elif kind == 6:
                add_one(a[1:])
            else:
                values.append(sum(a.split(1, 0)))  # type: ignore[arg-type]
                values[-1] = values[-1].expand(3, 3) * 1
        return tuple(value.sum() for value in values)

    return program


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_keep_their_meaning(seed: int) -> None:
    passes = [UndoFunctionalization(TABLE), RemoveNoOps()]
    check(random_program(seed), passes, torch.rand(3, 3), torch.rand(3, 3))


def written_by_a_name_of_ops(x: Tensor) -> Tensor:
    copy = x.clone()
    torch.ops.cleanuptest.add_one(copy)
    return copy + x


def written_without_a_name(x: Tensor) -> Tensor:
    copy = x.clone()
    torch.nn.functional.relu(copy, True)
    return copy + x


def statistics(x: Tensor) -> Tensor:
    """The mean and variance that a norm keeps are written."""
    mean, variance = x[0].clone(), x[1].clone()
    normed = torch.nn.functional.batch_norm(x, mean, variance, training=True)
    return normed + mean + variance + x


def written_in_a_branch(x: Tensor) -> Tensor:
    copy = x.clone()

    def plus_one(y: Tensor) -> Tensor:
        add_one(y)
        return y + 1

    return torch.utils.checkpoint.checkpoint(plus_one, copy, use_reentrant=False) + copy + x


WRITERS = [written_by_a_name_of_ops, written_without_a_name, statistics, written_in_a_branch]


@pytest.mark.parametrize("function", WRITERS)
def test_writes_in_every_spelling_keep_copies(function: Callable[[Tensor], Tensor]) -> None:
    compiled: Any = attnbackend.compile(function, passes=[RemoveNoOps()], compiler="eager", fullgraph=True)
    x = torch.rand(3, 3)
    before = x.clone()
    torch.testing.assert_close(compiled(x), function(before.clone()))
    assert torch.equal(x, before)
    assert not compiled.attnbackend_compiler.reports[0].changes, str(compiled.attnbackend_compiler)


def test_a_copy_that_only_its_arguments_tell_of_stays() -> None:
    """In export's graph ``to`` may give its argument itself, and with ``copy=True`` does not."""

    class Copy(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            copy, same = x.to(torch.float32, copy=True), x.to(torch.float32)
            return copy.add_(1) + same

    program, x = torch.export.export(Copy(), (torch.rand(3),)), torch.rand(3)
    before = x.clone()
    PassManager([RemoveNoOps()]).run_on(program)
    torch.testing.assert_close(program.module()(x), before * 2 + 1)
    assert torch.equal(x, before)
