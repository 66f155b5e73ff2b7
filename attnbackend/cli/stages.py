"""Progress on stderr: a spinner in a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.status import Status

__all__ = ["Stages"]


class Stages:
    """Shows which stage of the work is on; stdout is never written to.

    Ctrl-C is raised again at the next stage where somebody swallowed it, as imports of libraries may.

    Args:
        quiet: show nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False, quiet=quiet, soft_wrap=True)
        self._status: Status | None = None
        self._interrupted = False
        self._handler: Any = None

    def __call__(self, stage: str) -> None:
        """The stage named begins and the one before ends.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed before.
        """
        if self._interrupted:
            raise KeyboardInterrupt
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

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def __enter__(self) -> Stages:
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        self.clear()
