"""`Attention`: the layer for people who write models.

Shape legend: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor

from attnbackend.layers.heads import CachedLayer
from attnbackend.layers.paged import BatchTensors, BoundLayer, write_and_attend

__all__ = ["Attention"]


class Attention(CachedLayer):
    """Paged attention over a cache that the runtime binds.

    Args:
        num_heads: query heads.
        head_size: elements a head.
        scale: factor of the logits; None: head_size ** -0.5.
        num_kv_heads: key-value heads; None: num_heads.
        sliding_window: keys a query sees, itself included; None: all.
        attention_chunk_size: queries see keys of their own chunk of so many positions only; None: all.
        logits_soft_cap: c in ``c * tanh(s / c)``; 0 for none.
        alibi_slopes: float32 [H].
        sinks: [H], one more logit in the softmax's denominator.
        kv_sharing_target: name of an earlier layer whose cache this one reads, writing none; `bind_layers`
            gives it.

    Raises:
        ValueError: num_heads is not a multiple of num_kv_heads, or both a window and chunks.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        *,
        sliding_window: int | None = None,
        attention_chunk_size: int | None = None,
        logits_soft_cap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        kv_sharing_target: str | None = None,
    ) -> None:
        super().__init__(num_heads, head_size, scale, num_kv_heads, logits_soft_cap, sinks)
        if sliding_window is not None and attention_chunk_size is not None:
            raise ValueError(
                f"sliding_window={sliding_window} and attention_chunk_size={attention_chunk_size} are both "
                "given; expected one of the two"
            )
        self.sliding_window, self.attention_chunk_size = sliding_window, attention_chunk_size
        self.kv_sharing_target = kv_sharing_target
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, batch: BatchTensors,
        bidirectional_ranges: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of the new tokens.

        Args:
            query: [T, H * D] or [T, H, D].
            key, value: [T, K * D] or [T, K, D]; None where another layer's cache is read.
            batch: where the tokens belong.
            bidirectional_ranges: int32 [R, G, 2], positions [start, end) that see all of each other; a range
                must be computed in one step. None: there are none.

        Returns:
            In the shape of ``query``.

        Raises:
            RuntimeError: no cache was bound.
            ValueError: keys for a layer that writes none, or none for one that does.
        """
        layer = BoundLayer(
            self._bound(), self.kv_cache_dtype, self.group, self.k_scale, self.v_scale,
            writes_cache=self.kv_sharing_target is None,
        )  # fmt: skip
        k_TKD, v_TKD = (None if x is None else self.keys(x) for x in (key, value))
        out_THD = write_and_attend(
            self.queries(query), k_TKD, v_TKD, layer, batch,
            scale=self.scale, sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size, logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes, sinks=self.sinks, bidirectional_ranges=bidirectional_ranges,
        )  # fmt: skip
        return out_THD.view(query.shape)

    alibi_slopes: Tensor | None
