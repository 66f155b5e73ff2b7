"""Graphs before and after each pass, written where somebody can read and compare them."""

from __future__ import annotations

import difflib
import hashlib
import html
from pathlib import Path
from urllib.parse import quote

__all__ = ["GraphDumps", "diff_html"]


def diff_html(before: str, after: str, title: str) -> str:
    """A page with two texts of a graph side by side, differences marked; it needs no other file."""
    differ, title = difflib.HtmlDiff(wrapcolumn=96), html.escape(title)
    page = differ.make_file(before.splitlines(), after.splitlines(), f"{title}: before", "after")
    return page.replace("<title></title>", f"<title>{title}</title>", 1)


_LONGEST = 120
"""Of a file's name, the part that a pass's name may take."""


def _file_name(pass_name: str) -> str:
    """The name, escaped but for letters, digits and ``_.-~``; one too long ends in its hash."""
    name = quote(pass_name, safe="", errors="surrogatepass")
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


class GraphDumps:
    """Writes ``000_0_PASS.before.txt``, ``.after.txt`` and ``.html`` for each graph and pass.

    In PASS, path separators and the like are escaped as in URLs.

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
        place, self._place = f"{self._graph:03d}_{self._place}", self._place + 1
        page = diff_html(before, after, f"{place}_{pass_name}")
        texts = {"before.txt": f"{before}\n", "after.txt": f"{after}\n\n{report}\n", "html": page}
        for end, text in texts.items():
            path = self.folder / f"{place}_{_file_name(pass_name)}.{end}"
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
