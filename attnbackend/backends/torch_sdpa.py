"""`TORCH_SDPA`: attention in torch's own ops, on any device, for every feature of the contract.

It gathers one request's keys and values at a time, never the whole cache, and needs the batch's lengths on
the host, so a CUDA graph cannot hold it.

Shape legend: T tokens, N query tokens of one request, L its keys, H query heads, K key-value heads,
G query heads a key-value head, D head size, S block_size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbackend.backends.key_masks import KeyMask
from attnbackend.backends.standard import FullFeaturedBackend, StandardImpl, write_empty
from attnbackend.impl import OptionalTensors
from attnbackend.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from attnbackend.types import MultipleOf

__all__ = ["TorchSDPABackend", "TorchSDPAImpl", "TorchSDPAMetadata", "TorchSDPAMetadataBuilder"]

_MAX_SCORES = 1 << 24
"""Most logits held at once by the explicit path: 64 MiB in float32."""


class Request(NamedTuple):
    """One request's place in the batch, on the host."""

    row: int
    start: int
    stop: int
    seq_len: int


@dataclass(frozen=True, kw_only=True)
class TorchSDPAMetadata(AttentionMetadata):
    requests: tuple[Request, ...]
    """Those that bring tokens."""
    num_tokens: int
    """End of the last request; tokens behind it are padding."""


class TorchSDPAMetadataBuilder(AttentionMetadataBuilder[TorchSDPAMetadata]):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TorchSDPAMetadata:  # fmt: skip
        starts = common_attn_metadata.host_query_start_loc().tolist()
        lens = common_attn_metadata.host_seq_lens().tolist()
        rows = zip(range(len(lens)), starts[:-1], starts[1:], lens, strict=True)
        requests = tuple(Request(*row) for row in rows if row[2] != row[1])
        limit = common_attn_metadata.block_table.shape[1] * self.params.block_size
        if self.params.attn_type.keeps_no_cache:
            limit = common_attn_metadata.num_actual_tokens
        _check_requests(requests, starts[0], common_attn_metadata.num_actual_tokens, limit)
        return TorchSDPAMetadata(common=common_attn_metadata, requests=requests, num_tokens=starts[-1])


def _check_requests(requests: tuple[Request, ...], first: int, num_tokens: int, limit: int) -> None:
    """The batch is on the host here, so what would be read or written elsewhere is refused at no cost."""
    if first != 0:
        raise ValueError(f"query_start_loc[0] is {first}; expected 0")
    for row, start, stop, seq_len in requests:
        if not start < stop <= num_tokens:
            raise ValueError(
                f"query_start_loc[{row + 1}] is {stop}; expected {start}, the one before it, or more, and at "
                f"most {num_tokens}, the number of tokens"
            )
        if not 0 <= seq_len <= limit:
            raise ValueError(f"seq_lens[{row}] is {seq_len}; expected 0 to {limit}, what block_table holds")


