"""The commands, joined."""

from __future__ import annotations

from typing import Annotated

import typer

from attnbackend import __version__
from attnbackend.cli.backends import backends
from attnbackend.cli.bench import bench
from attnbackend.cli.build import build
from attnbackend.cli.check import check
from attnbackend.cli.explain import explain
from attnbackend.cli.generate import generate

__all__ = ["app"]

app = typer.Typer(
    help="Attention backends for torch.compile: run a model, list backends, explain a choice.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attnbackend {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Attention backends for torch.compile: run a model, list backends, explain a choice."""


app.command()(generate)
app.command()(backends)
app.command()(explain)
app.command()(check)
app.add_typer(bench, name="bench")
app.command()(build)
