"""pytest items for the conformance of backends, one for each check and case.

Loaded by `attnbackend_pytest` when ``--attn-backend`` is given.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from attnbackend.testing.conformance import Job, Status, Subject, open_subject, plan_jobs, run_job
from attnbackend.testing.conformance.latent import LatentSubject

__all__ = ["ConformanceFailure", "ConformanceItem", "ConformancePlugin"]


class ConformanceFailure(AssertionError):
    """What a case found, with the command that repeats it."""


class ConformanceItem(pytest.Item):
    """One case of one check. Its id is ``BACKEND::check::case``."""

    def __init__(self, *, job: Job, device: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job, self.device = job, device
        self.add_marker("attn_backend")

    def runtest(self) -> None:
        with open_subject(self.job.named, self.device) as subject:
            outcome = run_job(subject, self.job)
        if outcome.status is Status.SKIPPED:
            pytest.skip(outcome.message)
        if outcome.status is Status.KNOWN:
            pytest.xfail(outcome.message)
        if outcome.status is Status.FAILED:
            raise ConformanceFailure(f"{outcome.message}\nrepeat: {outcome.reproduce}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, ConformanceFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.name


class ConformancePlugin:
    """Adds the items of every backend that the command line names."""

    def __init__(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", "attn_backend: a case of an attention backend's conformance")
        self._config = config
        here = str(config.invocation_params.dir)
        is_path = any(not {".", ":"}.isdisjoint(named) for named in config.getoption("attn_backend"))
        if is_path and here not in sys.path:
            sys.path.insert(0, here)  # a path may lead to a module there, as for `attnbackend check`

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Before selection by ``-k`` and ``-m``, so that those see the items too."""
        option = self._config.getoption
        with ExitStack() as stack:
            for named in option("attn_backend"):
                try:
                    subject = stack.enter_context(open_subject(named, option("attn_device")))
                    items += self._items(session, subject, named)
                except (ValueError, ImportError) as error:
                    raise pytest.UsageError(f"--attn-backend {named}: {error}") from None

    def _items(
        self, session: pytest.Session, subject: Subject | LatentSubject, named: str
    ) -> Iterator[pytest.Item]:
        option = self._config.getoption
        for job in plan_jobs(subject, named=named, seed=option("attn_seed"), quick=option("attn_quick")):
            name = f"{subject.name}::{job.check.name}::{job.case.id}"
            yield ConformanceItem.from_parent(
                session, name=name, nodeid=name, job=job, device=option("attn_device")
            )
