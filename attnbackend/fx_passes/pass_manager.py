"""Runs passes in order, keeps their reports, and tells the compile caches what compiled code depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from attnbackend._torch_compat import inductor_graph_pass
from attnbackend.fx_passes.base import GraphPass, PassReport
from attnbackend.ops.library import ops_fingerprint

__all__ = ["PassManager"]


class PassManager:
    """An ordered list of passes.

    The same manager runs on the graphs of ``torch.compile`` (see `attnbackend.compile`), on the graph of a
    ``torch.export`` program, and as an Inductor graph pass.
    """

    def __init__(self, passes: Sequence[GraphPass]) -> None:
        self.passes = tuple(passes)
        self.reports: list[PassReport] = []
        """Of every graph so far, in the order of compilation."""

    def run(self, graph_module: GraphModule) -> list[PassReport]:
        """Runs every pass on ``graph_module``, in place, and returns their reports."""
        reports = [graph_pass.run(graph_module) for graph_pass in self.passes]
        self.reports += reports
        return reports

    def uuid(self) -> str:
        """Changes whenever the ops' schemas or fakes, or a pass's source or fields, change."""
        parts = [ops_fingerprint(), *(graph_pass.fingerprint() for graph_pass in self.passes)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def as_inductor_pass(self) -> Any:
        """For ``torch._inductor.config.post_grad_custom_pre_pass`` and its siblings."""
        return inductor_graph_pass(self.run, self.uuid)

    def __str__(self) -> str:
        return "\n".join(map(str, self.reports)) or "no graph was compiled yet"
