"""The conformance kit: what a backend claims is what it does, and anyone can check it.

``attnbackend check NAME`` on the command line, ``pytest --attn-backend NAME``, or here::

    check_backend("my_package.attn.MyBackend").assert_ok()
"""

from __future__ import annotations

from attnbackend.testing.conformance.case import ConformanceCase, RefusalCase
from attnbackend.testing.conformance.checks import CHECKS, Check
from attnbackend.testing.conformance.html import report_html
from attnbackend.testing.conformance.known_failures import KNOWN_FAILURES, KnownFailure
from attnbackend.testing.conformance.outcome import Outcome, Skipped, Status
from attnbackend.testing.conformance.report import ConformanceReport
from attnbackend.testing.conformance.runner import Job, check_backend, plan_jobs, run_job
from attnbackend.testing.conformance.subject import Subject, open_subject

__all__ = [
    "CHECKS",
    "KNOWN_FAILURES",
    "Check",
    "ConformanceCase",
    "ConformanceReport",
    "Job",
    "KnownFailure",
    "Outcome",
    "RefusalCase",
    "Skipped",
    "Status",
    "Subject",
    "check_backend",
    "open_subject",
    "plan_jobs",
    "report_html",
    "run_job",
]
