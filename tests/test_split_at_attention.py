"""Graphs cut at attention: what is a part, which parts are alike, what is left whole, and equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_models import HEAD_SIZE, HEADS, HIDDEN, Stack, caches, make_stack, random_batch, reset_caches

import attnbackend
from attnbackend._torch_compat import compiler_backend
from attnbackend.fx_passes.nodes import find_ops
from attnbackend.fx_passes.parts import SplitGraph
from attnbackend.fx_passes.split_at_attention import split_at_attention
from attnbackend.graph_breaks import Breaks, set_breaks
from attnbackend.layers import BatchTensors
from attnbackend.piece_compiler import PieceCompiler

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def in_pieces(model: nn.Module, **options: Any) -> Any:
    return attnbackend.compile(
        model, backend="TORCH_SDPA", compiler="aot_eager", in_pieces=True, fullgraph=True, **options
    )


def eager(model: nn.Module, seed: int, num_tokens: int | None = None) -> Tensor:
    with attnbackend.set_config(backend="TORCH_SDPA"):
        return model(*random_batch(seed, num_tokens))


def split_of(model: nn.Module) -> SplitGraph | str:
    found: list[SplitGraph | str] = []

    def backend(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append(split_at_attention(graph_module))
        return graph_module.forward

    torch.compile(model, backend=backend, fullgraph=True, dynamic=True)(*random_batch(0))
    return found[-1]


def test_pieces_and_attention_alternate_and_a_cache_write_is_with_its_attention() -> None:
    split = split_of(make_stack(3))
    assert isinstance(split, SplitGraph)
    assert [part.is_between for part in split.parts] == [False, True] * 3 + [False]
    for part in split.parts:
        ops = [found.op.name() for found in find_ops(part.graph_module.graph)]
        expected = ["attnbackend::kv_cache_update", "attnbackend::attention"] if part.is_between else []
        assert ops == expected


@pytest.mark.parametrize("num_layers", [1, 4])
def test_results_and_caches_are_those_of_eager_and_equal_pieces_compile_once(num_layers: int) -> None:
    model, reference = make_stack(num_layers), make_stack(num_layers)
    compiled = in_pieces(model)
    for seed, num_tokens in ((1, None), (2, None), (3, 1), (4, None)):
        wanted = eager(reference, seed, num_tokens)
        torch.testing.assert_close(compiled(*random_batch(seed, num_tokens)), wanted, rtol=0, atol=0)
    for cache, expected in zip(caches(model), caches(reference), strict=True):
        torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)
    pieces = compiled.attnbackend_compiler.pieces
    graphs = compiled.attnbackend_compiler.num_graphs
    assert graphs >= 2, "many tokens, and one"
    assert pieces.num_pieces == graphs * (num_layers + 1)
    assert pieces.num_compiled == graphs * min(num_layers + 1, 3)


@pytest.mark.slow
def test_inductor_compiles_equal_pieces_once_and_traces_no_layer_again_for_its_floats() -> None:
    """torch traces a second time where a float cannot become a tensor: once for all, not once a piece."""
    model, pieces, traces = (
        Around(floats_of_modules, 4),
        PieceCompiler(compiler_backend("inductor", None)),
        [],
    )

    def compiler(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        traces.append(graph_module)
        return pieces(graph_module, inputs)

    compiled = torch.compile(model, backend=compiler, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        got = compiled(*random_batch(1))
        reset_caches(model.stack)
        torch.testing.assert_close(got, model(*random_batch(1)), rtol=1e-5, atol=1e-6)
    assert (pieces.num_pieces, pieces.num_compiled) == (5, 3)
    assert len(traces) <= 2


def test_pieces_of_other_widths_or_other_code_are_compiled_by_themselves() -> None:
    model = make_stack(4)
    first, second, third, last = model.layers
    del first, last
    second.out = nn.Sequential(nn.Linear(HEADS * HEAD_SIZE, HIDDEN, bias=False), nn.Tanh())
    third.out = nn.Linear(HEADS * HEAD_SIZE, HIDDEN, bias=True)
    compiled = in_pieces(model.requires_grad_(False))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*random_batch(1)), eager(model, 1), rtol=0, atol=0)
    assert compiled.attnbackend_compiler.pieces.num_compiled == 5 * compiled.attnbackend_compiler.num_graphs


class Counting(Breaks):
    def __init__(self) -> None:
        self.calls = 0

    def between(self, run: Callable[[Any], None], arguments: Any) -> None:
        self.calls += 1
        run(arguments)


@pytest.mark.parametrize(("cut", "calls"), [(True, 3), (False, 6)])
def test_a_capture_is_broken_once_a_layer_and_without_the_cut_at_every_op(cut: bool, calls: int) -> None:
    model = make_stack(3)
    compiled = attnbackend.compile(model, compiler="aot_eager", in_pieces=cut, fullgraph=True)
    counting = Counting()
    with torch.inference_mode():
        compiled(*random_batch(1))
        with set_breaks(counting):
            compiled(*random_batch(1))
    assert counting.calls == calls


class Around(nn.Module):
    """A stack inside of something."""

    def __init__(self, body: Callable[[Stack, Tensor, BatchTensors], Tensor], num_layers: int = 2) -> None:
        super().__init__()
        self.stack, self.body = make_stack(num_layers), body
        self.stack.epsilon = 1e-3  # type: ignore[assignment]

    def forward(self, x: Tensor, batch: BatchTensors) -> Tensor:
        return self.body(self.stack, x, batch)


def shapes_from_before(stack: Stack, x: Tensor, batch: BatchTensors) -> Tensor:
    doubled = torch.cat([x, x])
    y = stack(x, batch)
    return torch.cat([y, y]).view(doubled.shape) + doubled[: doubled.size(0)]


def values_from_before(stack: Stack, x: Tensor, batch: BatchTensors) -> Tensor:
    early, late = (x * 2).split([8, HIDDEN - 8], dim=-1)
    return stack(x, batch) + torch.cat([late, early], dim=-1)


def floats_of_modules(stack: Stack, x: Tensor, batch: BatchTensors) -> Tensor:
    """Dynamo makes such floats inputs, and `rms_norm` wants them as numbers."""
    for layer in stack.layers:
        x = layer(torch.rms_norm(x, (HIDDEN,), eps=stack.epsilon), batch) * (2 * stack.epsilon)
    return x


def autocast_before(stack: Stack, x: Tensor, batch: BatchTensors) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        x = x * 2
    return stack(x, batch)


@pytest.mark.parametrize("body", [shapes_from_before, values_from_before, floats_of_modules, autocast_before])
def test_what_crosses_a_cut_arrives(body: Any) -> None:
    model = Around(body)
    compiled = in_pieces(model)
    with torch.inference_mode():
        for seed in (1, 2, 3):
            got = compiled(*random_batch(seed))
            reset_caches(model.stack)
            torch.testing.assert_close(got, eager(model, seed), rtol=0, atol=0)
    assert compiled.attnbackend_compiler.pieces.num_pieces > 0
    assert not compiled.attnbackend_compiler.pieces.left_whole


def autocast_across(stack: Stack, x: Tensor, batch: BatchTensors) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return stack(x, batch)


def grad_mode(stack: Stack, x: Tensor, batch: BatchTensors) -> Tensor:
    with torch.no_grad():
        y = x * 2
    return stack(y, batch)


def written_under_another_name(stack: Stack, x: Tensor, batch: BatchTensors) -> Tensor:
    base = x * 2
    row = base[0]
    y = stack(x, batch)
    base.add_(1.0)
    return y + row


def number_from_the_device(stack: Stack, x: Tensor, batch: BatchTensors) -> Tensor:
    return stack(x, batch) * x[0, 0].item()


def no_attention(stack: Stack, x: Tensor, batch: BatchTensors) -> Tensor:
    return x * 2


WHOLE = {
    autocast_across: "autocast goes on across attention",
    grad_mode: "grad mode changes in it",
    written_under_another_name: "is the same memory",
    number_from_the_device: "is a number that is known only when the graph runs",
    no_attention: "there is no attention in the graph",
}


@pytest.mark.parametrize("body", WHOLE)
def test_a_graph_that_cannot_be_cut_is_compiled_whole_and_says_why(body: Any) -> None:
    model = Around(body)
    compiled = in_pieces(model)
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)
    with torch.set_grad_enabled(body is grad_mode), scalars:
        got = compiled(*random_batch(1))
        reset_caches(model.stack)
        torch.testing.assert_close(got, eager(model, 1), rtol=0, atol=0)
    pieces = compiled.attnbackend_compiler.pieces
    assert pieces.num_pieces == 0
    assert all(WHOLE[body] in reason for reason in pieces.left_whole)


def test_the_other_name_of_a_cache_may_be_written() -> None:
    """A view of an input stays a view of it across a cut."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = make_stack(1)

        def forward(self, x: Tensor, batch: BatchTensors) -> Tensor:
            same = self.stack.layers[0].attention.kv_cache[:]
            self.stack.layers[0].attention.kv_cache = same
            return self.stack(x, batch)

    split = split_of(Layer())
    assert isinstance(split, SplitGraph)
