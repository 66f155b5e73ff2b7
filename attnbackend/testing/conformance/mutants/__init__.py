"""Deliberately broken backends: each must be rejected by the check that is named in its data."""

from __future__ import annotations

from attnbackend.testing.conformance.mutants.kernels import KERNEL_MUTANTS
from attnbackend.testing.conformance.mutants.mutant import Mutant
from attnbackend.testing.conformance.mutants.states import STATE_MUTANTS
from attnbackend.testing.conformance.mutants.writers import WRITER_MUTANTS

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: dict[str, Mutant] = {m.name: m for m in (*KERNEL_MUTANTS, *WRITER_MUTANTS, *STATE_MUTANTS)}
"""By name."""
