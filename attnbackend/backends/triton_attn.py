"""`TRITON_ATTN`: the project's Triton kernels, on GPUs and, for tests, in Triton's interpreter on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attnbackend.backends.standard import FullFeaturedBackend, PagedKernelImpl
from attnbackend.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from attnbackend.types import AttentionCGSupport, MultipleOf

__all__ = [
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonMetadata",
    "TritonMetadataBuilder",
]


@dataclass(frozen=True, kw_only=True)
class TritonMetadata(AttentionMetadata):
    is_decode: bool
    """No request brings more than one token, in a graph at no replay: the split-KV kernel serves."""


class TritonMetadataBuilder(AttentionMetadataBuilder[TritonMetadata]):
    """A plan that only chooses the kernel, from the bound of the query lengths.

    Both kernels read lengths on the device and launch grids that depend on shapes alone, so a graph
    of either replays any batch that its bound allows. For a capture, `max_query_len` must therefore
    bound every batch that will be replayed: 1 for a graph of decode steps only, more for any other.
    """

    cudagraph_support = AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TritonMetadata:  # fmt: skip
        has_cache = not self.params.attn_type.keeps_no_cache
        is_decode = has_cache and common_attn_metadata.max_query_len <= 1
        return TritonMetadata(common=common_attn_metadata, is_decode=is_decode)


class TritonAttentionImpl(PagedKernelImpl):
    def attention_kernel(self, attn_metadata: TritonMetadata, num_tokens: int) -> Callable[..., None]:
        from attnbackend.kernels import triton

        # Padding tokens beyond one a row are the unified kernel's to write.
        is_decode = attn_metadata.is_decode and num_tokens <= attn_metadata.common.seq_lens.shape[0]
        return triton.paged_decode_attention if is_decode else triton.paged_attention

    def write_kernel(self) -> Callable[..., None]:
        from attnbackend.kernels import triton

        return triton.cache_write


class TritonAttentionBackend(FullFeaturedBackend):
    """Any GPU that Triton compiles for; a CPU under TRITON_INTERPRET=1."""

    supported_head_sizes = (MultipleOf(8, 32, 256),)
    supported_block_sizes = (MultipleOf(16),)
    supported_device_types = ("cuda", "xpu", "cpu")

    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return TritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMetadataBuilder]:
        return TritonMetadataBuilder

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        from attnbackend.kernels import triton

        return triton.unavailable_reason(device_type)
