"""`EncoderAttention` and `CrossAttention`: layers of encoders, and of decoders that read their output.

Shape legend: R requests, T tokens, E encoder tokens, W block-table width, H query heads, K key-value heads,
D head size, S block_size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnbackend._torch_compat import register_namedtuple
from attnbackend.layers.heads import CachedLayer, HeadedLayer
from attnbackend.ops import attention, kv_cache_update
from attnbackend.types import AttentionType

__all__ = ["CrossAttention", "CrossTensors", "EncoderAttention", "EncoderTensors"]

_BLOCK_SIZE = 16
"""Of caches that have no blocks."""


class EncoderTensors(NamedTuple):
    """Where the sequences of a batch lie among its tokens."""

    query_start_loc: Tensor
    """int32 [R+1]."""
    seq_lens: Tensor
    """int32 [R], the same lengths, or 0 for a request whose output shall be zeros."""


class CrossTensors(NamedTuple):
    """Where a decoder's tokens belong, and the encoder's keys of their requests."""

    query_start_loc: Tensor
    """int32 [R+1], of the decoder's tokens."""
    encoder_seq_lens: Tensor
    """int32 [R], encoder tokens in the cache."""
    encoder_block_table: Tensor
    """int32 [R, W], blocks of the cross-attention cache."""


register_namedtuple(EncoderTensors)
register_namedtuple(CrossTensors)


class EncoderAttention(HeadedLayer):
    """Attention among the tokens of each sequence, without a cache.

    Args:
        num_heads, head_size, scale, num_kv_heads: as of `Attention`.
        causal: queries do not see later keys.
        sliding_window: keys with a distance below it are seen, to both sides unless causal; None: all.
        attention_chunk_size, logits_soft_cap, alibi_slopes, sinks: as of `Attention`.
        attn_type: "encoder_only", or "encoder" where a decoder attends to the output.

    Raises:
        ValueError: num_heads is not a multiple of num_kv_heads, or an attn_type that keeps a cache.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        *,
        causal: bool = False,
        sliding_window: int | None = None,
        attention_chunk_size: int | None = None,
        logits_soft_cap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        attn_type: AttentionType | str = AttentionType.ENCODER_ONLY,
    ) -> None:
        super().__init__(num_heads, head_size, scale, num_kv_heads)
        self.attn_type = AttentionType(attn_type)
        if not self.attn_type.keeps_no_cache:
            raise ValueError(
                f"attn_type={str(attn_type)!r} keeps a cache; expected 'encoder_only' or 'encoder'"
            )
        self.causal, self.logits_soft_cap = causal, logits_soft_cap
        self.sliding_window, self.attention_chunk_size = sliding_window, attention_chunk_size
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.register_buffer("sinks", sinks, persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: EncoderTensors) -> Tensor:
        """Attention of all tokens.

        Args:
            query: [T, H * D] or [T, H, D].
            key, value: [T, K * D] or [T, K, D].

        Returns:
            In the shape of ``query``; zeros at tokens behind the last sequence.
        """
        q_THD, k_TKD = self.queries(query), self.keys(key)
        output = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        attention(
            q_THD, k_TKD, self.keys(value),
            k_TKD.new_empty(0, 2, _BLOCK_SIZE, self.num_kv_heads, self.head_size), output,
            batch.query_start_loc, batch.seq_lens, batch.seq_lens.new_zeros(batch.seq_lens.shape[0], 1),
            scale=self.scale, causal=self.causal, sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size, logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes, sinks=self.sinks, attn_type=str(self.attn_type),
        )  # fmt: skip
        return output.view(query.shape)

    alibi_slopes: Tensor | None
    sinks: Tensor | None


class CrossAttention(CachedLayer):
    """A decoder's attention to an encoder's output, whose keys and values have a cache of their own.

    `write` puts them there once a request; `forward` reads them at every step.

    Args:
        num_heads, head_size, scale, num_kv_heads: as of `Attention`.
        logits_soft_cap, sinks: as of `Attention`.

    Raises:
        ValueError: num_heads is not a multiple of num_kv_heads.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        *,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__(num_heads, head_size, scale, num_kv_heads, logits_soft_cap, sinks)

    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Writes keys and values of encoder tokens.

        Args:
            key, value: [E, K * D] or [E, K, D].
            slot_mapping: int64 [E], ``block * S + offset``; -1 means do not write.

        Raises:
            RuntimeError: no cache was bound.
        """
        kv_cache_update(
            self.keys(key), self.keys(value), self._bound(), slot_mapping, k_scale=self.k_scale,
            v_scale=self.v_scale, kv_cache_dtype=self.kv_cache_dtype, group=self.group,
        )  # fmt: skip

    def forward(self, query: Tensor, batch: CrossTensors) -> Tensor:
        """Attention of the decoder's tokens to all encoder tokens of their request.

        Args:
            query: [T, H * D] or [T, H, D].

        Returns:
            In the shape of ``query``; zeros where a request has no encoder tokens.

        Raises:
            RuntimeError: no cache was bound.
        """
        q_THD = self.queries(query)
        output = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        attention(
            q_THD, None, None, self._bound(), output, batch.query_start_loc, batch.encoder_seq_lens,
            batch.encoder_block_table, scale=self.scale, causal=False, logits_soft_cap=self.logits_soft_cap,
            sinks=self.sinks, k_scale=self.k_scale, v_scale=self.v_scale, kv_cache_dtype=self.kv_cache_dtype,
            attn_type=str(AttentionType.ENCODER_DECODER), group=self.group,
        )  # fmt: skip
        return output.view(query.shape)
