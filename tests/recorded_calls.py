"""What a CPU runs in the place of a CUDA graph."""

from __future__ import annotations

from attnbackend.forward_context import get_forward_context, set_forward_context
from attnbackend.testing.conformance.checks.graphs import Run


def recorded(run: Run) -> Run:
    """A replay sees what a graph does: the same tensors with their contents of now, the plan of then."""
    context = get_forward_context()
    assert context is not None

    def replay() -> None:
        with set_forward_context(context):
            run()

    return replay
