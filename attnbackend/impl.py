"""Per-layer compute objects: what a backend's author writes the kernels' calls in.

Shape legend: T tokens, H query heads, K key-value heads, D head size. Of latent attention: S keys,
L kv_lora_rank, R qk_rope_head_dim, P qk_nope_head_dim, V v_head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from attnbackend.mla_metadata import MLAPrefillMetadata
from attnbackend.types import AttentionType

__all__ = [
    "AttentionImpl",
    "AttentionImplBase",
    "AttentionParams",
    "MLAAttentionImpl",
    "MLADims",
    "MLATensors",
    "OptionalTensors",
    "SparseMLAAttentionImpl",
]


@dataclass(frozen=True, kw_only=True)
class MLADims:
    """The sizes of a latent-attention layer; DeepSeek-V3's are 512, 64, 128 and 128."""

    kv_lora_rank: int
    """L: elements of the latent that keys and values of all heads are projected from."""
    qk_rope_head_dim: int
    """R: elements of the rotated part of a key, one for all heads."""
    qk_nope_head_dim: int | None = None
    """P: elements of a head's other part of query and key; None where an op's arguments do not say."""
    v_head_dim: int | None = None
    """V: elements of a head's value; None where an op's arguments do not say."""


@dataclass(frozen=True, kw_only=True)
class AttentionParams:
    """Everything about an attention layer that does not change from step to step."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_cache_dtype: str
    block_size: int
    device_type: str
    scale: float
    causal: bool = True
    sliding_window: int | None = None
    """Keys a query sees, itself included; None for all. An encoder's that is not causal is two-sided."""
    attention_chunk_size: int | None = None
    """Queries see keys of their own chunk of positions only; None for all."""
    logits_soft_cap: float = 0.0
    """c in ``c * tanh(s / c)``; 0 for none."""
    attn_type: AttentionType = AttentionType.DECODER
    clean_pages: bool = False
    """Slots behind a request's last key hold zeros up to the page's end: a copy of pages, not a cache."""
    mla: MLADims | None = None
    """Latent attention: what ``head_size``, the elements of a cached row, is made of."""


class OptionalTensors(NamedTuple):
    """The tensors that a layer may or may not bring; a backend sees only those that it claims."""

    lse: Tensor | None = None
    """float32 [T, H], written: log-sum-exp of the scaled logits, in the backend's `lse_base`."""
    alibi_slopes: Tensor | None = None
    """float32 [H]."""
    sinks: Tensor | None = None
    """[H], one extra logit in the softmax's denominator."""
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    """float32, [1] or [K]: real key = stored key * k_scale."""
    v_scale: Tensor | None = None
    output_scale: Tensor | None = None
    output_block_scale: Tensor | None = None
    bidirectional_ranges: Tensor | None = None
    """int32 [R, G, 2], positions [start, end) that see all of each other."""


class AttentionImplBase(ABC):  # noqa: B024 (its subclasses have the abstract methods)
    """Common to dense and latent attention: construction from the layer's fixed parameters."""

    def __init__(self, params: AttentionParams) -> None:
        self.params = params

    def _refuse(self, method: str, instead: str) -> NoReturn:
        kind = "latent (MLA)" if isinstance(self, MLAAttentionImpl) else "standard"
        raise TypeError(
            f"{type(self).__name__} has no {method}(): it implements a {kind} attention backend. "
            f"Call {instead} instead, or select a backend of the other kind."
        )


