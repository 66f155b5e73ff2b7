"""Progress on stderr: a spinner in a terminal, a line for each stage elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.status import Status

__all__ = ["Stages"]


class Stages:
    """Shows which stage of the work is on; stdout is never written to.

    Args:
        quiet: show nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False, quiet=quiet, soft_wrap=True)
        self._status: Status | None = None

    def __call__(self, stage: str) -> None:
        """The stage named begins and the one before ends."""
        if not self._console.is_terminal:
            self.note(f"{stage} ...")
        elif self._status is None:
            self._status = self._console.status(stage)
            self._status.start()
        else:
            self._status.update(stage)

    def clear(self) -> None:
        """Take the spinner away, so that other output has the terminal for itself."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def note(self, message: str) -> None:
        """A line that stays."""
        self._console.print(message, style="dim", markup=False)

    def __enter__(self) -> Stages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()
