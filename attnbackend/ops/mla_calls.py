"""The arguments of the roles of latent attention, once; see `attnbackend.ops.calls`.

Shape legend: T tokens, S keys, H query heads, L kv_lora_rank, R qk_rope_head_dim, P qk_nope_head_dim,
V v_head_dim, Q requests, W block-table width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["MLAAttentionCall", "MLACacheUpdateCall", "MLAMixedCall", "MLAPrefillCall"]


class MLAAttentionCall(NamedTuple):
    """One call of `mla_attention` or of a backend's ``forward_mqa``: absorbed queries on the latent cache.

    Causal and bottom-right aligned for any number of tokens a request.
    """

    query_latent: Tensor
    """[T, H, L], ``query @ W_UK``."""
    query_rope: Tensor
    """[T, H, R], rotated."""
    kv_cache: Tensor
    """[num_blocks, block_size, L + R], any strides, or bytes of "fp8_ds_mla"; read. The new tokens' rows are
    in it already."""
    output: Tensor
    """[T, H, L], written: every row. ``output @ W_UV`` is the attention's."""
    query_start_loc: Tensor
    """int32 [Q+1]."""
    seq_lens: Tensor
    """int32 [Q]."""
    block_table: Tensor
    """int32 [Q, W]."""
    scale: float
    """Factor of the logits, usually (P + R) ** -0.5."""
    lse: Tensor | None = None
    """float32 [T, H], written: natural log of the sum of exponentials of the logits."""
    topk_indices: Tensor | None = None
    """int32 [T, N], positions in the request that a query may see, none twice, -1 for none; positions behind
    the query's own are not seen. Its presence asks for a sparse backend."""
    k_scale: Tensor | None = None
    """float32 [1]: real row = stored row * k_scale."""
    kv_cache_dtype: str = "auto"
    group: int = -1
    """KV cache group whose plan of this step applies; -1 for none."""


class MLAMixedCall(NamedTuple):
    """One call of `mla_mixed_attention` or of a backend's ``forward_mixed``: a whole step, prompts included.

    Leading requests that bring one token run on the latent cache, those behind them on keys and values that
    are projected from their new tokens and, chunk by chunk, from their context.
    """

    query: Tensor
    """[T, H, P + R]: the part that is not rotated, then the rotated one."""
    kv_c: Tensor
    """[T, L], the new tokens' normalised latents, in the cache already."""
    k_pe: Tensor
    """[T, R], the new tokens' rotated keys, in the cache already."""
    kv_cache: Tensor
    """As `MLAAttentionCall`'s."""
    kv_b_weight: Tensor
    """[H, P + V, L]: a latent times its transpose is a head's key without rotation, then its value."""
    output: Tensor
    """[T, H, V], written: every row."""
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    scale: float
    k_scale: Tensor | None = None
    kv_cache_dtype: str = "auto"
    group: int = -1


class MLAPrefillCall(NamedTuple):
    """One call of a backend's ``forward_mha``: sequences with keys and values of their own."""

    query: Tensor
    """[T, H, P + R]."""
    key: Tensor
    """[S, H, P + R]."""
    value: Tensor
    """[S, H, V]."""
    output: Tensor
    """[T, H, V], written: every row."""
    cu_seqlens_q: Tensor
    """int32 [Q+1]."""
    cu_seqlens_k: Tensor
    """int32 [Q+1]."""
    scale: float
    lse: Tensor | None = None
    """float32 [T, H], written: natural log."""
    causal: bool = True
    """Bottom-right aligned; False: every query sees all keys of its sequence."""


class MLACacheUpdateCall(NamedTuple):
    """One call of `mla_kv_cache_update` or of a backend's own writer."""

    kv_c: Tensor
    """[T, L], the normalised latents."""
    k_pe: Tensor
    """[T, R], the rotated keys."""
    kv_cache: Tensor
    """As `MLAAttentionCall`'s; written."""
    slot_mapping: Tensor
    """int64 [T], ``block * block_size + offset``; -1 means do not write."""
    k_scale: Tensor | None = None
    """float32 [1]: stored = real / k_scale, for "fp8" caches."""
    kv_cache_dtype: str = "auto"
    group: int = -1
