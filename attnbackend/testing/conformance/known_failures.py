"""Failures that are known, as data: each with its reason and the version by which it is looked at again.

A known failure that passes is a failure, and so is one whose version has come: the list cannot rot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

__all__ = ["KNOWN_FAILURES", "KnownFailure", "known_failure"]


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """Cases of one check that fail for a backend on a device, for a reason that is understood."""

    backend: str
    check: str
    case: str
    """Pattern of case ids, as in a shell."""
    device: str
    reason: str
    review_by: str
    """The version of attnbackend in which this entry must be gone or confirmed anew."""

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError(f"the known failure {self.check} {self.case!r} needs a reason, got none")
        _numbers(self.review_by)

    def is_due(self, version: str) -> bool:
        """Whether ``version`` has reached the one named here."""
        return _numbers(version) >= _numbers(self.review_by)

    def matches(self, backend: str, device: str, check: str, case: str) -> bool:
        return (self.backend, self.device, self.check) == (backend, device, check) and fnmatchcase(
            case, self.case
        )


def _numbers(version: str) -> tuple[int, ...]:
    """``0.10.1`` as (0, 10, 1); what follows the numbers is left out."""
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        raise ValueError(f"version {version!r} does not start with numbers such as 0.2.0")
    return tuple(int(n) for n in match.group().split("."))


KNOWN_FAILURES: tuple[KnownFailure, ...] = ()


def known_failure(
    backend: str, device: str, check: str, case: str, entries: tuple[KnownFailure, ...] | None = None
) -> KnownFailure | None:
    """The entry that speaks of a case; None: it is expected to pass."""
    listed = KNOWN_FAILURES if entries is None else entries
    return next((entry for entry in listed if entry.matches(backend, device, check, case)), None)
