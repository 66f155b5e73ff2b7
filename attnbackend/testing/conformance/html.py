"""The report as one HTML page without scripts or outside resources."""

from __future__ import annotations

from html import escape

from attnbackend.testing.conformance.outcome import Outcome, Status
from attnbackend.testing.conformance.report import ConformanceReport

__all__ = ["report_html"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 110rem; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #ccc; padding: .2rem .5rem; text-align: left; white-space: nowrap; }
.ok { background: #e4f5e4; } .FAIL { background: #f9d4d4; font-weight: bold; }
.known { background: #fdf0cf; } .skip { color: #777; }
pre { background: #f6f6f6; overflow-x: auto; padding: .6rem; }
"""


def report_html(report: ConformanceReport) -> str:
    """The whole page."""
    checks, rows = report.matrix()
    head = "".join(f"<th>{escape(check)}</th>" for check in checks)
    body = "".join(
        f"<tr><th>{escape(claim)}</th>{''.join(map(_cell, row))}</tr>" for claim, row in rows.items()
    )
    shown = [o for o in report.outcomes if o.status in (Status.FAILED, Status.KNOWN)]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(report.backend)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(report.backend)}</h1><p>{escape(report.summary)}</p>"
        f"<table><tr><th></th>{head}</tr>{body}</table>{''.join(map(_details, shown))}</html>\n"
    )


def _cell(text: str) -> str:
    return f'<td class="{text.partition(" ")[0]}">{escape(text)}</td>'


def _details(outcome: Outcome) -> str:
    title = f"{outcome.status}: {outcome.check} {outcome.case}"
    return f"<h2>{escape(title)}</h2><pre>{escape(outcome.message)}\n\n{escape(outcome.reproduce)}</pre>"
