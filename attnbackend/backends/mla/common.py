"""What backends of latent attention have in common: the cache's shape, the plan of a step, prompts.

Shape legend: T tokens, S keys, H heads, L kv_lora_rank, R qk_rope_head_dim.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbackend.backend import AttentionBackend, KVCacheDims
from attnbackend.backends.mla.planning import plan_mla_step
from attnbackend.backends.mla.prefill import MLAPrefill, MLAPrefillConfig, select_mla_prefill
from attnbackend.impl import AttentionParams, MLAAttentionImpl
from attnbackend.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attnbackend.mla_cache import mla_row_width
from attnbackend.mla_metadata import MLAMetadata, MLAMetadataBuilder, MLAPrefillMetadata
from attnbackend.platforms import current_platform
from attnbackend.selector import AttentionSelectorConfig
from attnbackend.types import AttentionCGSupport, KVCacheLayout, Reason

__all__ = [
    "MLACommonBackend",
    "MLACommonImpl",
    "MLACommonMetadataBuilder",
    "SparseMLAMetadataBuilder",
    "joined_query",
]


def joined_query(query_latent: Tensor, query_rope: Tensor) -> Tensor:
    """Both parts of the queries as one [T, H, L + R]: without a copy where they lie side by side already."""
    rank, rope = query_latent.shape[-1], query_rope.shape[-1]
    next_to = query_latent.data_ptr() + rank * query_latent.element_size()
    if query_rope.data_ptr() == next_to and query_latent.stride() == query_rope.stride():
        end = query_rope.storage_offset() + sum(
            (n - 1) * s for n, s in zip(query_rope.shape, query_rope.stride(), strict=True)
        )
        if (end + 1) * query_rope.element_size() <= query_latent.untyped_storage().nbytes():
            return query_latent.as_strided((*query_latent.shape[:-1], rank + rope), query_latent.stride())
    return torch.cat([query_latent, query_rope], -1)


class MLACommonMetadataBuilder(MLAMetadataBuilder):
    """Splits a step into decodes and prompts, and cuts the prompts' context into chunks.

    Everything comes from the batch's lengths on the host, so that nothing waits for the device.
    """

    reorder_batch_threshold: ClassVar[int | None] = 1
    """Leading requests with up to so many tokens run on the latent cache; None: all requests do."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        threshold = cls.reorder_batch_threshold
        if threshold is not None and cls.cudagraph_support is AttentionCGSupport.ALWAYS:
            raise TypeError(
                f"{cls.__name__} claims cudagraph_support=ALWAYS with reorder_batch_threshold={threshold}: a "
                "graph of prompts would keep the chunks that one step's lengths were cut in; allowed: "
                "UNIFORM_BATCH or less, or reorder_batch_threshold=None, all queries on the latent cache"
            )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        splits = self.reorder_batch_threshold is not None
        self._prefill = _prefill_of(self.params, self.device) if splits else None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAMetadata:  # fmt: skip
        return plan_mla_step(
            common_attn_metadata, self.build_decode, self.plan_prefill, block_size=self.params.block_size,
            threshold=self.reorder_batch_threshold,
        )  # fmt: skip

    def build_decode(self, common: CommonAttentionMetadata) -> AttentionMetadata:
        """The plan for `MLAAttentionImpl.forward_mqa` of these rows; the default plans nothing."""
        return AttentionMetadata(common=common)

    def plan_prefill(self, metadata: MLAPrefillMetadata) -> MLAPrefillMetadata:
        """With what the library that attends to prompts plans once a step."""
        return metadata if self._prefill is None else self._prefill.planned(metadata)


class SparseMLAMetadataBuilder(MLACommonMetadataBuilder):
    """For sparse backends, whose queries all run on the latent cache."""

    reorder_batch_threshold = None


def _prefill_of(params: AttentionParams, device: torch.device) -> MLAPrefill | None:
    """The library for the prompts of such layers; None where the sizes of heads are not known."""
    mla = params.mla
    if mla is None or mla.qk_nope_head_dim is None or mla.v_head_dim is None:
        return None
    config = MLAPrefillConfig(
        device_type=params.device_type, num_heads=params.num_heads, dtype=params.dtype,
        compute_capability=current_platform(params.device_type).compute_capability,
        qk_head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim, v_head_dim=mla.v_head_dim,
    )  # fmt: skip
    return select_mla_prefill(config)(config, params.scale, device)


class MLACommonImpl(MLAAttentionImpl):
    """Attends to prompts with the library chosen for them; `forward_mqa` is left to write."""

    def __init__(self, params: AttentionParams) -> None:
        super().__init__(params)
        self._prefills: dict[Any, MLAPrefill] = {}

    def forward_mha(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        config = MLAPrefillConfig.of(query, value)
        cls = select_mla_prefill(config)
        prefill = self._prefills.get((cls, config))
        if prefill is None:
            prefill = self._prefills[cls, config] = cls(config, self.params.scale, query.device)
        prefill(query, key, value, attn_metadata, output, lse)


class MLACommonBackend(AttentionBackend, abstract=True):
    """A backend over latent caches of shape (num_blocks, block_size, row width)."""

    is_mla = True
    latent_sizes: ClassVar[tuple[tuple[int, int], ...] | None] = None
    """Pairs (kv_lora_rank, qk_rope_head_dim) that the kernels know; None: any."""

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return MLACommonMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, block_size, mla_row_width(head_size, cache_dtype_str))

    @classmethod
    def get_kv_cache_stride_order(cls, layout: KVCacheLayout) -> tuple[int, ...]:
        return (0, 1, 2)

    @classmethod
    def parse_kv_cache_shape(cls, shape: tuple[int, ...]) -> KVCacheDims:
        num_blocks, block_size, width = shape
        return KVCacheDims(num_blocks, block_size, 1, width)

    @classmethod
    def supports_combination(cls, config: AttentionSelectorConfig) -> list[Reason]:
        reasons = []
        if config.num_kv_heads != 1:
            reasons.append(Reason("num_kv_heads", config.num_kv_heads, "1: all heads read one latent"))
        known, rank = cls.latent_sizes, config.kv_lora_rank
        if rank is not None and not 0 < rank < config.head_size:
            reasons.append(Reason("kv_lora_rank", rank, f"1 to {config.head_size - 1}, a part of head_size"))
        if known is not None and rank is not None and (rank, config.head_size - rank) not in known:
            pairs = ", ".join(f"{a} + {b}" for a, b in known)
            asked = f"{rank} + {config.head_size - rank}"
            reasons.append(Reason("kv_lora_rank + qk_rope_head_dim", asked, pairs))
        return reasons
