"""`Attention`: the layer for people who write models.

Shape legend: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor, nn

from attnbackend.layers.paged import BatchTensors, BoundLayer, write_and_attend

__all__ = ["Attention"]


class Attention(nn.Module):
    """Paged attention over a cache that the runtime binds.

    Args:
        num_heads: query heads.
        head_size: elements a head.
        scale: factor of the logits; None: head_size ** -0.5.
        num_kv_heads: key-value heads; None: num_heads.
        sliding_window: keys a query sees, itself included; None: all.
        logits_soft_cap: c in ``c * tanh(s / c)``; 0 for none.
        alibi_slopes: float32 [H].
        sinks: [H], one more logit in the softmax's denominator.

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
        sliding_window: int | None = None,
        logits_soft_cap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        self.scale = head_size**-0.5 if scale is None else scale
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.kv_cache_dtype, self.group = "auto", -1
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.register_buffer("sinks", sinks, persistent=False)
        for name in ("kv_cache", "k_scale", "v_scale"):
            self.register_buffer(name, None, persistent=False)

    def bind(self, layer: BoundLayer) -> None:
        """Gives the layer its cache."""
        self.kv_cache, self.k_scale, self.v_scale = layer.kv_cache, layer.k_scale, layer.v_scale
        self.kv_cache_dtype, self.group = layer.kv_cache_dtype, layer.group

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: BatchTensors) -> Tensor:
        """Attention of the new tokens.

        Args:
            query: [T, H * D] or [T, H, D].
            key, value: [T, K * D] or [T, K, D].

        Returns:
            In the shape of ``query``.

        Raises:
            RuntimeError: no cache was bound.
        """
        if self.kv_cache is None:
            raise RuntimeError(
                "this Attention layer has no cache; call bind(BoundLayer(kv_cache, ...)) first"
            )
        layer = BoundLayer(self.kv_cache, self.kv_cache_dtype, self.group, self.k_scale, self.v_scale)
        k_TKD, v_TKD = (x.view(-1, self.num_kv_heads, self.head_size) for x in (key, value))
        out_THD = write_and_attend(
            query.view(-1, self.num_heads, self.head_size), k_TKD, v_TKD, layer, batch,
            scale=self.scale, sliding_window=self.sliding_window, logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes, sinks=self.sinks,
        )  # fmt: skip
        return out_THD.view(query.shape)

    kv_cache: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
