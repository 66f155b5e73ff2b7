"""What a check is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.subject import Subject

__all__ = ["Check"]


class Check(ABC):
    """One property of a backend, over cases that can show its absence."""

    name: ClassVar[str]
    proves: ClassVar[str]
    """What holds of a backend that passes, as a sentence."""

    @abstractmethod
    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        """The cases, from the backend's claims; none where the check has nothing to look at."""

    @abstractmethod
    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        """What is wrong, each with values; nothing: the case passes.

        An exception is a finding too.

        Raises:
            Skipped: this case cannot be judged here; its message says why.
        """
