"""What a check of latent attention is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from attnbackend.testing.conformance.latent.case import LatentCase
from attnbackend.testing.conformance.latent.cases import LatentCases
from attnbackend.testing.conformance.latent_subject import LatentSubject

__all__ = ["LatentCheck"]


class LatentCheck(ABC):
    """As `attnbackend.testing.conformance.Check`, for backends of latent attention."""

    name: ClassVar[str]
    proves: ClassVar[str]

    @abstractmethod
    def cases(self, generate: LatentCases) -> Iterator[LatentCase]: ...

    @abstractmethod
    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]: ...
