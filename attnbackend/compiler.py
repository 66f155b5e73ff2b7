"""`attnbackend.compile`: ``torch.compile`` with attnbackend's passes in front."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

from attnbackend._torch_compat import cache_key, compiler_backend
from attnbackend.fx_passes import Change, GraphPass, PassManager, PassReport, SelectBackend, installed_passes
from attnbackend.fx_passes.retarget import (
    OpSite,
    calls_in,
    check_fused_writes,
    check_not_empty,
    check_sites,
    op_sites,
)
from attnbackend.fx_passes.select_backend import BackendChoice
from attnbackend.ops.generate import backend_op
from attnbackend.ops.library import ATTENTION, KV_CACHE_UPDATE
from attnbackend.ops.redirect import redirects
from attnbackend.piece_compiler import PieceCompiler

__all__ = ["CompilerWithPasses", "compile", "compile_layers"]

C = TypeVar("C", bound=Callable[..., Any])


class CompilerWithPasses:
    """A ``torch.compile`` backend: runs passes on Dynamo's graph, then hands it to another backend."""

    def __init__(
        self, manager: PassManager, compiler: str, options: dict[str, Any] | None, in_pieces: bool = False
    ) -> None:
        self.__name__ = "attnbackend"  # as torch's errors say
        self.manager = manager
        self.reports: list[PassReport] = []
        """What the passes did, graph by graph."""
        self.num_graphs = 0
        self.sites: list[OpSite] = []
        """Every attention and cache write in the graphs."""
        self.calls: Counter[str] = Counter()
        """What the graphs call, and how often."""
        self.retargeted_to: str | None = None
        self._readers: dict[str | None, str] = {}
        self._writers: dict[str | None, str] = {}
        self._inner = compiler_backend(compiler, options)
        self.pieces = PieceCompiler(self._inner) if in_pieces else None
        """What compiles graphs in pieces; None: they are compiled whole."""

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        reports = self.manager.run(graph_module)
        sites, calls = op_sites(graph_module), calls_in(graph_module)
        if self.retargeted_to is not None:
            self._redirect(sites, self.retargeted_to, calls)
        with cache_key(f"attnbackend-passes:{self.manager.uuid()}"):
            compiled = (self.pieces or self._inner)(graph_module, example_inputs)
        # Dynamo restarts a trace by an exception out of the inner compiler; only what succeeds counts.
        self.reports += reports
        self.sites += sites
        self.calls += calls
        self.num_graphs += 1
        return self._redirectable(compiled)

    def _redirectable(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if not self._readers:
                return compiled(*args)
            with redirects(self._readers, self._writers):
                return compiled(*args)

        return run

    def retarget(self, backend: str) -> list[Change]:
        """See `fx_passes.retarget`."""
        if self.num_graphs:
            check_not_empty(self.sites, self.calls)
        changes = self._redirect(self.sites, backend, self.calls)
        self.retargeted_to = backend
        return changes

    def _redirect(
        self, sites: Sequence[OpSite], backend: str, calls: Mapping[str, int]
    ) -> list[Change]:  # fmt: skip
        check_sites(sites, backend)
        check_fused_writes(calls, backend)
        self._readers.update({site.backend: backend for site in sites if site.role is ATTENTION})
        if backend_op(backend, KV_CACHE_UPDATE) is not None:
            self._writers.update({site.backend: backend for site in sites if site.role is KV_CACHE_UPDATE})
        return [
            Change(site.node, site.backend or "agnostic", backend, "redirected")
            for site in sites
            if site.backend != backend and (site.role is ATTENTION or site.backend in self._writers)
        ]

    def __str__(self) -> str:
        lines = [*map(str, self.reports)] or ["no graph was compiled yet"]
        if self.retargeted_to is not None:
            lines.append(f"retargeted: all of these run on {self.retargeted_to}")
        return "\n".join(lines)


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
