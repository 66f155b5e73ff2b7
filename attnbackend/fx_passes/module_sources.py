"""The sources of modules, and of the modules that they import; nothing is imported to find them."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec, resolve_name
from pathlib import Path

__all__ = ["is_known", "module_texts"]

_KNOWN = {*sys.stdlib_module_names, "torch", "attnbackend"} - {"__main__"}
"""Packages by whose versions or sources compile caches are keyed without."""
_INSTALLED = {"site-packages", "dist-packages"}


def is_known(module: str | None) -> bool:
    """Whether a module is Python's, torch's or ours."""
    return _top(module or "builtins") in _KNOWN


def _top(module: str) -> str:
    return module.partition(".")[0]


def module_texts(names: Sequence[str], near: Sequence[str]) -> Iterator[str]:
    """The sources of modules and of what they import, each once.

    Args:
        names: the modules.
        near: modules of whose packages all is told; of other packages that were installed nothing is.
    """
    waiting = list(dict.fromkeys(names))
    done, packages = set(waiting), {_top(name) for name in near}
    while waiting:
        name = waiting.pop(0)
        path = None if is_known(name) else _path(name)
        if path is None or (_top(name) not in packages and not _INSTALLED.isdisjoint(path.parts)):
            continue
        text, imports = _read(path, path.stat().st_mtime_ns, name)
        yield text
        found = [n for n in imports if n not in done]
        done.update(found)
        waiting += found


@functools.cache
def _read(path: Path, changed_at: int, module: str) -> tuple[str, list[str]]:
    source = path.read_bytes()
    return source.decode("latin-1"), _imports(source, module, path)  # its encoding is of no interest


def _path(name: str) -> Path | None:
    """The file of a module's source; None where there is none, or no such module."""
    file = getattr(sys.modules.get(name), "__file__", None)
    parent, _, own = name.rpartition(".")
    if file is not None:
        found = [Path(file)]
    elif not parent:
        found = _top_path(name)
    else:
        package = _path(parent)
        folder = package.parent if package is not None and package.name == "__init__.py" else None
        found = [] if folder is None else [folder / f"{own}.py", folder / own / "__init__.py"]
    return next((path for path in found if path.suffix == ".py" and path.exists()), None)


def _top_path(name: str) -> list[Path]:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # e.g. __main__ of a prompt
        return []
    return [Path(spec.origin)] if spec is not None and spec.origin else []


def _imports(source: bytes, module: str, path: Path) -> list[str]:
    """Names that may be modules, of every import in a source, in functions too, each once."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(part for alias in node.names for part in _prefixes(alias.name))
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            base = resolve_name("." * node.level + (node.module or ""), package or None)
            found |= dict.fromkeys([*_prefixes(base), *(f"{base}.{alias.name}" for alias in node.names)])
    return list(found)


def _prefixes(name: str) -> Iterator[str]:
    """A module and the packages around it, whose files run before it."""
    parts = name.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))
