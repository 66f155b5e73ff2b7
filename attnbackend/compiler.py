"""`attnbackend.compile`: ``torch.compile`` with attnbackend's passes in front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

from attnbackend._torch_compat import cache_key, compiler_backend
from attnbackend.fx_passes import GraphPass, PassManager, PassReport, SelectBackend, installed_passes
from attnbackend.fx_passes.select_backend import BackendChoice
from attnbackend.piece_compiler import PieceCompiler

__all__ = ["CompilerWithPasses", "compile", "compile_layers"]

C = TypeVar("C", bound=Callable[..., Any])


class CompilerWithPasses:
    """A ``torch.compile`` backend: runs passes on Dynamo's graph, then hands it to another backend."""

    def __init__(
        self, manager: PassManager, compiler: str, options: dict[str, Any] | None, in_pieces: bool = False
    ) -> None:
        self.manager = manager
        self.reports: list[PassReport] = []
        """What the passes did, graph by graph."""
        self.num_graphs = 0
        self._inner = compiler_backend(compiler, options)
        self.pieces = PieceCompiler(self._inner) if in_pieces else None
        """What compiles graphs in pieces; None: they are compiled whole."""

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        reports = self.manager.run(graph_module)
        with cache_key(f"attnbackend-passes:{self.manager.uuid()}"):
            compiled = (self.pieces or self._inner)(graph_module, example_inputs)
        # Dynamo restarts a trace by an exception out of the inner compiler; only what succeeds counts.
        self.reports += reports
        self.num_graphs += 1
        return compiled

    def __str__(self) -> str:
        return "\n".join(map(str, self.reports)) or "no graph was compiled yet"


def make_compiler(
    backend: BackendChoice = None, *, compiler: str = "inductor", passes: Sequence[GraphPass] | None = None,
    options: dict[str, Any] | None = None, strict: bool = False, dump_folder: str | Path | None = None,
    in_pieces: bool = False,
) -> CompilerWithPasses:  # fmt: skip
    """The ``torch.compile`` backend that `compile` uses; see there for the arguments."""
    chosen = [SelectBackend(backend), *installed_passes()] if passes is None else passes
    manager = PassManager(chosen, strict=strict, dump_folder=dump_folder)
    return CompilerWithPasses(manager, compiler, options, in_pieces)


def compile(
    model: C, *, backend: BackendChoice = None, compiler: str = "inductor",
    passes: Sequence[GraphPass] | None = None, options: dict[str, Any] | None = None, strict: bool = False,
    dump_folder: str | Path | None = None, in_pieces: bool = False, **kwargs: Any,
) -> C:  # fmt: skip
    """``torch.compile(model)`` with the selected backend's ops in the graph instead of agnostic ones.

    Args:
        model: a module or function.
        backend: an attention backend's name; a function from a node's `AttentionSelectorConfig` to a name,
            or to None; an order of preference such as `fx_passes.MeasuredTable`; or None, the automatic
            choice.
        compiler: the ``torch.compile`` backend that comes after the passes: "inductor", "aot_eager", ...
        passes: the passes to run; None: `SelectBackend`, then those of installed packages (entry points of
            the group ``attnbackend.graph_passes``).
        options: Inductor's options.
        strict: a pass that changes nothing in a graph is an error.
        dump_folder: where to write each graph before and after each pass, as text and HTML; None: nowhere.
        in_pieces: cut each graph at attention and cache writes and compile the pieces between, each distinct
            one once: equal layers of a whole model share what is compiled, and attention runs as it is, so
            that it can stay outside of CUDA graphs.
        kwargs: ``fullgraph``, ``dynamic``, ... of ``torch.compile``.

    Returns:
        The compiled model. Its attribute ``attnbackend_compiler`` tells what was done:
        ``print(compiled.attnbackend_compiler)``.
    """
    own = make_compiler(
        backend, compiler=compiler, passes=passes, options=options, strict=strict,
        dump_folder=dump_folder, in_pieces=in_pieces,
    )  # fmt: skip
    compiled: Any = torch.compile(model, backend=own, **kwargs)
    compiled.attnbackend_compiler = own
    return compiled


def compile_layers(
    layers: Sequence[torch.nn.Module], *, backend: BackendChoice = None, compiler: str = "inductor",
    passes: Sequence[GraphPass] | None = None, options: dict[str, Any] | None = None, strict: bool = False,
    dump_folder: str | Path | None = None, in_pieces: bool = False, **kwargs: Any,
) -> CompilerWithPasses:  # fmt: skip
    """Compiles each layer by itself, in place; equal layers share one compilation.

    Arguments as in `compile`. Returns the compiler, which tells what was done.
    """
    own = make_compiler(
        backend, compiler=compiler, passes=passes, options=options, strict=strict,
        dump_folder=dump_folder, in_pieces=in_pieces,
    )  # fmt: skip
    for layer in layers:
        layer.compile(backend=own, **kwargs)
    return own
