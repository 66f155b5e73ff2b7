"""A short name for what cases hold, by which a page knows that they changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict

from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.latent.case import LatentCase

__all__ = ["cases_digest"]


def cases_digest(cases: Iterable[tuple[str, ConformanceCase | LatentCase]]) -> str:
    """Eight hexadecimal digits of every field of every case, whatever their order, machine and torch.

    Args:
        cases: with the name of the check that looks at each.
    """
    lines = sorted(json.dumps([check, asdict(case)], default=str, sort_keys=True) for check, case in cases)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
