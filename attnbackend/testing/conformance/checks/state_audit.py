"""What a call writes, against what its schema declares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED, ONE_REQUEST, PADDED
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.subject import Subject
from attnbackend.testing.state_audit import AllowedWrite, AuditReport, audit_op

__all__ = ["StateAudit", "write_faults"]


class StateAudit(Check):
    name = "state_audit"
    proves = "A call changes its declared arguments and no other memory of the process, and does change them."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        yield from generate.some(
            ("plain", MIXED), ("no_lse", ONE_REQUEST), ("everything", PADDED), ("hnd", DECODE),
            ("layers_interleaved", DECODE), ("strided_tensors", MIXED), (generate.scaled_cache, DECODE),
            ("ranges", MIXED), ("encoder_only", PADDED), ("cross", MIXED), new_tokens_written=False,
        )  # fmt: skip

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        batch = subject.batch(case.attention)
        allow = [AllowedWrite(x, "a workspace of the backend") for x in subject.backend.workspaces()]
        findings: list[str] = []
        if case.attention.writes_new_tokens:
            write = audit_op(subject.write, *subject.write_args(batch), allow=allow)
            findings += write_faults("kv_cache_update", write)
        # A second batch: the writer leaves the first one's slots written.
        written = subject.batch(replace(case.attention, new_tokens_written=True))
        forward = audit_op(subject.forward, *subject.forward_args(written), allow=allow)
        return [*findings, *write_faults("forward", forward)]


def write_faults(what: str, report: AuditReport) -> Iterator[str]:
    for finding in report.findings:
        yield f"{what}: {finding}"
    for name in sorted(report.declared - report.written):
        yield f"{what}: {name} is declared written, poisoned before the call, and was not written"
