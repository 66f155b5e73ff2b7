"""An honest backend in plain torch that claims everything: what passes every check, and what mutants break.

It gathers every page of the block table for every token, so it is slow and waits for nothing: a CUDA graph
can hold it.

Shape legend: T tokens, R requests, W table width, L = W * S key positions, H query heads, K key-value heads,
D head size, S block_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnbackend.backends.standard import BatchMetadataBuilder, FullFeaturedBackend, StandardImpl
from attnbackend.impl import OptionalTensors
from attnbackend.kv_cache import quantize_to_cache
from attnbackend.metadata import CommonAttentionMetadata
from attnbackend.types import AttentionCGSupport, MultipleOf

__all__ = ["HonestBackend", "HonestBuilder", "HonestImpl", "Places"]


@dataclass(frozen=True)
class Places:
    """Where each token stands."""

    row_T: Tensor
    """Request, a row of the batch; that of padding tokens is any."""
    position_T: Tensor
    """Position in its sequence."""
    seq_len_T: Tensor
    """0 for padding tokens."""

    @classmethod
    def of(cls, batch: CommonAttentionMetadata, num_tokens: int) -> Places:
        starts = batch.query_start_loc
        token_T = torch.arange(num_tokens, device=starts.device)
        row_T = (torch.searchsorted(starts, token_T, right=True) - 1).clamp(max=len(batch.seq_lens) - 1)
        seq_len_T = torch.where(token_T < starts[-1], batch.seq_lens[row_T], 0)
        return cls(row_T, seq_len_T - starts[row_T + 1] + token_T, seq_len_T)


class HonestBuilder(BatchMetadataBuilder):
    cudagraph_support = AttentionCGSupport.ALWAYS


class HonestImpl(StandardImpl):
    """Each step of attention is a method, so that a mutant is one method."""

    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        batch = attn_metadata.common
        at = self.places(batch, len(query))
        if self.params.attn_type.keeps_no_cache:
            assert key is not None
            assert value is not None
            k_TLKD, v_TLKD = (self.own_keys(x, at, batch.query_start_loc) for x in (key, value))
            k_TLKD = self.dequantize(k_TLKD, tensors.k_scale, 0)
        else:
            k_TLKD, v_TLKD = (self.gather(kv_cache, side, batch.block_table, at, tensors) for side in (0, 1))
        visible_TL = self.visible(at, k_TLKD.shape[1], tensors)
        s_THL = self.bias(self.cap(self.logits(query, k_TLKD)), at, tensors)
        s_THL = s_THL.masked_fill(~visible_TL.unsqueeze(1), -torch.inf)
        lse_TH = self.log_sum_exp(s_THL, at, tensors)
        p_THL = (s_THL - lse_TH.masked_fill(lse_TH == -torch.inf, 0.0).unsqueeze(-1)).exp()
        self.finish(self.weigh(p_THL, v_TLKD, visible_TL), lse_TH, at, output, tensors)

    def places(self, batch: CommonAttentionMetadata, num_tokens: int) -> Places:
        return Places.of(batch, num_tokens)

    def gather(
        self, kv_cache: Tensor, side: int, table_RW: Tensor, at: Places, tensors: OptionalTensors
    ) -> Tensor:
        """Keys (side 0) or values (side 1) of each token's request, real, float32 [T, L, K, D]."""
        stored = kv_cache[:, side]
        bits = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored
        x_TLKD = bits[self.blocks(table_RW, at).long()].view(stored.dtype).flatten(1, 2).float()
        return self.dequantize(x_TLKD, tensors.k_scale if side == 0 else tensors.v_scale, side)

    def own_keys(self, x_TKD: Tensor, at: Places, starts: Tensor) -> Tensor:
        """Rows of each token's own request, which is all that an encoder sees, float32 [T, L, K, D]."""
        own_TL = starts[at.row_T].unsqueeze(1) + torch.arange(len(x_TKD), device=x_TKD.device)
        return x_TKD[own_TL.clamp(max=len(x_TKD) - 1).long()].float()

    def blocks(self, table_RW: Tensor, at: Places) -> Tensor:
        return table_RW[at.row_T]

    def dequantize(self, x_TLKD: Tensor, scale: Tensor | None, side: int) -> Tensor:
        return x_TLKD if scale is None else x_TLKD * scale.view(-1, 1)

    def heads(self, x_TLKD: Tensor) -> Tensor:
        """The key-value head of each query head, [T, L, H, D]."""
        groups = self.params.num_heads // self.params.num_kv_heads
        return x_TLKD.unsqueeze(3).expand(*x_TLKD.shape[:3], groups, -1).flatten(2, 3)

    def logits(self, q_THD: Tensor, k_TLKD: Tensor) -> Tensor:
        return torch.einsum("thd,tlhd->thl", q_THD.float(), self.heads(k_TLKD)) * self.params.scale

    def cap(self, s_THL: Tensor) -> Tensor:
        c = self.params.logits_soft_cap
        return c * torch.tanh(s_THL / c) if c else s_THL

    def bias(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        if tensors.alibi_slopes is None:
            return s_THL
        away_TL = self.distance(at, s_THL.shape[-1]).abs()
        return s_THL - tensors.alibi_slopes.view(-1, 1) * away_TL.unsqueeze(1)

    def distance(self, at: Places, keys: int) -> Tensor:
        """Key position minus query position, [T, L]."""
        return torch.arange(keys, device=at.row_T.device) - at.position_T.unsqueeze(1)

    def visible(self, at: Places, keys: int, tensors: OptionalTensors) -> Tensor:
        distance_TL = self.distance(at, keys)
        there_TL = torch.arange(keys, device=at.row_T.device) < at.seq_len_T.unsqueeze(1)
        seen_TL = there_TL & self.in_window(distance_TL) & self.in_chunk(at, keys)
        if self.params.causal:
            seen_TL = seen_TL & (distance_TL <= 0)
        if tensors.bidirectional_ranges is not None:
            seen_TL = seen_TL | (there_TL & self.in_range(at, keys, tensors.bidirectional_ranges))
        return seen_TL

    def in_window(self, distance_TL: Tensor) -> Tensor:
        window = self.params.sliding_window
        if window is None:
            return torch.ones_like(distance_TL, dtype=torch.bool)
        two_sided = self.params.attn_type.keeps_no_cache and not self.params.causal
        return (distance_TL > -window) & ((distance_TL < window) | (not two_sided))

    def in_chunk(self, at: Places, keys: int) -> Tensor:
        size, key_L = self.params.attention_chunk_size, torch.arange(keys, device=at.row_T.device)
        if size is None:
            return (key_L >= 0).expand(len(at.row_T), -1)
        return key_L // size == at.position_T.unsqueeze(1) // size

    def in_range(self, at: Places, keys: int, ranges_RG2: Tensor) -> Tensor:
        """Keys of the ranges that a token's own position lies in."""
        start_TG1, end_TG1 = ranges_RG2[at.row_T].unsqueeze(-1).unbind(2)
        key_L, own_T11 = torch.arange(keys, device=at.row_T.device), at.position_T.view(-1, 1, 1)
        holds_own = (own_T11 >= start_TG1) & (own_T11 < end_TG1)
        return (holds_own & (key_L >= start_TG1) & (key_L < end_TG1)).any(1)

    def log_sum_exp(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        lse_TH = s_THL.logsumexp(-1)
        if tensors.sinks is not None:
            lse_TH = torch.logaddexp(lse_TH, tensors.sinks.float())
        return lse_TH

    def weigh(self, p_THL: Tensor, v_TLKD: Tensor, visible_TL: Tensor) -> Tensor:
        """What lies in unseen memory may be NaN, and 0 * NaN is NaN: it is cut out, not weighed by 0."""
        v_TLHD = self.heads(v_TLKD).masked_fill(~visible_TL[..., None, None], 0.0)
        return torch.einsum("thl,tlhd->thd", p_THL, v_TLHD)

    def finish(
        self, out_THD: Tensor, lse_TH: Tensor, at: Places, output: Tensor, tensors: OptionalTensors
    ) -> None:
        """Requests without keys, and padding tokens, give zeros and -inf, sinks or not."""
        empty_T11 = (at.seq_len_T == 0).view(-1, 1, 1)
        output.copy_(out_THD.masked_fill(empty_T11, 0.0))
        if tensors.lse is not None:
            tensors.lse.copy_(lse_TH.masked_fill(empty_T11.squeeze(-1), -torch.inf))

    def kv_cache_update(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, tensors: OptionalTensors
    ) -> None:
        """A token of slot -1 writes what is in slot 0, of the reserved block, back to where it is."""
        size = kv_cache.shape[2]
        slot_T = slot_mapping.clamp(min=0)
        written_T11 = (slot_mapping >= 0).view(-1, 1, 1)
        for side, (x_TKD, scale) in enumerate(((key, tensors.k_scale), (value, tensors.v_scale))):
            stored, new = kv_cache[:, side], self.quantize(x_TKD, scale, kv_cache.dtype)
            if stored.dtype.itemsize == 1:
                stored, new = stored.view(torch.uint8), new.view(torch.uint8)
            block_T, offset_T = slot_T // size, slot_T % size
            old = stored[block_T, offset_T]
            stored[block_T, offset_T] = torch.where(written_T11, new, old)

    def quantize(self, x_TKD: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        return quantize_to_cache(x_TKD, scale, dtype)


class HonestBackend(FullFeaturedBackend):
    """Claims everything."""

    supported_head_sizes = (MultipleOf(8, 8, 256),)
    supported_block_sizes = (MultipleOf(8),)
    supported_device_types = ("cpu", "cuda")
    is_deterministic = True

    @staticmethod
    def get_name() -> str:
        return "HONEST"

    @staticmethod
    def get_impl_cls() -> type[HonestImpl]:
        return HonestImpl

    @staticmethod
    def get_builder_cls() -> type[HonestBuilder]:
        return HonestBuilder
