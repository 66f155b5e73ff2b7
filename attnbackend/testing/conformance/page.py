"""A Markdown page with one section a backend and device, each replaced when that backend is checked again."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from attnbackend.testing.conformance.outcome import Status
from attnbackend.testing.conformance.report import ConformanceReport

__all__ = ["check_page", "report_section", "write_section"]

_TITLE = "# What each backend does"
_HEAD = f"""{_TITLE}

Rows are what a backend claims, columns what was checked (see [conformance.md](conformance.md)); a cell counts
cases. Each section is written by the command that it shows.
"""


def report_section(report: ConformanceReport, command: str) -> str:
    """The report as Markdown, without what differs from run to run.

    Args:
        report: of one backend on one device.
        command: what a reader runs to write the section again.
    """
    counts = ", ".join(f"{report.count(status)} {status}" for status in Status if report.count(status))
    verdict = "Conforms" if report.ok else "Does not conform"
    parts = [
        f"## {report.backend} on {_hardware(report.device)}",
        f"`{command}`",
        f"{verdict}: {counts}; torch {torch.__version__.partition('+')[0]}; cases {report.cases}.",
        _table(*report.matrix()),
        "\n".join(f"- {line}" for line in report.skips()),
    ]
    return "\n\n".join(part for part in parts if part)


def check_page(page: Path) -> None:
    """Raises ValueError where ``page`` holds another text than such sections, which writing would drop."""
    if page.exists() and page.read_text().strip() and not page.read_text().startswith(_TITLE):
        raise ValueError(
            f"{page} is no page of conformance sections and would be overwritten: its first line is not "
            f"{_TITLE!r}; name another file, or one that does not exist yet"
        )


def write_section(page: Path, report: ConformanceReport, command: str) -> None:
    """Puts the section in its place by the alphabet, in place of an older one; creates the page.

    What stands above the first section stays.

    Raises:
        ValueError: see `check_page`.
    """
    check_page(page)
    text = page.read_text() if page.exists() else ""
    mark = f"{report.backend} {report.device}"
    sections = dict(re.findall(r"<!-- (\S+ \S+) -->\n(.*?)\n(?=<!-- |\Z)", text, re.DOTALL))
    sections[mark] = report_section(report, command).rstrip() + "\n"
    body = "\n".join(f"<!-- {name} -->\n{sections[name].rstrip()}\n" for name in sorted(sections))
    head = text.partition("<!-- ")[0].rstrip() + "\n" if text.strip() else _HEAD
    page.write_text(f"{head}\n{body}")


def _hardware(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "a CPU"


def _table(checks: list[str], rows: dict[str, list[str]]) -> str:
    lines = [["", *checks], ["---"] * (len(checks) + 1), *([claim, *cells] for claim, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
