"""The kit for backends of latent attention: claims, cases and reports as elsewhere, on the latent ops."""

from __future__ import annotations

from attnbackend.testing.conformance.latent.base import LatentCheck
from attnbackend.testing.conformance.latent.case import LatentCase
from attnbackend.testing.conformance.latent.cases import LatentCases
from attnbackend.testing.conformance.latent.memory import CacheWrites, Overflow, Padding, StateAudit
from attnbackend.testing.conformance.latent.numerics import LSE, Mixed, OnLatents, OwnKeys
from attnbackend.testing.conformance.latent.refusal import Refusal
from attnbackend.testing.conformance.latent.steps import Determinism, Graphs, HostSync, Plan, Stateless
from attnbackend.testing.conformance.latent.traced import Compiled, Export, OpCheck
from attnbackend.testing.conformance.latent_subject import LatentSubject

__all__ = ["LATENT_CHECKS", "LatentCase", "LatentCases", "LatentCheck", "LatentSubject"]

_ALL = (
    Refusal(), CacheWrites(), OnLatents(), OwnKeys(), Mixed(), LSE(), Padding(), Stateless(), Determinism(),
    Plan(), HostSync(), Overflow(), StateAudit(), OpCheck(), Compiled(), Export(), Graphs(),
)  # fmt: skip
LATENT_CHECKS: dict[str, LatentCheck] = {check.name: check for check in _ALL}
"""By name, in the order in which they run."""
