"""The command ``attnbackend``. Importing this package imports neither typer nor rich."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]

EXIT_OK, EXIT_NOT_POSSIBLE, EXIT_USER_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130
"""Exit codes: done; done, and the answer is no; a wrong or impossible request; ended by Ctrl-C."""

_EXTRAS = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after the command's name; None takes the process's own.

    Returns:
        The exit code.
    """
    missing = [name for name in _EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"error: the command line needs {' and '.join(missing)}; install with "
            "`pip install 'attnbackend[cli]'`",
            file=sys.stderr,
        )
        return EXIT_USER_ERROR
    from attnbackend.cli.app import app

    try:
        app(args=None if arguments is None else list(arguments), prog_name="attnbackend")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_OK
    return EXIT_OK
