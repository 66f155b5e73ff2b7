"""``attnbackend build``: compiles the project's kernels ahead of time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from attnbackend.cli import EXIT_NOT_POSSIBLE
from attnbackend.cli.errors import check_choice, one_line, print_error, user_errors

if TYPE_CHECKING:
    from attnbackend.kernels.cpu import Target

__all__ = ["build"]


def build(
    what: Annotated[
        str,
        typer.Argument(
            help="cpu: the C++ kernels of CPU_ATTN. library-calls: what calls other libraries in C++."
        ),
    ],
    target: Annotated[
        list[str] | None,
        typer.Option(help="Instruction set, such as avx2; may be repeated. Default: this processor's best."),
    ] = None,
    all_targets: Annotated[
        bool, typer.Option("--all-targets", help="Every instruction set of this kind of machine.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Build also what is there already.")] = False,
) -> None:
    """Compile kernels ahead of time, as for an image whose users have no compiler.

    Libraries are kept in $ATTNBACKEND_CACHE_DIR, or else ~/.cache/attnbackend; $CXX names the compiler.
    The exit code is 1 when something cannot be built.
    """
    with user_errors():
        check_choice("WHAT", what, ("cpu", "library-calls"))
        _build_all(what, _targets(target or [], all_targets), force)


def _targets(names: list[str], all_targets: bool) -> list[Target]:
    from attnbackend.kernels.cpu import TARGETS, current_target, find_target

    if all_targets:
        return list(TARGETS)
    return [find_target(name) for name in names] or [current_target()]


def _build_all(what: str, targets: list[Target], force: bool) -> None:
    from attnbackend.kernels.cpu import BuildError, build_library, build_library_calls, build_ops

    builds = {target.name: partial(build_library, target) for target in targets} | {"ops": build_ops}
    if what == "library-calls":
        builds = {what: build_library_calls}
    for name, build_one in builds.items():
        try:
            path = build_one(anew=force)
        except BuildError as error:
            print_error(one_line(str(error)))
            raise typer.Exit(EXIT_NOT_POSSIBLE) from None
        typer.echo(f"{name}: {path}")
