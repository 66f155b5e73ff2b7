"""Graphs before and after each pass, written where somebody can read and compare them."""

from __future__ import annotations

import difflib
from pathlib import Path

__all__ = ["GraphDumps", "diff_html"]


def diff_html(before: str, after: str, title: str) -> str:
    """A page with two texts of a graph side by side, differences marked; it needs no other file."""
    differ = difflib.HtmlDiff(wrapcolumn=96)
    page = differ.make_file(before.splitlines(), after.splitlines(), f"{title}: before", "after")
    return page.replace("<title></title>", f"<title>{title}</title>", 1)


class GraphDumps:
    """Writes ``000_0_PASS.before.txt``, ``.after.txt`` and ``.html`` for each graph and pass.

    Args:
        folder: made where it does not exist; files of the same names are replaced.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._graph = -1

    def begin_graph(self) -> None:
        self._graph += 1
        self._place = 0

    def write(self, pass_name: str, before: str, after: str, report: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = self.folder / f"{self._graph:03d}_{self._place}_{pass_name}"
        self._place += 1
        stem.with_suffix(".before.txt").write_text(f"{before}\n")
        stem.with_suffix(".after.txt").write_text(f"{after}\n\n{report}\n")
        stem.with_suffix(".html").write_text(diff_html(before, after, stem.name))
