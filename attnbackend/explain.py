"""Another name of `attnbackend.explanation`."""

from __future__ import annotations

from attnbackend.explanation import BackendRow, BackendVerdict, Explanation, explain

__all__ = ["BackendRow", "BackendVerdict", "Explanation", "explain"]
