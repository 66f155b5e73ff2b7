"""What became of one case of one check."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Outcome", "Skipped", "Status"]


class Status(enum.StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    KNOWN = "known failure"
    """Failed as an entry of the known failures says."""


class Skipped(Exception):
    """Raised by a check that has nothing to look at; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """One case of one check, with the command that repeats it alone."""

    check: str
    case: str
    feature: str
    status: Status
    message: str
    """What was found, why it was skipped, or the known failure's reason; empty when passed."""
    reproduce: str
    seconds: float

    def __str__(self) -> str:
        head = f"{self.status}: {self.check} {self.case}"
        if self.status is Status.PASSED:
            return head
        text = f"{head}\n  {self.message.replace(chr(10), chr(10) + '  ')}"
        return text if self.status is Status.SKIPPED else f"{text}\n  repeat: {self.reproduce}"
