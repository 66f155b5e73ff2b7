"""``attnbackend backends``: what is here, what is not, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from attnbackend.cli.errors import user_errors

if TYPE_CHECKING:
    from attnbackend.cli.backend_facts import BackendFacts

__all__ = ["backends"]

_COLORS = {"ready": typer.colors.GREEN, "unavailable": typer.colors.YELLOW}


def backends(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON array, one object a backend.")
    ] = False,
) -> None:
    """List every attention backend: those that are here, those that are not, and why."""
    with user_errors():
        from attnbackend.cli.backend_facts import all_backend_facts

        facts = all_backend_facts()
        if as_json:
            typer.echo(json.dumps([fact.to_dict() for fact in facts], indent=2))
        else:
            _print_all(facts)


def _print_all(facts: list[BackendFacts]) -> None:
    for status in _COLORS:
        for fact in facts:
            if fact.status == status:
                _print_one(fact)
    names = [fact.name for fact in facts if fact.status == "not implemented"]
    if names:
        typer.echo(f"not implemented ({len(names)}): {', '.join(names)}")


def _print_one(fact: BackendFacts) -> None:
    typer.secho(fact.name, bold=True, nl=False)
    typer.secho(f"  {fact.status}", fg=_COLORS.get(fact.status), nl=False)
    typer.echo(f": {fact.reason}" if fact.reason else "")
    for label, text in _details(fact).items():
        if text:
            typer.echo(f"  {label:<12}{text}")
    typer.echo()


def _details(fact: BackendFacts) -> dict[str, str]:
    path = fact.class_path or ""
    return {
        "library": fact.library or "",
        "devices": ", ".join(fact.devices),
        "dtypes": ", ".join(fact.dtypes),
        "cache types": ", ".join(fact.kv_cache_dtypes),
        "head sizes": ", ".join(fact.head_sizes),
        "block sizes": ", ".join(fact.block_sizes),
        "features": ", ".join(fact.features),
        "ops": ", ".join(fact.ops),
        "class": path if fact.source == "built-in" else f"{path} ({fact.source})",
    }
