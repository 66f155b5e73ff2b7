"""The table of mutants in the documentation, from the data.

``python -m attnbackend.testing.conformance.mutants.table docs/conformance.md`` writes it between its marks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnbackend.testing.conformance.checks import CHECKS
from attnbackend.testing.conformance.latent import LATENT_CHECKS
from attnbackend.testing.conformance.latent.mutants import LATENT_MUTANTS
from attnbackend.testing.conformance.mutants import MUTANTS

__all__ = ["checks_table", "mutants_table", "with_tables"]


def checks_table(suite: Mapping[str, Any] = CHECKS) -> str:
    """What each check proves, as Markdown."""
    rows = (f"| `{check.name}` | {check.proves} |" for check in suite.values())
    return "\n".join(("| check | proves |", "|---|---|", *rows))


def mutants_table(broken: Mapping[str, Any] = MUTANTS, suite: Mapping[str, Any] = CHECKS) -> str:
    """Faults by the check that must reject them, as Markdown."""
    order = list(suite)
    mutants = sorted(broken.values(), key=lambda mutant: order.index(mutant.caught_by))
    rows = (f"| `{mutant.caught_by}` | {mutant.fault} | `{mutant.name}` |" for mutant in mutants)
    return "\n".join(("| rejected by | fault | mutant |", "|---|---|---|", *rows))


def with_tables(text: str) -> str:
    """``text`` with what stands between the marks of each table made anew.

    Raises:
        ValueError: a mark is missing.
    """
    tables = {
        "checks": checks_table(),
        "mutants": mutants_table(),
        "latent checks": checks_table(LATENT_CHECKS),
        "latent mutants": mutants_table(LATENT_MUTANTS, LATENT_CHECKS),
    }
    for name, table in tables.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the text lacks the marks {start!r} and {end!r}")
        text = f"{before}{start}\n{table}\n{end}{after}"
    return text


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_tables(page.read_text()))
