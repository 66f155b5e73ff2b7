"""The verdict over all checks and cases."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from attnbackend.testing.conformance.outcome import Outcome, Status

__all__ = ["ConformanceReport"]

_SYMBOLS = {Status.FAILED: "FAIL", Status.KNOWN: "known", Status.PASSED: "ok", Status.SKIPPED: "skip"}


@dataclass(frozen=True)
class ConformanceReport:
    """What a backend was found to do. ``str()`` is a matrix of claims and checks, then what failed."""

    backend: str
    device: str
    seed: int
    versions: str
    """Of attnbackend, torch and Python."""
    outcomes: tuple[Outcome, ...]
    cases: str = ""
    """What was looked at, in short; see `cases_digest`."""

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing failed, known failures excepted."""
        return bool(self.outcomes) and not self.failures

    @property
    def failures(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if o.status is Status.FAILED)

    @property
    def seconds(self) -> float:
        return sum(outcome.seconds for outcome in self.outcomes)

    def count(self, status: Status) -> int:
        return sum(outcome.status is status for outcome in self.outcomes)

    def assert_ok(self) -> None:
        """Raises AssertionError with the whole report if anything failed, or nothing was checked."""
        if not self.ok:
            raise AssertionError(str(self))

    def matrix(self) -> tuple[list[str], dict[str, list[str]]]:
        """Names of the checks, and for each claim a cell a check: ``ok 12``, ``FAIL 1/12``, ``skip``."""
        checks = list(dict.fromkeys(outcome.check for outcome in self.outcomes))
        claims = list(dict.fromkeys(outcome.feature for outcome in self.outcomes))
        found: dict[tuple[str, str], Counter[Status]] = {}
        for outcome in self.outcomes:
            found.setdefault((outcome.feature, outcome.check), Counter())[outcome.status] += 1
        return checks, {claim: [_cell(found.get((claim, check))) for check in checks] for claim in claims}

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the verdict, counts and every outcome."""
        return {
            "backend": self.backend,
            "device": self.device,
            "seed": self.seed,
            "versions": self.versions,
            "ok": self.ok,
            "counts": {status.value: self.count(status) for status in Status},
            "seconds": round(self.seconds, 3),
            "outcomes": [asdict(outcome) | {"status": outcome.status.value} for outcome in self.outcomes],
        }

    def __str__(self) -> str:
        shown = [o for o in self.outcomes if o.status in (Status.FAILED, Status.KNOWN)]
        parts = [self.summary, _table(*self.matrix()), *map(str, shown), *self.skips()]
        return "\n".join(part for part in parts if part)

    @property
    def summary(self) -> str:
        counts = ", ".join(f"{self.count(status)} {status}" for status in Status if self.count(status))
        verdict = "conforms" if self.ok else "does not conform"
        return (
            f"{self.backend} on {self.device} {verdict}: {counts or 'nothing was checked'} "
            f"({self.seconds:.1f} s, seed {self.seed}, {self.versions})"
        )

    def skips(self) -> list[str]:
        """Reasons for skipping, each once."""
        reasons = Counter((o.check, o.message) for o in self.outcomes if o.status is Status.SKIPPED)
        return [f"skipped: {check}, {n} cases: {reason}" for (check, reason), n in reasons.items()]


def _cell(counts: Counter[Status] | None) -> str:
    if counts is None:
        return ""
    status = next(status for status in _SYMBOLS if counts[status])
    if status in (Status.FAILED, Status.KNOWN):
        return f"{_SYMBOLS[status]} {counts[status]}/{counts.total()}"
    return ", ".join(f"{_SYMBOLS[s]} {counts[s]}" for s in (Status.PASSED, Status.SKIPPED) if counts[s])


def _table(checks: list[str], rows: dict[str, list[str]]) -> str:
    if not rows:
        return ""
    lines = [["", *checks], *([claim, *cells] for claim, cells in rows.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(checks) + 1)]
    padded = ([t.ljust(w) for t, w in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)
