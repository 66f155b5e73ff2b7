"""The checks, in the order in which they run: cheap ones that explain most first."""

from __future__ import annotations

from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.checks.cache_writes import CacheWrites
from attnbackend.testing.conformance.checks.compiled import Compiled
from attnbackend.testing.conformance.checks.cross_reading import CrossReading
from attnbackend.testing.conformance.checks.determinism import Determinism
from attnbackend.testing.conformance.checks.export import Export
from attnbackend.testing.conformance.checks.graphs import Graphs
from attnbackend.testing.conformance.checks.host_sync import HostSync
from attnbackend.testing.conformance.checks.lse import LSE
from attnbackend.testing.conformance.checks.numerics import Numerics
from attnbackend.testing.conformance.checks.opcheck import OpCheck
from attnbackend.testing.conformance.checks.overflow import Overflow
from attnbackend.testing.conformance.checks.padding import Padding
from attnbackend.testing.conformance.checks.plan import Plan
from attnbackend.testing.conformance.checks.refusal import Refusal
from attnbackend.testing.conformance.checks.scales import Scales
from attnbackend.testing.conformance.checks.state_audit import StateAudit
from attnbackend.testing.conformance.checks.stateless import Stateless

__all__ = ["CHECKS", "Check"]

CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        Refusal(), CacheWrites(), Numerics(), CrossReading(), Scales(), LSE(), Padding(), Stateless(),
        Determinism(), Plan(), HostSync(), Overflow(), StateAudit(), OpCheck(), Compiled(), Export(),
        Graphs(),
    )
}  # fmt: skip
"""By name."""
