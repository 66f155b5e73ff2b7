"""`FLEX_ATTENTION`: torch's ``flex_attention`` over copies of the keys and values that a step uses.

On a GPU it runs compiled, with a block mask that the builder makes from the batch's lengths. On a CPU it
runs in ``flex_attention``'s plain math form, a request at a time: Inductor's C++ kernel of it gives no LSE
(torch 2.13), and each set of features would take a C++ compile.

Shape legend: M packed query rows, N packed key rows, T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnbackend._torch_compat import flex_attention_reason
from attnbackend.backends.standard import FullFeaturedBackend, StandardImpl, write_empty
from attnbackend.impl import AttentionParams, OptionalTensors
from attnbackend.kernels.flex import (
    FormKey,
    Packing,
    Span,
    TileSizes,
    Visibility,
    host_spans,
    math_form,
    pack,
    run_compiled,
    tile_sizes,
)
from attnbackend.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from attnbackend.types import MultipleOf

__all__ = [
    "FlexAttentionBackend",
    "FlexAttentionImpl",
    "FlexAttentionMetadata",
    "FlexAttentionMetadataBuilder",
]


def compiles(device_type: str) -> bool:
    """Whether the compiled form serves a device; the math form does elsewhere."""
    return device_type != "cpu"


@dataclass(frozen=True, kw_only=True)
class FlexAttentionMetadata(AttentionMetadata):
    params: AttentionParams
    spans: tuple[Span, ...]
    device: torch.device
    packing: Packing

    @property
    def num_tokens(self) -> int:
        """End of the last request; tokens behind it are padding."""
        return self.spans[-1].stop if self.spans else 0

    @cached_property
    def packing_for_ranges(self) -> Packing:
        """All keys of each request. Made for the first layer of the step that brings ranges."""
        return _pack(self.params, self.common, self.spans, self.device, all_keys=True)


def _pack(
    params: AttentionParams, batch: CommonAttentionMetadata, spans: Sequence[Span], device: torch.device, *,
    all_keys: bool = False,
) -> Packing:  # fmt: skip
    keeps_no_cache = params.attn_type.keeps_no_cache
    longest = max((span.length for span in spans if span.seq_len), default=0)
    return pack(
        spans, Visibility.of(params), tile_sizes(longest) if compiles(device.type) else TileSizes(1, 1),
        block_table=None if keeps_no_cache else batch.block_table, block_size=params.block_size,
        device=device, all_keys=all_keys,
    )  # fmt: skip


class FlexAttentionMetadataBuilder(AttentionMetadataBuilder[FlexAttentionMetadata]):
    """Packs the batch and lists its tiles, from lengths on the host: no CUDA graph can hold that."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlexAttentionMetadata:  # fmt: skip
        spans = host_spans(
            common_attn_metadata, block_size=self.params.block_size,
            keeps_no_cache=self.params.attn_type.keeps_no_cache,
        )  # fmt: skip
        device = common_attn_metadata.seq_lens.device
        packing = _pack(self.params, common_attn_metadata, spans, device)
        return FlexAttentionMetadata(
            common=common_attn_metadata, params=self.params, spans=spans, device=device, packing=packing
        )


class FlexAttentionImpl(StandardImpl):
    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: FlexAttentionMetadata, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        has_ranges = tensors.bidirectional_ranges is not None
        packing = attn_metadata.packing_for_ranges if has_ranges else attn_metadata.packing
        rows = slice(0, attn_metadata.num_tokens)
        if packing.spans:
            sides = self._packed_sides(key, value, kv_cache, packing, tensors)
            out_MHD, lse_MH = self._run(query[packing.token_M], *sides, packing, tensors)
            output[rows] = out_MHD.index_select(0, packing.place_T)
            if tensors.lse is not None:
                tensors.lse[rows] = lse_MH.index_select(0, packing.place_T)
            write_empty(output, tensors.lse, packing.empty)
        else:
            write_empty(output, tensors.lse, rows)
        write_empty(output, tensors.lse, slice(rows.stop, None))

    def _packed_sides(
        self, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, packing: Packing,
        tensors: OptionalTensors,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Keys and values [N, K, D] as floats of the query's type."""
        stored_k, stored_v = kv_cache.unbind(1)
        if self.params.attn_type.keeps_no_cache:
            assert key is not None, "checked for the kinds that keep no cache"
            assert value is not None, "checked to come with key"
            stored_k, stored_v = key, value
        k_NKD = packing.keys.gather(stored_k, tensors.k_scale, self.params.dtype)
        return k_NKD, packing.keys.gather(stored_v, tensors.v_scale, self.params.dtype)

    def _run(
        self, q_MHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, packing: Packing, tensors: OptionalTensors
    ) -> tuple[Tensor, Tensor]:
        slopes, interval = tensors.alibi_slopes, packing.interval(tensors.bidirectional_ranges)
        packed = (packing, q_MHD, k_NKD, v_NKD)
        if compiles(q_MHD.device.type):
            key = FormKey.of(self.params, packing.sizes, has_alibi=slopes is not None)
            out, lse = run_compiled(key, *packed, interval=interval, slopes=slopes)
        else:
            out, lse = math_form(self.params, *packed, interval=interval, slopes=slopes)
        return (out, lse) if tensors.sinks is None else _with_sinks(out, lse, tensors.sinks)


def _with_sinks(out_MHD: Tensor, lse_MH: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """A sink scales all probabilities of a row by exp(lse) / (exp(lse) + exp(sink))."""
    sinks = sinks_H.float()
    kept = torch.where(lse_MH == -torch.inf, 0.0, torch.sigmoid(lse_MH - sinks))
    out = (out_MHD.float() * kept.unsqueeze(-1)).to(out_MHD.dtype)
    return out, torch.logaddexp(lse_MH, sinks.expand_as(lse_MH))


class FlexAttentionBackend(FullFeaturedBackend):
    """GPUs that Inductor compiles for, and CPUs; every feature, over copies of the keys that a step uses.

    On a GPU the *compiled* form of ``flex_attention`` runs, compiled once for each set of features (scale,
    soft-cap, alibi, head counts and sizes, type, short or long queries) and for batches of any size. On a
    CPU its plain *math* form runs, a request at a time. docs/flex-attention.md says what each costs.
    """

    supported_head_sizes = (MultipleOf(8, 32, 256),)
    supported_block_sizes = (MultipleOf(1),)
    supported_device_types = ("cuda", "cpu")
    min_compute_capability = (8, 0)

    @staticmethod
    def get_name() -> str:
        return "FLEX_ATTENTION"

    @staticmethod
    def get_impl_cls() -> type[FlexAttentionImpl]:
        return FlexAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlexAttentionMetadataBuilder]:
        return FlexAttentionMetadataBuilder

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        if compiles(device_type):
            import triton  # noqa: F401 (an ImportError says why this is unavailable)
        return flex_attention_reason()
