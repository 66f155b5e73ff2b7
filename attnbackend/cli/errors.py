"""What a person sees when a request is wrong: one line, no traceback, exit code 2."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import typer

from attnbackend.cli import EXIT_INTERRUPTED, EXIT_USER_ERROR

__all__ = ["UserError", "check_choice", "print_error", "user_errors"]


class UserError(ValueError):
    """A wrong request that the command line itself finds."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Inside the block, a wrong request ends the command with one line on stderr.

    ValueError and FileNotFoundError are what the package raises for wrong values and missing files,
    and ImportError for a missing extra. Anything else is a fault of the program and keeps its
    traceback.
    """
    try:
        yield
    except (ValueError, FileNotFoundError, ImportError) as error:
        print_error(one_line(str(error)))
        raise typer.Exit(EXIT_USER_ERROR) from None
    except KeyboardInterrupt:
        typer.echo("\ninterrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def print_error(message: str) -> None:
    """``error: message`` on stderr, red where that is a terminal."""
    typer.secho("error: ", err=True, fg=typer.colors.RED, bold=True, nl=False)
    typer.echo(message, err=True)


def one_line(message: str) -> str:
    """The lines of a message as one, a list below a colon with semicolons between its items."""
    joined = re.sub(r":\s*\n\s*", ": ", message.strip())
    return re.sub(r"\s*\n\s*", "; ", joined)


def check_choice(option: str, value: str, allowed: Iterable[str]) -> str:
    """``value`` as it is written in ``allowed``, whatever its case.

    Raises:
        UserError: not allowed; names near ones, or else all.
    """
    by_lower = {name.lower(): name for name in allowed}
    found = by_lower.get(value.lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(value.lower(), by_lower, n=3)
    hint = (
        f"did you mean {' or '.join(by_lower[name] for name in near)}?"
        if near
        else f"allowed: {', '.join(by_lower.values())}"
    )
    raise UserError(f"{option} {value!r} is unknown; {hint}")