class TorchSDPAImpl(StandardImpl):
    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: TorchSDPAMetadata, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        for request in attn_metadata.requests:
            rows = slice(request.start, request.stop)
            if request.seq_len == 0:
                write_empty(output, tensors.lse, rows)
                continue
            keys = range(self._first_key(request, tensors), request.seq_len)
            if self.params.attn_type.keeps_no_cache:
                k_LKD, v_LKD = self._own(key, value, rows, tensors)
            else:
                table = attn_metadata.common.block_table[request.row]
                k_LKD, v_LKD = self._gather(kv_cache, table, keys, tensors)
            self._attend(query, k_LKD, v_LKD, output, request, keys, tensors)
        write_empty(output, tensors.lse, slice(attn_metadata.num_tokens, None))

    def _first_key(self, request: Request, tensors: OptionalTensors) -> int:
        """First position that any of the request's queries sees."""
        window, chunk = self.params.sliding_window, self.params.attention_chunk_size
        first_query = max(0, request.seq_len - (request.stop - request.start))
        if tensors.bidirectional_ranges is not None or self.params.attn_type.keeps_no_cache:
            return 0
        if chunk is not None:
            return first_query // chunk * chunk
        return 0 if window is None else max(0, first_query - window + 1)

    def _own(
        self, key: Tensor | None, value: Tensor | None, rows: slice, tensors: OptionalTensors
    ) -> tuple[Tensor, Tensor]:
        """An encoder's keys and values: the request's rows of the call's own."""
        assert key is not None
        assert value is not None
        return self._dequantize(key[rows], tensors.k_scale), value[rows]

    def _gather(
        self, kv_cache: Tensor, table: Tensor, keys: range, tensors: OptionalTensors
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of these positions; nothing behind them is passed on."""
        size = self.params.block_size
        blocks = table[keys.start // size : -(-keys.stop // size)]
        skip = keys.start % size
        k_LKD, v_LKD = (
            kv_cache[:, side].index_select(0, blocks).flatten(0, 1)[skip : skip + len(keys)]
            for side in (0, 1)
        )
        return self._dequantize(k_LKD, tensors.k_scale), self._dequantize(v_LKD, tensors.v_scale)

    def _dequantize(self, x_LKD: Tensor, scale: Tensor | None) -> Tensor:
        dtype = self.params.dtype
        if scale is None:
            return x_LKD.to(dtype)
        return (x_LKD.float() * scale.view(-1, 1)).to(dtype)

    def _attend(
        self, query: Tensor, k_LKD: Tensor, v_LKD: Tensor, output: Tensor, request: Request, keys: range,
        tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        rows = slice(request.start, request.stop)
        q_NHD, out_NHD = query[rows], output[rows]
        mask = self._mask(request, keys, tensors.bidirectional_ranges, query.device)
        explicit = (
            self.params.logits_soft_cap or tensors.lse is not None or tensors.sinks is not None
            or tensors.alibi_slopes is not None or request.seq_len < len(q_NHD)
        )  # fmt: skip
        if not explicit:
            out_NHD.copy_(self._fused(q_NHD, k_LKD, v_LKD, mask))
            return
        for part in self._query_chunks(len(q_NHD), len(keys)):
            of_part = replace(mask, queries=mask.queries[part])
            out_NHD[part], lse = self._explicit(q_NHD[part], k_LKD, v_LKD, of_part, tensors)
            if tensors.lse is not None:
                tensors.lse[rows][part] = lse

    def _mask(self, request: Request, keys: range, ranges: Tensor | None, device: torch.device) -> KeyMask:
        queries = range(request.seq_len - (request.stop - request.start), request.seq_len)
        return KeyMask(self.params, queries, keys, None if ranges is None else ranges[request.row], device)

    def _fused(self, q_NHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, mask: KeyMask) -> Tensor:
        """torch's own kernel, for plain masks."""
        n, keys = len(q_NHD), len(k_LKD)
        limited = self.params.sliding_window or self.params.attention_chunk_size or mask.ranges_G2 is not None
        top_left_is_bottom_right = self.params.causal and n == keys and not limited
        all_visible = not limited and (n == 1 or not self.params.causal)
        out_1HND = F.scaled_dot_product_attention(
            q_NHD.transpose(0, 1)[None], k_LKD.transpose(0, 1)[None], v_LKD.transpose(0, 1)[None],
            attn_mask=None if top_left_is_bottom_right or all_visible else mask.visible(),
            is_causal=top_left_is_bottom_right and n > 1, scale=self.params.scale,
            enable_gqa=self.params.num_heads != self.params.num_kv_heads,
        )  # fmt: skip
        return out_1HND[0].transpose(0, 1)

    @staticmethod
    def _query_chunks(queries: int, keys: int) -> Iterator[slice]:
        step = max(1, _MAX_SCORES // max(1, keys))
        return (slice(i, min(i + step, queries)) for i in range(0, queries, step))

    def _explicit(
        self, q_NHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, mask: KeyMask, tensors: OptionalTensors
    ) -> tuple[Tensor, Tensor]:
        """Softmax written out in float32: output [N, H, D] and LSE [N, H]."""
        groups = self.params.num_heads // self.params.num_kv_heads
        k_HLD, v_HLD = (x.float().repeat_interleave(groups, 1).transpose(0, 1) for x in (k_LKD, v_LKD))
        s_HNL = q_NHD.float().transpose(0, 1) @ k_HLD.transpose(1, 2) * self.params.scale
        if cap := self.params.logits_soft_cap:
            s_HNL = cap * torch.tanh(s_HNL / cap)
        if tensors.alibi_slopes is not None:
            s_HNL = s_HNL - tensors.alibi_slopes.view(-1, 1, 1) * mask.distance()
        return self._softmax_times(s_HNL.masked_fill(~mask.visible(), -torch.inf), v_HLD, tensors.sinks)

    @staticmethod
    def _softmax_times(s_HNL: Tensor, v_HLD: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        lse_HN = s_HNL.logsumexp(-1)
        if sinks is not None:
            lse_HN = torch.logaddexp(lse_HN, sinks.float().view(-1, 1).expand_as(lse_HN))
        shift_HN = torch.where(lse_HN == -torch.inf, 0.0, lse_HN)
        p_HNL = (s_HNL - shift_HN.unsqueeze(-1)).exp()
        return (p_HNL @ v_HLD).transpose(0, 1), lse_HN.transpose(0, 1)


class TorchSDPABackend(FullFeaturedBackend):
    """Any device, every feature; the default where nothing better is."""

    supported_head_sizes = (MultipleOf(1),)
    supported_block_sizes = (MultipleOf(1),)
    supported_device_types = ("cpu", "cuda", "xpu")

    @staticmethod
    def get_name() -> str:
        return "TORCH_SDPA"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAImpl]:
        return TorchSDPAImpl

    @staticmethod
    def get_builder_cls() -> type[TorchSDPAMetadataBuilder]:
        return TorchSDPAMetadataBuilder
