"""What one test of latent attention is about, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnbackend.kv_cache import resolve_kv_cache_dtype

__all__ = ["MLACase"]


@dataclass(frozen=True, kw_only=True)
class MLACase:
    """Everything that determines a batch; equal cases give equal batches, on every device.

    No two sizes of a head or a row are equal, so that one taken for another shows.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    """Tokens before them; negative for a graph's padding rows, see `AttentionCase`."""
    num_padded_rows: int = 0
    num_padded_tokens: int = 0

    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"
    num_heads: int = 4
    kv_lora_rank: int = 64
    qk_rope_head_dim: int = 16
    qk_nope_head_dim: int = 32
    v_head_dim: int = 24
    block_size: int = 16
    num_layers: int = 1
    """Layers in one buffer, interleaved block by block; the batch is that of the middle one."""
    strided_tensors: bool = False
    """Queries as views of one buffer, new rows too; outputs and LSE as views of larger ones."""
    spare_blocks: int = 3
    top_k: int | None = None
    """Keys that each query selects, at random; None: all are seen."""
    lse: bool = True
    scale: float | None = None
    """None is (qk_nope_head_dim + qk_rope_head_dim) ** -0.5."""
    k_scale: float | None = None
    low_logits: bool = False
    """All logits are lower by 200, which changes no weight: exp(-200) is 0 in float32."""
    new_tokens_written: bool = True
    seed: int = 0

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Context plus query tokens of each request, padded rows left out."""
        return tuple(c + q for c, q in zip(self.context_lens, self.query_lens, strict=True))

    @property
    def causal(self) -> bool:
        """Latent attention over a cache always is."""
        return True

    @property
    def num_rows(self) -> int:
        return len(self.query_lens) + self.num_padded_rows

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens) + self.num_padded_tokens

    @property
    def head_size(self) -> int:
        """Elements of a cached row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5 if self.scale is None else self.scale

    @property
    def cache_dtype(self) -> torch.dtype:
        return resolve_kv_cache_dtype(self.kv_cache_dtype, self.dtype)
