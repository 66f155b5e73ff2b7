"""What attention layers begin with: numbers of heads, a size and a scale, and most of them a cache.

Shape legend: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor, nn

from attnbackend.layers.paged import BoundLayer

__all__ = ["CachedLayer", "HeadedLayer"]


class HeadedLayer(nn.Module):
    """Numbers of heads and the scale, checked.

    Args:
        num_heads: query heads.
        head_size: elements a head.
        scale: factor of the logits; None: head_size ** -0.5.
        num_kv_heads: key-value heads; None: num_heads.

    Raises:
        ValueError: num_heads is not a multiple of num_kv_heads.
    """

    def __init__(self, num_heads: int, head_size: int, scale: float | None, num_kv_heads: int | None) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        self.scale = head_size**-0.5 if scale is None else scale

    def queries(self, x: Tensor) -> Tensor:
        """[T, H * D] or [T, H, D] as [T, H, D]."""
        return x.view(-1, self.num_heads, self.head_size)

    def keys(self, x: Tensor) -> Tensor:
        """[T, K * D] or [T, K, D] as [T, K, D]."""
        return x.view(-1, self.num_kv_heads, self.head_size)


class CachedLayer(HeadedLayer):
    """A layer over a cache that `bind` gives it.

    Args:
        num_heads, head_size, scale, num_kv_heads: as of `HeadedLayer`.
        logits_soft_cap: c in ``c * tanh(s / c)``; 0 for none.
        sinks: [H], one more logit in the softmax's denominator.
    """

    kv_cache: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    sinks: Tensor | None

    def __init__(
        self, num_heads: int, head_size: int, scale: float | None, num_kv_heads: int | None,
        logits_soft_cap: float, sinks: Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__(num_heads, head_size, scale, num_kv_heads)
        self.logits_soft_cap = logits_soft_cap
        self.kv_cache_dtype, self.group = "auto", -1
        self.register_buffer("sinks", sinks, persistent=False)
        for name in ("kv_cache", "k_scale", "v_scale"):
            self.register_buffer(name, None, persistent=False)

    def bind(self, layer: BoundLayer) -> None:
        """Gives the layer its cache, or that of the layer with which it shares one."""
        self.kv_cache, self.k_scale, self.v_scale = layer.kv_cache, layer.k_scale, layer.v_scale
        self.kv_cache_dtype, self.group = layer.kv_cache_dtype, layer.group

    def _bound(self) -> Tensor:
        if self.kv_cache is None:
            raise RuntimeError(
                f"this {type(self).__name__} layer has no cache; call bind(BoundLayer(kv_cache, ...)) first"
            )
        return self.kv_cache
