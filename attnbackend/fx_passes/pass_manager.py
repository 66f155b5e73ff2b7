"""Runs passes in order, keeps their reports, and tells the compile caches what compiled code depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from attnbackend._torch_compat import inductor_graph_pass, run_on_program
from attnbackend.fx_passes.base import GraphPass, PassConfig, PassReport
from attnbackend.fx_passes.cache_order import cache_history, check_cache_history
from attnbackend.fx_passes.dumps import GraphDumps
from attnbackend.fx_passes.graph_text import graph_text
from attnbackend.fx_passes.shape_range import ShapeRange
from attnbackend.ops.library import ops_fingerprint

__all__ = ["PassManager"]


class PassManager:
    """Passes in the order of their stages, and of the list within a stage.

    The same manager runs on the graphs of ``torch.compile`` (see `attnbackend.compile`), on the graph of a
    ``torch.export`` program, and as an Inductor graph pass. After every pass, whatever it reports, it checks
    that each cache gets the same writes as before and each of its readers sees the same of them.

    Args:
        passes: what to run.
        strict: a pass that changes nothing in a graph is an error.
        dump_folder: where each graph is written before and after each pass, as text and as an HTML
            comparison; None: nowhere.

    Raises:
        TypeError: something in ``passes`` is no pass, or has no name.
    """

    def __init__(
        self, passes: Sequence[GraphPass], *, strict: bool = False, dump_folder: str | Path | None = None
    ) -> None:
        for place, given in enumerate(passes):
            _check_pass(place, given)
        self.passes = tuple(sorted(passes, key=lambda graph_pass: graph_pass.stage))
        self.strict = strict
        self.reports: list[PassReport] = []
        """Of every graph so far, in the order of compilation."""
        self._dumps = None if dump_folder is None else GraphDumps(dump_folder)

    def run(self, graph_module: GraphModule, shape_range: ShapeRange | None = None) -> list[PassReport]:
        """Runs every pass that applies on ``graph_module``, in place.

        Args:
            graph_module: with fake tensors in its nodes' meta, as tracing leaves them.
            shape_range: for how many tokens the graph is meant; None: what its sizes tell.

        Raises:
            CacheOrderError: a pass changed what is written to a cache or read of it.
            RuntimeError: a pass left a graph that cannot run.
            TypeError: a pass did not return a `PassReport`.
            ValueError: ``strict``, and a pass changed nothing.
        """
        if self._dumps is not None:
            self._dumps.begin_graph()
        reports = [self._run_one(graph_pass, graph_module, shape_range) for graph_pass in self.passes]
        self.reports += reports
        return reports

    def run_on(self, program: torch.export.ExportedProgram) -> list[PassReport]:
        """`run` on an exported program, in place; its signature follows where outputs were rewritten."""
        reports: list[PassReport] = []
        run_on_program(program, lambda graph_module: reports.extend(self.run(graph_module)))
        return reports

    def _run_one(
        self, graph_pass: GraphPass, graph_module: GraphModule, shape_range: ShapeRange | None
    ) -> PassReport:
        sizes = shape_range or ShapeRange.of(graph_module)
        not_applied = graph_pass.applies(PassConfig.of(graph_module), sizes)
        if not_applied:
            report = PassReport(graph_pass.name, not_applied=tuple(not_applied))
        else:
            report = self._run_checked(graph_pass, graph_module)
        if self.strict and not report.changes:
            raise ValueError(
                f"strict=True, and a pass changed nothing in a graph of {sizes}; leave the pass "
                f"out, or find in its report why:\n{report}"
            )
        return report

    def _run_checked(self, graph_pass: GraphPass, graph_module: GraphModule) -> PassReport:
        text = "" if self._dumps is None else graph_text(graph_module)
        history = cache_history(graph_module)
        report = graph_pass.run(graph_module)
        if not isinstance(report, PassReport):
            raise TypeError(f"pass {graph_pass.name!r} returned {report!r}; expected a PassReport")
        if report.changes:
            _check_graph(graph_pass.name, graph_module)
        check_cache_history(graph_pass.name, history, cache_history(graph_module))
        if self._dumps is not None:
            self._dumps.write(graph_pass.name, text, graph_text(graph_module), str(report))
        return report

    def uuid(self) -> str:
        """Changes whenever the ops' schemas or fakes, or a pass's source or fields, change."""
        sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
        parts = [ops_fingerprint(), *sources, *(graph_pass.fingerprint() for graph_pass in self.passes)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def as_inductor_pass(self) -> Any:
        """For ``torch._inductor.config.post_grad_custom_pre_pass``, ``pre_grad_custom_pass`` and the like."""
        return inductor_graph_pass(self.run, self.uuid)

    def __str__(self) -> str:
        return "\n".join(map(str, self.reports)) or "no graph was compiled yet"


def _check_pass(place: int, given: object) -> None:
    if not isinstance(given, GraphPass) or not isinstance(getattr(given, "name", None), str):
        what = "has no name" if isinstance(given, GraphPass) else "is no GraphPass"
        raise TypeError(
            f"passes[{place}] {what}: {given!r}; expected an instance of a class that is derived from "
            "fx_passes.GraphPass and has a `name`"
        )


def _check_graph(pass_name: str, graph_module: GraphModule) -> None:
    try:
        graph_module.graph.lint()
    except Exception as error:  # lint raises whatever it comes across
        raise RuntimeError(
            f"pass {pass_name!r} left a graph that cannot run; leave the pass out, it is at fault: {error}"
        ) from error
