"""What a step tells latent attention: which requests decode, and in which pieces the prompts are attended.

Shape legend: R requests, T tokens, S keys.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnbackend.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

__all__ = ["ContextChunk", "MLAMetadata", "MLAMetadataBuilder", "MLAPrefillMetadata", "MLAPrefillPlan"]


@dataclass(frozen=True, kw_only=True)
class MLAPrefillMetadata:
    """Sequences of queries with keys and values of their own, one behind the other."""

    cu_seqlens_q: Tensor
    """int32 [R+1], cumulative numbers of queries."""
    cu_seqlens_k: Tensor
    """int32 [R+1], cumulative numbers of keys; a sequence may have none."""
    max_seqlen_q: int
    """Upper bound of a sequence's queries."""
    max_seqlen_k: int
    """Upper bound of a sequence's keys."""
    causal: bool
    """Bottom-right aligned; False: every query sees every key of its sequence."""
    cu_seqlens_q_cpu: Tensor | None = None
    cu_seqlens_k_cpu: Tensor | None = None
    plan: Any = None
    """What the library that serves prefill planned from the other fields."""


@dataclass(frozen=True, kw_only=True)
class ContextChunk:
    """Cached keys that are up-projected and attended at once."""

    slots: Tensor
    """int64 [S], ``block * block_size + offset`` of each key."""
    attention: MLAPrefillMetadata
    """Of the queries ``start:stop``."""
    start: int
    """First token of the prompts that have keys here, counted from the first prompt's first."""
    stop: int


@dataclass(frozen=True, kw_only=True)
class MLAPrefillPlan:
    """The prompts of a step: attention to their new tokens, then to their context, chunk by chunk."""

    new_tokens: MLAPrefillMetadata
    num_tokens: int
    """Tokens of all prompts."""
    chunks: tuple[ContextChunk, ...]


@dataclass(frozen=True, kw_only=True)
class MLAMetadata(AttentionMetadata):
    """The plan of one step: leading requests decode, those behind them are prompts."""

    num_decodes: int
    num_decode_tokens: int
    decode: AttentionMetadata | None
    """The backend's plan of the decodes alone, of all rows where there are no prompts; None: there are no
    decodes."""
    prefill: MLAPrefillPlan | None
    """None: there are no prompts."""


class MLAMetadataBuilder(AttentionMetadataBuilder[MLAMetadata]):
    """Plans steps of latent attention; `attnbackend.backends.mla.common` has one to build on."""

    @abstractmethod
    def build_decode(self, common: CommonAttentionMetadata) -> AttentionMetadata:
        """The plan for `MLAAttentionImpl.forward_mqa` of these rows, which may bring any number of tokens."""
