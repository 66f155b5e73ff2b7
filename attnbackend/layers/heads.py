"""What all attention layers begin with: numbers of heads, a size and a scale.

Shape legend: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["HeadedLayer"]


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
