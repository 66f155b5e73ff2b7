"""How much of a step runs from CUDA graphs: modes, and which one backends and runtime allow.

The names are those of vLLM v1; so are the values, which say what decode-only and mixed batches run as.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from attnbackend.types import AttentionCGSupport, Reason

__all__ = ["CUDAGraphMode", "GraphSupport", "ResolvedMode", "lowest_support", "resolve_cudagraph_mode"]


class CUDAGraphMode(enum.Enum):
    """What runs from a graph: nothing, all but attention (PIECEWISE), or the whole model (FULL)."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    """Whole steps in which every request decodes; others run without a graph."""
    FULL_AND_PIECEWISE = (2, 1)
    """Whole steps in which every request decodes; others in pieces."""

    __hash__ = object.__hash__  # Members are single; the one of `Enum` costs a call, at every look-up.

    @classmethod
    def parse(cls, value: CUDAGraphMode | str) -> CUDAGraphMode:
        """The mode of a name, in any case.

        Raises:
            ValueError: no mode has that name.
        """
        if isinstance(value, cls):
            return value
        found = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        if found is None:
            raise ValueError(f"cudagraph_mode={value!r} is unknown; allowed: {', '.join(cls.__members__)}")
        return found

    @property
    def decode_mode(self) -> CUDAGraphMode:
        """What a batch in which every request decodes runs as: NONE, PIECEWISE or FULL."""
        return CUDAGraphMode(self.value[0] if isinstance(self.value, tuple) else self.value)

    @property
    def mixed_mode(self) -> CUDAGraphMode:
        """What any other batch runs as."""
        return CUDAGraphMode(self.value[1] if isinstance(self.value, tuple) else self.value)

    @property
    def needs_pieces(self) -> bool:
        """Whether some batches run in pieces, so the model must have been split at attention."""
        return CUDAGraphMode.PIECEWISE in (self.decode_mode, self.mixed_mode)

    @staticmethod
    def of(decode: CUDAGraphMode, mixed: CUDAGraphMode) -> CUDAGraphMode:
        """The mode whose two halves these are.

        Decodes in pieces and mixed batches without a graph are one mode: what cuts the one cuts the other.
        """
        if decode is CUDAGraphMode.PIECEWISE:
            mixed = CUDAGraphMode.PIECEWISE
        return CUDAGraphMode(decode.value if decode is mixed else (decode.value, mixed.value))


@dataclass(frozen=True)
class GraphSupport:
    """What one group of layers lets a graph hold, and whose claim that is."""

    level: AttentionCGSupport
    backend: str


@dataclass(frozen=True)
class ResolvedMode:
    """The mode that runs, and why it is not more."""

    mode: CUDAGraphMode
    reasons: tuple[Reason, ...]
    """One for each step that the mode was lowered by, in order."""


_ALL = GraphSupport(AttentionCGSupport.ALWAYS, "a model without attention")


def lowest_support(groups: Iterable[GraphSupport]) -> GraphSupport:
    """What all groups allow; of equals, the first is named."""
    return min(groups, key=lambda support: support.level, default=_ALL)


def resolve_cudagraph_mode(
    requested: CUDAGraphMode | None,
    support: GraphSupport,
    *,
    splits_attention: bool,
    uniform_query_len: int = 1,
) -> ResolvedMode:
    """The mode to run, a pure function of its arguments.

    Args:
        requested: None lets it be as much as possible, lowered step by step with reasons; a mode named
            by a person is run as it is or refused.
        support: the lowest over all groups of layers, see `lowest_support`.
        splits_attention: whether the model was cut at attention, so that pieces can run from graphs.
        uniform_query_len: tokens that each request brings to a decode step, 1 + speculative tokens.

    Raises:
        ValueError: ``requested`` is more than is possible; it says why, and what is possible.
    """
    wanted = requested or CUDAGraphMode.FULL
    decode, why_decode = _decode_mode(wanted.decode_mode, support, splits_attention, uniform_query_len)
    mixed, why_mixed = _mixed_mode(wanted.mixed_mode, support, splits_attention)
    mode, reasons = CUDAGraphMode.of(decode, mixed), (*why_mixed, *why_decode)
    if requested is not None and reasons:
        listed = "".join(f"\n  {reason}" for reason in reasons)
        raise ValueError(
            f"cudagraph_mode={requested.name} cannot run here:{listed}\n"
            f"What can is {mode.name}; leave cudagraph_mode out to have what is possible chosen."
        )
    return ResolvedMode(mode, reasons)


Lowered = tuple[CUDAGraphMode, tuple[Reason, ...]]


def _mixed_mode(wanted: CUDAGraphMode, support: GraphSupport, splits: bool) -> Lowered:
    if wanted is CUDAGraphMode.FULL and support.level < AttentionCGSupport.ALWAYS:
        return _in_pieces("mixed_mode", _needs(support, AttentionCGSupport.ALWAYS, "mixed batches"), splits)
    return _checked_pieces("mixed_mode", wanted, splits)


def _decode_mode(wanted: CUDAGraphMode, support: GraphSupport, splits: bool, query_len: int) -> Lowered:
    single, uniform = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.UNIFORM_BATCH
    needed = single if query_len == 1 else uniform
    if wanted is CUDAGraphMode.FULL and support.level < needed:
        what = f"decodes of {query_len} token{'s' * (query_len > 1)} a request"
        return _in_pieces("decode_mode", _needs(support, needed, what), splits)
    return _checked_pieces("decode_mode", wanted, splits)


def _needs(support: GraphSupport, needed: AttentionCGSupport, what: str) -> str:
    return f"{needed.name} support for {what}; {support.backend} has {support.level.name}"


def _in_pieces(field: str, needed: str, splits: bool) -> Lowered:
    lower = CUDAGraphMode.PIECEWISE if splits else CUDAGraphMode.NONE
    reason = Reason(field, CUDAGraphMode.FULL.name, f"{lower.name}, since FULL needs {needed}")
    return lower, (reason,)


def _checked_pieces(field: str, wanted: CUDAGraphMode, splits: bool) -> Lowered:
    if wanted is CUDAGraphMode.PIECEWISE and not splits:
        reason = Reason(field, wanted.name, "FULL or NONE, since the model was not cut at attention")
        return CUDAGraphMode.NONE, (reason,)
    return wanted, ()
