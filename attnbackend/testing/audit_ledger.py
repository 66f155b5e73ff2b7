"""Many audited calls, one verdict for each op: what no single call can show.

An argument declared mutated need not be written by every call, and an optional tensor need not be
passed in every one; but over all samples of a test each must be, or the schema says too much, or
the samples say too little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from attnbackend.testing.state_audit import AllowedWrite, AuditReport, Finding, audit_op

__all__ = ["AllowedArgument", "AuditLedger", "LedgerVerdict"]


@dataclass(frozen=True)
class AllowedArgument:
    """An argument that no call need pass or write (one that the backend refuses), with the reason.

    Once a call does both, the entry is out of date and the verdict says so.
    """

    name: str
    reason: str

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError(f"excusing the argument {self.name!r} needs a reason, got none")


@dataclass(frozen=True)
class LedgerVerdict:
    """Everything wrong with one op over all its audited calls; empty fields are good."""

    op: OpOverload
    num_calls: int
    findings: tuple[Finding, ...]
    over_declared: tuple[str, ...]
    """Declared mutated, passed, and never written by any call."""
    never_passed: tuple[str, ...]
    """Tensor arguments, optional ones above all, that no call passed."""
    outdated: tuple[str, ...]
    """Excused arguments that need no excuse."""

    @property
    def ok(self) -> bool:
        faults = (self.findings, self.over_declared, self.never_passed, self.outdated)
        return self.num_calls > 0 and not any(faults)

    def assert_ok(self) -> None:
        """Raises AssertionError with everything that is wrong, also if nothing was audited."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        lines = [f"{self.op}, {self.num_calls} calls audited, schema {self.op._schema}"]
        lines += [str(finding) for finding in self.findings]
        lines += [f"over-declared: {name} is never written" for name in self.over_declared]
        lines += [f"untested: {name} is never passed" for name in self.never_passed]
        lines += [f"outdated excuse: {name} is passed (and written)" for name in self.outdated]
        return "\n  ".join(lines)


class AuditLedger:
    """Collects audited calls of any number of ops.

    Args:
        allow: hidden memory the ops may write, for :func:`audit_op`.
        excuse: arguments that no call need pass or write.
    """

    def __init__(self, *, allow: Sequence[AllowedWrite] = (), excuse: Sequence[AllowedArgument] = ()) -> None:
        self._allow = tuple(allow)
        self._excused = frozenset(entry.name for entry in excuse)
        self._reports: dict[OpOverload, list[AuditReport]] = {}

    def audit(
        self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> AuditReport:
        """Audit one call and keep its report."""
        report = audit_op(op, args, kwargs, allow=self._allow)
        self._reports.setdefault(op, []).append(report)
        return report

    def verdict(self, op: OpOverload) -> LedgerVerdict:
        """What all calls of ``op`` together show; an op never audited is not ok.

        Raises:
            ValueError: an excused name is no tensor argument of ``op``.
        """
        reports = self._reports.get(op, [])
        arguments = _tensor_arguments(op)
        unknown = self._excused - arguments
        if unknown:
            raise ValueError(
                f"excused {sorted(unknown)}, but tensor arguments of {op} are {sorted(arguments)}"
            )
        passed, declared, written = (
            frozenset[str]().union(*sets)
            for sets in (
                (report.exercised for report in reports),
                (report.declared for report in reports),
                (report.written for report in reports),
            )
        )
        never_passed, over_declared = arguments - passed, declared - written
        return LedgerVerdict(
            op=op,
            num_calls=len(reports),
            findings=tuple(finding for report in reports for finding in report.findings),
            over_declared=tuple(sorted(over_declared - self._excused)),
            never_passed=tuple(sorted(never_passed - self._excused)),
            outdated=tuple(sorted(self._excused - never_passed - over_declared)),
        )


def _tensor_arguments(op: OpOverload) -> frozenset[str]:
    return frozenset(argument.name for argument in op._schema.arguments if "Tensor" in str(argument.type))
