"""Compilation in pieces: a graph is cut at attention, and each distinct piece compiled once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch.fx import GraphModule

from attnbackend.fx_passes.parts import Part
from attnbackend.fx_passes.split_at_attention import split_at_attention
from attnbackend.graph_breaks import run_between

__all__ = ["PieceCompiler"]

Compiled = Callable[..., Any]


class PieceCompiler:
    """Compiles graphs of Dynamo's piece by piece; attention and cache writes run as they are, between pieces.

    Args:
        compile_graph: compiles one graph, given fake inputs; the inner ``torch.compile`` backend.
    """

    def __init__(self, compile_graph: Callable[[GraphModule, Sequence[Any]], Compiled]) -> None:
        self._compile_graph = compile_graph
        self.num_pieces = 0
        self.num_compiled = 0
        """Of them; the others are like one that was compiled."""
        self.left_whole: list[str] = []
        """Why, for each graph that was not cut."""

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        split = split_at_attention(graph_module)
        if isinstance(split, str):
            self.left_whole.append(split)
            return self._compile_graph(graph_module, example_inputs)
        compiled: dict[Hashable, Compiled] = {}
        for part in split.parts:
            run = _between(part) if part.is_between else self._piece(part, compiled)
            delattr(split.graph_module, part.name)
            setattr(split.graph_module, part.name, run)
        # Dynamo restarts a trace by an exception out of the inner compiler; only what succeeds counts.
        self.num_pieces += sum(not part.is_between for part in split.parts)
        self.num_compiled += len(compiled)
        return split.graph_module.forward

    def _piece(self, part: Part, compiled: dict[Hashable, Compiled]) -> Compiled:
        signature = part.signature()
        if signature not in compiled:
            compiled[signature] = self._compile_graph(part.graph_module, part.example_inputs())
        return compiled[signature]


def _between(part: Part) -> Compiled:
    run = part.graph_module.forward
    return lambda *inputs: run_between(lambda arguments: run(*arguments), inputs)
