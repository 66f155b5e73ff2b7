"""Per-layer compute objects: what a backend's author writes the kernels' calls in.

Shape legend: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from attnbackend.metadata import AttentionMetadata
from attnbackend.types import AttentionType

__all__ = [
    "AttentionImpl",
    "AttentionImplBase",
    "AttentionParams",
    "MLAAttentionImpl",
    "OptionalTensors",
]


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


class MLAAttentionImpl(AttentionImplBase):
    """Multi-head latent attention: decode on the latent cache, prefill on up-projected keys."""

    @abstractmethod
    def forward_mqa(
        self, query: Tensor, kv_cache: Tensor, attn_metadata: AttentionMetadata,
        output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        """Decode: the absorbed query [T, H, L+R] against the latent cache; output [T, H, L]."""

    @abstractmethod
    def forward_mha(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: AttentionMetadata,
        output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        """Prefill: query and key [T, H, P+R], value [T, H, V]; output [T, H, V]."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("forward", "forward_mqa (decode) or forward_mha (prefill)")
