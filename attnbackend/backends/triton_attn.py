"""`TRITON_ATTN`: the project's Triton kernels, on GPUs and, for tests, in Triton's interpreter on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from attnbackend.backends.cascade import (
    DEFAULT_THRESHOLDS,
    CascadeParts,
    CascadePlanner,
    attend_in_parts,
    takes_cascade,
    use_cascade,
)
from attnbackend.backends.host_lengths import BatchFacts, with_host_lengths
from attnbackend.backends.standard import FullFeaturedBackend, PagedKernelImpl, kernel_features
from attnbackend.backends.widened import FLOAT8, WidenedBuilder, WidenedPlan, attend_copy, widened_params
from attnbackend.impl import AttentionParams, OptionalTensors
from attnbackend.kv_cache import KVCacheSpec, resolve_kv_cache_dtype
from attnbackend.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    BatchLimits,
    CommonAttentionMetadata,
)
from attnbackend.types import AttentionCGSupport, MultipleOf

__all__ = [
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonMetadata",
    "TritonMetadataBuilder",
]

_FEW_TOKENS = 16
"""Of a request, in the mean: with as many, prompts are cut into tiles of their own."""


@dataclass(frozen=True, kw_only=True)
class TritonMetadata(AttentionMetadata):
    is_decode: bool
    """No request brings more than one token, in a graph at no replay: the split-KV kernel serves."""
    cascade: CascadeParts | None = None
    """The batch in parts, where its requests share a prefix long enough."""
    widened: WidenedPlan | None = None
    """Prompts over a float8 cache, planned over a copy of its pages for the kernel that reads 16 bits."""


class TritonMetadataBuilder(AttentionMetadataBuilder[TritonMetadata]):
    """A plan that chooses the kernel, from the bound of the query lengths, and whether to cut in parts.

    Both kernels read lengths on the device and launch grids that depend on shapes alone, so a graph
    of either replays any batch that its bound allows. For a capture, `max_query_len` must therefore
    bound every batch that will be replayed: 1 for a graph of decode steps only, more for any other.
    Outside of graphs a plan may have prompts over a float8 cache served from a widened copy.
    """

    cudagraph_support = AttentionCGSupport.ALWAYS
    cascade_thresholds = DEFAULT_THRESHOLDS

    def __init__(
        self, params: AttentionParams, kv_cache_spec: KVCacheSpec, limits: BatchLimits | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(params, kv_cache_spec, limits, device)
        self._planner = CascadePlanner(params.block_size, limits, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TritonMetadata:  # fmt: skip
        plan, common = self._plan(common_prefix_len, common_attn_metadata, fast_build), common_attn_metadata
        if plan.is_decode or plan.cascade is not None or not self._may_copy(common):
            return plan
        known = with_host_lengths(common) if self.limits is None else common
        return replace(plan, widened=self._copies.build(0, known, fast_build))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> TritonMetadata:
        """Without copies, which would be as large as any."""
        return self._plan(0, common_attn_metadata, False)

    def _plan(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool
    ) -> TritonMetadata:  # fmt: skip
        is_decode = not self.params.attn_type.keeps_no_cache and common.max_query_len <= 1
        cascade = None
        if common_prefix_len and not fast_build and self._cuts(common_prefix_len, common):
            cascade = self._planner.split(common_prefix_len, common)
        return TritonMetadata(common=common, is_decode=is_decode, cascade=cascade)

    @cached_property
    def _copies(self) -> WidenedBuilder:
        return WidenedBuilder((TritonAttentionBackend,), self.params, self.limits, self.device)

    def _may_copy(self, batch: CommonAttentionMetadata) -> bool:
        """Whether the kernel for Hopper, which reads no float8, would serve a copy."""
        if self.params.kv_cache_dtype not in FLOAT8:
            return False
        from attnbackend.kernels.triton.mla_hopper_launch import device_problem
        from attnbackend.kernels.triton.paged_hopper_launch import KEYS, MIN_TOKENS

        p = self.params
        return (
            self._is_plain()
            and p.head_size in KEYS
            and p.dtype.itemsize == 2
            and batch.num_actual_tokens >= MIN_TOKENS * batch.seq_lens.shape[0]
            and device_problem(self.device) is None
        )

    def _is_plain(self) -> bool:
        """Causal attention over all keys, and no more."""
        p = self.params
        return p.causal and not (p.sliding_window or p.attention_chunk_size or p.logits_soft_cap)

    def leads_on_prompts(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """On many short ones without context, on Hopper: measured against FlashAttention 3."""
        from attnbackend.kernels.triton.paged_hopper_launch import is_ahead

        p, batch = self.params, common_attn_metadata
        tokens, rows = batch.num_actual_tokens, batch.seq_lens.shape[0]
        return (
            self._is_plain()
            and resolve_kv_cache_dtype(p.kv_cache_dtype, p.dtype) is p.dtype
            and is_ahead(
                tokens, rows, batch.max_seq_len, p.head_size, p.dtype, self.device, on_pages=p.clean_pages
            )
            and BatchFacts.of(batch, causal=True).are_new_sequences
        )

    def plans_each_replay(self, max_query_len: int) -> bool:
        return type(self).build is not TritonMetadataBuilder.build

    def _cuts(self, common_prefix_len: int, common: CommonAttentionMetadata) -> bool:
        return use_cascade(
            self.params, common_prefix_len, num_reqs=common.num_reqs,
            max_query_len=common.max_query_len, thresholds=self.cascade_thresholds,
        )  # fmt: skip


class TritonAttentionImpl(PagedKernelImpl):
    keeps_to_its_stream = True

    def attention_kernel(
        self, attn_metadata: TritonMetadata, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> Callable[..., None]:
        from attnbackend.kernels import triton

        # Padding tokens beyond one a row are the unified kernel's to write.
        if attn_metadata.is_decode and query.shape[0] <= attn_metadata.common.seq_lens.shape[0]:
            return triton.paged_decode_attention
        longest, rows = attn_metadata.common.max_seq_len, attn_metadata.common.seq_lens.shape[0]
        # A few tokens of few requests over many keys do not fill a device.
        splits = None if query.shape[0] < _FEW_TOKENS * rows else 1
        return partial(triton.paged_attention, key=key, value=value, max_seq_len=longest, num_splits=splits)

    def quantizes(self, attn_metadata: TritonMetadata, tensors: OptionalTensors) -> bool:
        from attnbackend.kernels import triton

        if attn_metadata.cascade is not None and takes_cascade(tensors):
            return False
        if (scales := tensors.output_block_scale) is None:
            return True
        size = self.params.head_size
        return triton.takes_output_groups(self.params.num_heads * size // scales.shape[1], size)

    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: TritonMetadata, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        parts, widened = attn_metadata.cascade, attn_metadata.widened
        if widened is not None and not _has_extras(tensors):
            attend = self._over_copies.attend
            attend_copy(attend, widened, self.params.dtype, query, kv_cache, output, tensors)
            return
        if parts is None or not takes_cascade(tensors):
            super().attend(query, key, value, kv_cache, attn_metadata, output, tensors)
            return
        from attnbackend.kernels import triton

        keys, values = kv_cache.unbind(1)
        suffix_kernel = self.attention_kernel(attn_metadata, query, None, None)
        # Few tokens over many keys: the keys are split too.
        prefix_kernel = partial(triton.paged_attention, num_splits=None)

        def attend_part(
            batch: CommonAttentionMetadata, out: Tensor, own: OptionalTensors, causal: bool
        ) -> None:
            features = kernel_features(self.params, own) | {"causal": causal}
            (suffix_kernel if causal else prefix_kernel)(
                query, keys, values, out, batch.query_start_loc, batch.seq_lens, batch.block_table,
                **features,
            )  # fmt: skip

        attend_in_parts(attend_part, parts, output, tensors, triton.merge_over)

    @cached_property
    def _over_copies(self) -> TritonAttentionImpl:
        return TritonAttentionImpl(widened_params(self.params))

    def write_kernel(self) -> Callable[..., None]:
        from attnbackend.kernels import triton

        return triton.cache_write


def _has_extras(tensors: OptionalTensors) -> bool:
    """Whether a call brings what the kernel for Hopper does not take."""
    taken = tensors._replace(lse=None, k_scale=None, v_scale=None)
    return any(tensor is not None for tensor in taken)


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
    def quantizes_in_kernel(cls, head_size: int, group: int | None) -> bool:
        from attnbackend.kernels import triton

        return group is None or triton.takes_output_groups(group, head_size)

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        from attnbackend.kernels import triton

        return triton.unavailable_reason(device_type)
