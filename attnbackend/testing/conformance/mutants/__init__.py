"""Deliberately broken backends: each must be rejected by the check that is named in its data."""

from __future__ import annotations

from attnbackend.testing.conformance.mutants.assumptions import ASSUMPTION_MUTANTS
from attnbackend.testing.conformance.mutants.kernels import KERNEL_MUTANTS
from attnbackend.testing.conformance.mutants.kinds import KIND_MUTANTS
from attnbackend.testing.conformance.mutants.memories import MEMORY_MUTANTS
from attnbackend.testing.conformance.mutants.mutant import Mutant
from attnbackend.testing.conformance.mutants.paths import PATH_MUTANTS
from attnbackend.testing.conformance.mutants.ranges import RANGE_MUTANTS
from attnbackend.testing.conformance.mutants.states import STATE_MUTANTS
from attnbackend.testing.conformance.mutants.writers import WRITER_MUTANTS

__all__ = ["MUTANTS", "Mutant"]

_ALL = (
    *KERNEL_MUTANTS, *KIND_MUTANTS, *WRITER_MUTANTS, *STATE_MUTANTS, *MEMORY_MUTANTS, *PATH_MUTANTS,
    *ASSUMPTION_MUTANTS, *RANGE_MUTANTS,
)  # fmt: skip
MUTANTS: dict[str, Mutant] = {m.name: m for m in _ALL}
"""By name."""
