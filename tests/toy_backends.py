"""Backends that claim what a test wants them to claim, and compute nothing."""

from __future__ import annotations

import types
from typing import Any

import torch

from attnbackend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSelectorConfig,
    KVCacheLayout,
    MLAAttentionImpl,
    MultipleOf,
)

EVERYTHING = {
    "supported_dtypes": (torch.float32, torch.float16, torch.bfloat16),
    "supported_kv_cache_dtypes": ("auto", "fp8"),
    "supported_head_sizes": (64, 128),
    "supported_block_sizes": (MultipleOf(16),),
    "supported_device_types": ("cpu", "cuda", "xpu"),
    "supported_layouts": (KVCacheLayout.NHD, KVCacheLayout.HND),
}


class ToyBuilder(AttentionMetadataBuilder[AttentionMetadata]):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return AttentionMetadata(common=common_attn_metadata)


class ToyImpl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, attn_metadata, output, tensors):
        output.zero_()


class ToyMLAImpl(MLAAttentionImpl):
    def forward_mqa(self, query_latent, query_rope, kv_cache, attn_metadata, output, tensors):
        output.zero_()

    def forward_mha(self, query, key, value, attn_metadata, output, lse):
        output.zero_()


def standard_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
    return (num_blocks, 2, block_size, num_kv_heads, head_size)


def make_backend(
    name: str = "TOY",
    *,
    impl: Any = ToyImpl,
    builder: Any = ToyBuilder,
    without: tuple[str, ...] = (),
    abstract: bool = False,
    **claims: Any,
) -> type[AttentionBackend]:
    """A backend class with ``claims`` over those of `EVERYTHING`, some attributes left out."""
    body: dict[str, Any] = {
        "get_name": staticmethod(lambda: name),
        "get_impl_cls": staticmethod(lambda: impl),
        "get_builder_cls": staticmethod(lambda: builder),
        "get_kv_cache_shape": staticmethod(standard_shape),
        **EVERYTHING,
        **claims,
        "__module__": __name__,
    }
    kept = {key: value for key, value in body.items() if key not in without}
    return types.new_class(
        "ToyBackend", (AttentionBackend,), {"abstract": abstract}, lambda ns: ns.update(kept)
    )


def config(**changes: Any) -> AttentionSelectorConfig:
    """What a backend of `EVERYTHING` accepts on a CPU, with ``changes``."""
    plain = {
        "device_type": "cpu", "head_size": 64, "num_heads": 8, "num_kv_heads": 2,
        "dtype": torch.float32, "compute_capability": None, "block_size": 16,
    }  # fmt: skip
    return AttentionSelectorConfig.dense(**{**plain, **changes})
