"""The table of mutants in the documentation, from the data.

``python -m attnbackend.testing.conformance.mutants.table docs/conformance.md`` writes it between its marks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from attnbackend.testing.conformance.checks import CHECKS
from attnbackend.testing.conformance.mutants import MUTANTS

__all__ = ["checks_table", "mutants_table", "with_tables"]


def checks_table() -> str:
    """What each check proves, as Markdown."""
    rows = (f"| `{check.name}` | {check.proves} |" for check in CHECKS.values())
    return "\n".join(("| check | proves |", "|---|---|", *rows))


def mutants_table() -> str:
    """Faults by the check that must reject them, as Markdown."""
    order = list(CHECKS)
    mutants = sorted(MUTANTS.values(), key=lambda mutant: order.index(mutant.caught_by))
    rows = (f"| `{mutant.caught_by}` | {mutant.fault} | `{mutant.name}` |" for mutant in mutants)
    return "\n".join(("| rejected by | fault | mutant |", "|---|---|---|", *rows))


def with_tables(text: str) -> str:
    """``text`` with what stands between the marks of each table made anew.

    Raises:
        ValueError: a mark is missing.
    """
    for name, table in (("checks", checks_table()), ("mutants", mutants_table())):
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