class AttentionImpl(AttentionImplBase):
    """Standard attention over a cache of keys and values."""

    keeps_to_its_stream: ClassVar[bool] = False
    """`forward` works on the current CUDA stream alone, and writes no memory that outlasts the call but the
    output and the LSE: a call may run beside one of another backend's, on another stream."""

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        """Writes attention of every query token to ``output`` (and ``tensors.lse``).

        Args:
            query: [T, H, D].
            key, value: [T, K, D], the new tokens' own. They are in the cache already; a backend may
                read them there instead where no request has context. Where `attn_type` is an
                encoder's they are all the keys there are; in cross attention they are None.
            kv_cache: as the backend's `get_kv_cache_shape`, with any strides; of no blocks where
                `attn_type` is an encoder's.
            attn_metadata: the plan that this backend's builder made.
            output: [T, H, D]; every row must be written, see "Batch" in the documentation.
        """

    def kv_cache_update(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor,
        tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        """Writes new keys and values to their slots. The default suits the standard cache shape."""
        from attnbackend.kv_cache import write_kv_cache

        write_kv_cache(key, value, kv_cache, slot_mapping, tensors.k_scale, tensors.v_scale)

    def forward_mqa(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("forward_mqa", "forward")

    def forward_mha(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("forward_mha", "forward")


class MLATensors(NamedTuple):
    """The tensors that a latent layer may or may not bring to `MLAAttentionImpl.forward_mqa`."""

    lse: Tensor | None = None
    """float32 [T, H], written, in the backend's `lse_base`."""
    k_scale: Tensor | None = None
    """float32 [1]: real row = stored row * k_scale."""
    topk_indices: Tensor | None = None
    """int32 [T, N], positions in the request that a query may see, none twice; -1: none. Given to sparse
    backends, always, and to no other."""


class MLAAttentionImpl(AttentionImplBase):
    """Multi-head latent attention: decode on the latent cache, prefill on up-projected keys and values."""

    @abstractmethod
    def forward_mqa(
        self, query_latent: Tensor, query_rope: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, tensors: MLATensors,
    ) -> None:  # fmt: skip
        """Attention of absorbed queries to the latent cache: all heads read one key, whose first L elements
        are the value too. Causal, bottom-right aligned, for any number of tokens a request.

        Args:
            query_latent: [T, H, L], ``query @ W_UK``; any strides, the last 1.
            query_rope: [T, H, R]; likewise.
            kv_cache: [num_blocks, block_size, L + R], any strides but the last; for "fp8_ds_mla" the bytes
                that `attnbackend.mla_cache` describes.
            attn_metadata: the plan that the builder's `build_decode` made.
            output: [T, H, L]; every row must be written: zeros, and an LSE of -inf, where no key is seen.
        """

    @abstractmethod
    def forward_mha(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        """Attention of sequences to keys and values of their own.

        Args:
            query: [T, H, P + R].
            key: [S, H, P + R].
            value: [S, H, V].
            attn_metadata: where the sequences begin, and whether they are causal (bottom-right aligned).
            output: [T, H, V]; every row must be written, as in `forward_mqa`.
            lse: float32 [T, H], written: natural logarithms, whatever the backend's `lse_base`.
        """

    def mla_kv_cache_update(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None
    ) -> None:
        """Writes latents [T, L] and rotated keys [T, R] to their slots, with torch's own ops."""
        from attnbackend.mla_cache import write_mla_cache

        write_mla_cache(kv_c, k_pe, kv_cache, slot_mapping, k_scale, self.params.kv_cache_dtype)

    def gather_latents(
        self, kv_cache: Tensor, slots: Tensor, k_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Latents [S, L] and rotated keys [S, R] at slots, int64 [S], in the model's type."""
        from attnbackend.mla_cache import read_mla_cache

        assert self.params.mla is not None
        rank, dtype = self.params.mla.kv_lora_rank, self.params.dtype
        return read_mla_cache(kv_cache, slots, k_scale, self.params.kv_cache_dtype, rank, dtype)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("forward", "forward_mqa (decode) or forward_mha (prefill)")


class SparseMLAAttentionImpl(MLAAttentionImpl):
    """Latent attention to selected tokens: every query goes through `forward_mqa`, with its top-k."""

    def forward_mha(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} has no forward_mha(): a sparse latent backend attends to selected tokens "
            "of the cache. Call forward_mqa with topk_indices, or select a backend with is_sparse=False."
        )
