"""`explain`: why a backend is chosen for a configuration, and what stands against the others."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from attnbackend.registry import BackendName, backend_names, backend_path, is_implemented
from attnbackend.selector import (
    AttentionSelectorConfig,
    Selection,
    backend_verdict,
    forced_for,
    priorities_for,
    select_backend,
)
from attnbackend.types import Reason, Unavailable, describe
from attnbackend.validation import Change, single_changes

__all__ = ["BackendRow", "BackendVerdict", "Explanation", "explain"]

_WIDTH = 100


class BackendVerdict(enum.StrEnum):
    """What became of one backend."""

    SELECTED = "selected"
    ELIGIBLE = "eligible"
    """Could serve, but another comes first or is named."""
    REFUSED = "refused"
    """The configuration asks for what the backend does not claim."""
    UNAVAILABLE = "unavailable"
    """The kernels cannot run here, whatever the configuration."""
    NOT_IMPLEMENTED = "not implemented"
    """A name without a class."""


@dataclass(frozen=True, kw_only=True)
class BackendRow:
    """One backend's part of an explanation."""

    name: str
    verdict: BackendVerdict
    priority: int | None
    """Place in the platform's order, from 1; None: used only when named."""
    class_path: str
    constraints: tuple[Reason, ...] = ()
    """What the configuration asks for and the backend does not claim."""
    unavailable: Reason | None = None
    """Why its kernels cannot run here. A class that cannot be imported has no constraints shown."""
    changes: tuple[Change, ...] = ()
    """Changes of one field, each of which alone lifts all ``constraints``."""
    op_names: tuple[str, ...] = ()
    """Qualified names of its ops; empty until the class can be imported."""

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Everything that stands against the backend."""
        return (*self.constraints, *([self.unavailable] if self.unavailable else []))


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The outcome of a selection and one row a backend: the platform's order first, then the rest.

    ``str()`` of it is a table to read, `to_dict` what to write as JSON.
    """

    config: AttentionSelectorConfig
    rows: tuple[BackendRow, ...]
    selected: str | None
    """Name of the chosen backend; None: ``error`` says why there is none."""
    because: str | None
    error: str | None
    forced_name: str | None
    """The backend that somebody names, whether it can serve or not."""
    forced_by: str | None
    """Who names it: the caller, the configuration or the environment."""

    def row(self, name: str) -> BackendRow:
        """The row of a backend; KeyError where there is none of that name."""
        return {row.name: row for row in self.rows}[name]

    def to_dict(self) -> dict[str, Any]:
        """Strings, numbers, lists and dicts only."""
        return {
            "config": {f.name: _plain(getattr(self.config, f.name)) for f in fields(self.config)},
            "selected": self.selected,
            "because": self.because,
            "error": self.error,
            "forced_name": self.forced_name,
            "forced_by": self.forced_by,
            "backends": [_row_dict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        return "\n".join([*_outcome_lines(self), "", *_table_lines(self.rows)])


def explain(config: AttentionSelectorConfig, *, backend: BackendName | None = None) -> Explanation:
    """What `select_backend` does with the same arguments, and why, for every known backend.

    Nothing is raised for a backend's sake: the error of a failed selection, and any exception of a
    backend that cannot be imported or probed, become part of the explanation.

    Args:
        config: what is asked for.
        backend: the backend that a caller would name; None: as the configuration, the environment
            or the platform's order decides.
    """
    selection, error = _try_select(config, backend)
    forced = forced_for(backend)
    order = priorities_for(config)
    rest = [name for name in backend_names() if name not in order]
    chosen = selection.name if selection else None
    return Explanation(
        config=config,
        rows=tuple(_row(name, config, order, chosen) for name in [*order, *rest]),
        selected=chosen,
        because=selection.because if selection else None,
        error=error,
        forced_name=forced.name if forced else None,
        forced_by=forced.by if forced else None,
    )


def _try_select(
    config: AttentionSelectorConfig, backend: BackendName | None
) -> tuple[Selection | None, str | None]:
    try:
        return select_backend(config, backend=backend), None
    except ValueError as error:
        return None, str(error)
    except Exception as error:  # a faulty backend must not hide what there is to say of the others
        return None, f"{type(error).__name__}: {error}"


def _row(
    name: str, config: AttentionSelectorConfig, order: tuple[str, ...], chosen: str | None
) -> BackendRow:
    shared: dict[str, Any] = {
        "name": name,
        "priority": order.index(name) + 1 if name in order else None,
        "class_path": backend_path(name),
    }
    if not is_implemented(name):
        return BackendRow(verdict=BackendVerdict.NOT_IMPLEMENTED, **shared)
    try:
        found = _judge(name, config, chosen)
    except Exception as error:
        fault = Unavailable(value=f"{type(error).__name__}: {error}", allowed="a sound class")
        found = {"verdict": BackendVerdict.UNAVAILABLE, "unavailable": fault}
    return BackendRow(**found, **shared)


def _judge(name: str, config: AttentionSelectorConfig, chosen: str | None) -> dict[str, Any]:
    constraints, unavailable, cls = backend_verdict(name, config)
    found: dict[str, Any] = {"constraints": constraints, "unavailable": unavailable}
    if unavailable:
        found["verdict"] = BackendVerdict.UNAVAILABLE
    elif constraints:
        found["verdict"] = BackendVerdict.REFUSED
    else:
        found["verdict"] = BackendVerdict.SELECTED if name == chosen else BackendVerdict.ELIGIBLE
    if cls is not None:
        found["op_names"] = _op_names(name)
        found["changes"] = tuple(single_changes(cls, config))
    return found


def _op_names(name: str) -> tuple[str, ...]:
    from attnbackend.ops import library
    from attnbackend.ops.generate import backend_op

    roles = [role for role in vars(library).values() if isinstance(role, library.OpRole)]
    ops = (backend_op(name, role) for role in roles)
    return tuple(op.name() for op in ops if op is not None)


def _plain(value: Any) -> Any:
    """``value`` in the types that JSON has."""
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return describe(value)


def _row_dict(row: BackendRow) -> dict[str, Any]:
    found = {name: _plain(value) for name, value in vars(row).items()}
    found["constraints"] = [_part_dict(reason) for reason in row.constraints]
    found["unavailable"] = _part_dict(row.unavailable) if row.unavailable else None
    found["changes"] = [_part_dict(change) for change in row.changes]
    return found


def _part_dict(part: Reason | Change) -> dict[str, Any]:
    return {**{k: _plain(v) for k, v in asdict(part).items()}, "text": str(part)}


def _outcome_lines(e: Explanation) -> Iterator[str]:
    yield from _wrapped("asked for:  ", str(e.config))
    if e.forced_name is not None:
        yield f"named:      {e.forced_name}, by {e.forced_by}"
    if e.selected is not None:
        yield from _wrapped("selected:   ", f"{e.selected}, {e.because}")
    else:
        yield "selected:   none"
        for line in (e.error or "").splitlines():
            yield from _wrapped(" " * 12, line.strip())


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def _table_lines(rows: tuple[BackendRow, ...]) -> Iterator[str]:
    shown = [row for row in rows if row.verdict is not BackendVerdict.NOT_IMPLEMENTED]
    name_width = max([len("backend"), *(len(row.name) for row in shown)])
    verdict_width = max(len("verdict"), *(len(row.verdict) for row in rows))
    yield f"order  {'backend':{name_width}}  {'verdict':{verdict_width}}  why"
    for row in shown:
        place = "-" if row.priority is None else str(row.priority)
        head = f"{place:>5}  {row.name:{name_width}}  {row.verdict:{verdict_width}}  "
        for why in _why(row) or [""]:
            yield from _wrapped(head, why) or [head.rstrip()]
            head = " " * len(head)
    absent = ", ".join(row.name for row in rows if row not in shown)
    if absent:
        yield ""
        yield from _wrapped("not implemented:  ", absent)


def _why(row: BackendRow) -> list[str]:
    would_do = [f"would accept {change}" for change in row.changes]
    return [*map(str, row.reasons), *would_do]
