"""One call of a FlashAttention kernel, in words that every provider of one understands.

Shape legend: T tokens, R rows, H query heads, K key-value heads, D head size, B blocks, S block_size,
W table width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnbackend.impl import AttentionParams
    from attnbackend.selector import AttentionSelectorConfig

__all__ = ["Descales", "FlashCall", "Layer", "ScheduleRequest", "window_of"]


class Descales(NamedTuple):
    """Factors of stored float8 values, float32 [R, K]."""

    query: Tensor | None
    key: Tensor
    value: Tensor


class FlashCall(NamedTuple):
    """What a kernel is asked; rows that see no key, and padding tokens, may be left unwritten."""

    query: Tensor
    """[T, H, D]."""
    key: Tensor
    """[B, S, K, D], or [T, K, D] where ``block_table`` is None: the new tokens' own, all there are."""
    value: Tensor
    output: Tensor
    """[T, H, D], written."""
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor | None
    max_query_len: int
    max_seq_len: int
    scale: float
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    """Keys that are seen to the left and to the right of a query's own position; -1: all."""
    soft_cap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    """bfloat16 [H], for providers with ``native_sinks``."""
    descales: Descales | None = None
    schedule: Tensor | None = None
    num_splits: int = 0
    """Most parts that the keys of a request are split in; 0: the library's own choice."""


class ScheduleRequest(NamedTuple):
    """What a schedule made ahead of time depends on."""

    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    block_size: int
    causal: bool
    window: tuple[int, int]
    soft_cap: float
    num_splits: int


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What decides whether a provider can serve a layer."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_size: int
    block_size: int
    group: int
    """Query heads of one key-value head."""
    causal: bool = True
    windowed: bool = False
    soft_capped: bool = False
    alibi: bool = False
    clean_pages: bool = False
    """As of `AttentionParams`: kernels may multiply what is behind the last key with 0."""

    @classmethod
    def of(
        cls, source: AttentionParams | AttentionSelectorConfig, *, kv_dtype: torch.dtype, alibi: bool,
        clean_pages: bool = False,
    ) -> Layer:  # fmt: skip
        """From a layer's parameters or configuration, which name these things alike."""
        return cls(
            dtype=source.dtype, kv_dtype=kv_dtype, head_size=source.head_size,
            block_size=source.block_size or 16, group=source.num_heads // source.num_kv_heads,
            causal=source.causal, windowed=source.sliding_window is not None,
            soft_capped=source.logits_soft_cap > 0, alibi=alibi,
            clean_pages=clean_pages,
        )  # fmt: skip


def window_of(sliding_window: int | None, causal: bool) -> tuple[int, int]:
    """A sliding window, which counts the token itself, as keys to the left and right of it."""
    left = -1 if sliding_window is None else sliding_window - 1
    return left, (0 if causal and left >= 0 else -1)
