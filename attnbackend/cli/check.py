"""``attnbackend check``: does a backend do what it claims?"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbackend.cli import EXIT_NOT_POSSIBLE
from attnbackend.cli.errors import UserError, check_choice, user_errors

if TYPE_CHECKING:
    from attnbackend.testing.conformance import Outcome
    from attnbackend.testing.conformance.runner import OnProgress

__all__ = ["check"]

_SECONDS_BETWEEN_LINES = 20.0
"""Of a log: enough to see that something happens, few enough to be read."""


def check(
    backend: Annotated[str, typer.Argument(help="A backend's name, or package.module.Class.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    only: Annotated[list[str] | None, typer.Option(help="A check to run; may be repeated.")] = None,
    case: Annotated[str, typer.Option(help="Pattern of case ids, such as 'window*'.")] = "*",
    seed: Annotated[int, typer.Option(help="Seed of all data.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Every claim and batch, but not every pair.")
    ] = False,
    slow: Annotated[bool, typer.Option("--slow", help="Also build AOTInductor packages.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report as an HTML page.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write the matrix to its section of this Markdown page.")
    ] = None,
) -> None:
    """Check a backend against its claims: numerics, refusals, cache writes, plans, compilation, ...

    The exit code is 1 when anything failed.
    """
    with user_errors(), _importable_from_here(backend):
        from attnbackend.testing.conformance import check_backend, report_html
        from attnbackend.testing.conformance.page import check_page, write_section

        device = check_choice("--device", device, ("cpu", "cuda"))
        _check_file("--html", html)
        _check_file("--page", page)
        if page is not None:
            check_page(page)
        with _progress(backend) as on_progress:
            report = check_backend(
                backend, device=device, seed=seed, only=only or None, case=case, quick=quick, slow=slow,
                on_progress=on_progress,
            )  # fmt: skip
        if html is not None:
            html.write_text(report_html(report))
        if page is not None:
            write_section(page, report, _command(backend, device, quick, page))
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    if not report.ok:
        raise typer.Exit(EXIT_NOT_POSSIBLE)


def _check_file(option: str, path: Path | None) -> None:
    """Before the checks run: what they found would be lost."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path} cannot be written: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{option} {path} cannot be written: permission denied")


def _command(backend: str, device: str, quick: bool, page: Path) -> str:
    interpreted = ["TRITON_INTERPRET=1"] * (device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
    options = ["--quick"] * quick + ["--device cuda"] * (device == "cuda")
    return " ".join([*interpreted, "attnbackend check", backend, *options, "--page", str(page)])


@contextmanager
def _importable_from_here(backend: str) -> Iterator[None]:
    """A path may lead to a module in the current folder, as with ``python -m``."""
    here = str(Path.cwd())
    added = not {".", ":"}.isdisjoint(backend) and here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added:
            sys.path.remove(here)


@contextmanager
def _progress(backend: str) -> Iterator[OnProgress]:
    """On stderr: a bar on a terminal, a line now and then in a log; failures as they come."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    last_line = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(backend, total=None)

        def on_progress(done: int, total: int, outcome: Outcome) -> None:
            nonlocal last_line
            bar.update(task, completed=done, total=total, description=f"{backend}: {outcome.check}")
            if outcome.status == "failed":
                console.print(f"failed: {outcome.check} {outcome.case}")
            if not console.is_terminal and time.monotonic() - last_line > _SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                console.print(f"{backend}: {done} of {total} cases, now {outcome.check}")

        yield on_progress
