"""Running the checks."""

from __future__ import annotations

import difflib
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks import CHECKS
from attnbackend.testing.conformance.digest import cases_digest
from attnbackend.testing.conformance.known_failures import KnownFailure, known_failure
from attnbackend.testing.conformance.latent import LATENT_CHECKS, LatentCase, LatentCases, LatentSubject
from attnbackend.testing.conformance.outcome import Outcome, Skipped, Status
from attnbackend.testing.conformance.report import ConformanceReport
from attnbackend.testing.conformance.subject import BackendLike, Subject, open_subject

__all__ = ["Job", "OnProgress", "check_backend", "plan_jobs", "run_job"]

_SEEDS = 2**32

OnProgress = Callable[[int, int, Outcome], None]
"""Called after each case with the number of cases done, the number of all, and the outcome."""


@dataclass(frozen=True)
class Job:
    """One case of one check, ready to run."""

    check: Any
    """A `Check` or a `LatentCheck`, whichever the subject is for."""
    case: ConformanceCase | LatentCase
    named: str
    """The backend as the person named it, for the command that repeats the case."""
    device: str
    seed: int

    @property
    def id(self) -> str:
        return f"{self.check.name}/{self.case.id}"

    @property
    def reproduce(self) -> str:
        where = "" if self.device == "cpu" else f" --device {self.device}"
        slow = " --slow" if self.case.id == "aotinductor" else ""
        return (
            f"attnbackend check {self.named}{where} --only {self.check.name} --case {self.case.id} "
            f"--seed {self.seed}{slow}"
        )


def check_backend(
    name_or_class_or_path: BackendLike, *, device: str = "cpu", seed: int = 0,
    only: str | Iterable[str] | None = None, case: str = "*", quick: bool = False, slow: bool = False,
    stop_at_first: bool = False, on_progress: OnProgress | None = None,
    known: tuple[KnownFailure, ...] | None = None,
) -> ConformanceReport:  # fmt: skip
    """Holds a backend to its claims.

    Args:
        name_or_class_or_path: a registered name in any case, a class, or ``package.module.Class``.
        device: "cpu" or "cuda".
        seed: of all data, below 2**32; the list of cases does not depend on it.
        only: names of checks, or one name; None: all.
        case: pattern of case ids, as in a shell.
        quick: every claim and every batch, but not every pair of them.
        slow: also what takes a C++ compile (AOTInductor packages).
        stop_at_first: end after the first failure.
        on_progress: see `OnProgress`.
        known: known failures; None: the project's.

    Returns:
        An outcome for each case; ``report.ok`` is the verdict.

    Raises:
        ValueError: an unknown backend, check or device, a seed out of range, no case that matches, or a
            kind of backend that these checks do not know.
    """
    outcomes: list[Outcome] = []
    with open_subject(name_or_class_or_path, device, slow=slow) as subject:
        jobs = plan_jobs(
            subject, named=_named(name_or_class_or_path), seed=seed, only=only, case=case, quick=quick
        )
        for job in jobs:
            outcomes.append(run_job(subject, job, known))
            if on_progress is not None:
                on_progress(len(outcomes), len(jobs), outcomes[-1])
            if stop_at_first and outcomes[-1].status is Status.FAILED:
                break
        name = subject.name
    digest = cases_digest((job.check.name, job.case) for job in jobs)
    return ConformanceReport(name, device, seed, versions(), tuple(outcomes), digest)


def plan_jobs(
    subject: Subject | LatentSubject, *, named: str, seed: int = 0, only: str | Iterable[str] | None = None,
    case: str = "*", quick: bool = False,
) -> list[Job]:  # fmt: skip
    """All cases of the chosen checks, in order; see `check_backend`."""
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed is {seed}; expected 0 <= seed < {_SEEDS}")
    latent = isinstance(subject, LatentSubject)
    suite: Mapping[str, Any] = LATENT_CHECKS if latent else CHECKS
    cases = LatentCases if latent else CaseGenerator
    generate = cases(subject.backend, subject.device.type, seed, quick)
    jobs = [
        Job(check, found, named, subject.device.type, seed)
        for check in _chosen(only, suite)
        for found in check.cases(generate)
        if fnmatchcase(found.id, case)
    ]
    if not jobs:
        raise ValueError(f"no case of {subject.name} matches {case!r} in the chosen checks")
    return jobs


def run_job(
    subject: Subject | LatentSubject, job: Job, known: tuple[KnownFailure, ...] | None = None
) -> Outcome:
    """Runs one case; whatever it raises is a finding."""
    started = time.perf_counter()
    status, message = _judge(subject, job)
    entry = known_failure(subject.name, job.device, job.check.name, job.case.id, known)
    if entry is not None:
        status, message = _with_known(entry, status, message)
    return Outcome(
        check=job.check.name, case=job.case.id, feature=job.case.feature, status=status, message=message,
        reproduce=job.reproduce, seconds=time.perf_counter() - started,
    )  # fmt: skip


def _judge(subject: Subject | LatentSubject, job: Job) -> tuple[Status, str]:
    torch.manual_seed(job.seed)
    try:
        findings: Sequence[str] = job.check.run(subject, job.case)
    except Skipped as reason:
        return Status.SKIPPED, str(reason)
    except AssertionError as error:
        findings = [str(error) or "assertion failed"]
    except Exception as error:
        findings = [f"{type(error).__name__}: {error}"]
    return (Status.FAILED, "\n".join(findings)) if findings else (Status.PASSED, "")


def _with_known(entry: KnownFailure, status: Status, message: str) -> tuple[Status, str]:
    if entry.is_due(_version()):
        return Status.FAILED, f"listed as a known failure until {entry.review_by}: {entry.reason}\n{message}"
    if status is Status.PASSED:
        return Status.FAILED, f"passes, though listed as a known failure: {entry.reason}; remove the entry"
    return (Status.KNOWN, entry.reason) if status is Status.FAILED else (status, message)


def _chosen(only: str | Iterable[str] | None, suite: Mapping[str, Any]) -> Iterator[Any]:
    for name in suite if only is None else [only] if isinstance(only, str) else only:
        if name not in suite:
            near = difflib.get_close_matches(name, suite, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"allowed: {', '.join(suite)}"
            raise ValueError(f"unknown check {name!r}; {hint}")
        yield suite[name]


def _named(backend: BackendLike) -> str:
    if isinstance(backend, str):
        return backend
    is_inner = "." in backend.__qualname__
    return f"{backend.__module__}{':' if is_inner else '.'}{backend.__qualname__}"


def _version() -> str:
    from attnbackend import __version__

    return __version__


def versions() -> str:
    """``attnbackend 0.1.0, torch 2.13.0, Python 3.11.9``."""
    return f"attnbackend {_version()}, torch {torch.__version__}, Python {platform.python_version()}"
