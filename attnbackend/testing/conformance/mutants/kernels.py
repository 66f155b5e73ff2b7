"""Faults of the arithmetic and of its indexing.

Shape legend: as in ``honest.py``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbackend.impl import OptionalTensors
from attnbackend.metadata import CommonAttentionMetadata
from attnbackend.testing.conformance.honest import HonestImpl, Places
from attnbackend.testing.conformance.mutants.mutant import Mutant
from attnbackend.types import KVCacheLayout

__all__ = ["KERNEL_MUTANTS"]


class _WithWindow(HonestImpl):
    wrong: Any = staticmethod(lambda window: window)

    def visible(self, at: Places, keys: int, tensors: OptionalTensors) -> Tensor:
        honest = self.params
        window = honest.sliding_window
        self.params = replace(honest, sliding_window=None if window is None else self.wrong(window))
        try:
            return super().visible(at, keys, tensors)
        finally:
            self.params = honest


class WindowTooWide(_WithWindow):
    wrong = staticmethod(lambda window: window + 1)


class WindowTooNarrow(_WithWindow):
    wrong = staticmethod(lambda window: max(1, window - 1))


class WindowIgnored(_WithWindow):
    wrong = staticmethod(lambda window: None)


class StalePage(HonestImpl):
    def blocks(self, table_RW: Tensor, at: Places) -> Tensor:
        """The page of the newest key is that before it."""
        blocks_TW = super().blocks(table_RW, at).clone()
        last_T1 = ((at.seq_len_T - 1).clamp(min=0) // self.params.block_size).long().unsqueeze(1)
        return blocks_TW.scatter(1, last_T1, blocks_TW.gather(1, (last_T1 - 1).clamp(min=0)))


class NewestKeyMissing(HonestImpl):
    def visible(self, at: Places, keys: int, tensors: OptionalTensors) -> Tensor:
        own_TL = self.distance(at, keys) == 0
        return super().visible(at, keys, tensors) & ~(own_TL & (at.position_T > 0).unsqueeze(1))


class HeadsInterleaved(HonestImpl):
    def heads(self, x_TLKD: Tensor) -> Tensor:
        groups = self.params.num_heads // self.params.num_kv_heads
        return x_TLKD.repeat(1, 1, groups, 1)


class ScaleOffByOnePercent(HonestImpl):
    def logits(self, q_THD: Tensor, k_TLKD: Tensor) -> Tensor:
        return super().logits(q_THD, k_TLKD) * 1.01


class ScaleOfHeadSize(HonestImpl):
    def logits(self, q_THD: Tensor, k_TLKD: Tensor) -> Tensor:
        return super().logits(q_THD, k_TLKD) / self.params.scale * self.params.head_size**-0.5


class CapIgnored(HonestImpl):
    def cap(self, s_THL: Tensor) -> Tensor:
        return s_THL


class CapBeforeScale(HonestImpl):
    def cap(self, s_THL: Tensor) -> Tensor:
        return super().cap(s_THL / self.params.scale) * self.params.scale


class AlibiSign(HonestImpl):
    def bias(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        return 2 * s_THL - super().bias(s_THL, at, tensors)


class AlibiBeforeCap(HonestImpl):
    def bias(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        return self.cap(super().bias(s_THL, at, tensors))


class SinkIgnored(HonestImpl):
    def log_sum_exp(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        return super().log_sum_exp(s_THL, at, tensors._replace(sinks=None))


class SinkTwice(HonestImpl):
    def log_sum_exp(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        sinks = None if tensors.sinks is None else tensors.sinks.float() + math.log(2)
        return super().log_sum_exp(s_THL, at, tensors._replace(sinks=sinks))


class LSEWithoutSink(HonestImpl):
    def finish(
        self, out_THD: Tensor, lse_TH: Tensor, at: Places, output: Tensor, tensors: OptionalTensors
    ) -> None:
        if tensors.sinks is not None:
            lse_TH = lse_TH - torch.log1p((tensors.sinks.float() - lse_TH).exp())
        super().finish(out_THD, lse_TH, at, output, tensors)


class LSEInBaseTwo(HonestImpl):
    def finish(
        self, out_THD: Tensor, lse_TH: Tensor, at: Places, output: Tensor, tensors: OptionalTensors
    ) -> None:
        super().finish(out_THD, lse_TH / math.log(2), at, output, tensors)


class LSEOfNothingFinite(HonestImpl):
    def finish(
        self, out_THD: Tensor, lse_TH: Tensor, at: Places, output: Tensor, tensors: OptionalTensors
    ) -> None:
        super().finish(out_THD, lse_TH, at, output, tensors)
        if tensors.lse is not None:
            tensors.lse.clamp_(min=torch.finfo(torch.float32).min)


class TopLeft(HonestImpl):
    def places(self, batch: CommonAttentionMetadata, num_tokens: int) -> Places:
        at = super().places(batch, num_tokens)
        token_T = torch.arange(num_tokens, device=at.row_T.device)
        first = (batch.seq_lens - batch.query_start_loc.diff() == 0) | (batch.query_start_loc.diff() == 1)
        aligned_T = token_T - batch.query_start_loc[at.row_T]
        return replace(at, position_T=torch.where(first[at.row_T], at.position_T, aligned_T))


class AlwaysCausal(HonestImpl):
    def visible(self, at: Places, keys: int, tensors: OptionalTensors) -> Tensor:
        return super().visible(at, keys, tensors) & (self.distance(at, keys) <= 0)


class KeyScaleTwice(HonestImpl):
    def dequantize(self, x_TLKD: Tensor, scale: Tensor | None, side: int) -> Tensor:
        return super().dequantize(x_TLKD, scale * scale if side == 0 and scale is not None else scale, side)


class ValueScaleIgnored(HonestImpl):
    def dequantize(self, x_TLKD: Tensor, scale: Tensor | None, side: int) -> Tensor:
        return x_TLKD if side == 1 else super().dequantize(x_TLKD, scale, side)


class FirstHeadsScale(HonestImpl):
    def dequantize(self, x_TLKD: Tensor, scale: Tensor | None, side: int) -> Tensor:
        return super().dequantize(x_TLKD, None if scale is None else scale.view(-1)[:1], side)


class QueryScaleIgnored(HonestImpl):
    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        super().forward(query, key, value, kv_cache, attn_metadata, output, tensors._replace(q_scale=None))


class OutputScaleInverted(HonestImpl):
    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        scale = None if tensors.output_scale is None else 1 / tensors.output_scale
        super().forward(
            query, key, value, kv_cache, attn_metadata, output, tensors._replace(output_scale=scale)
        )


class HNDReadAsNHD(HonestImpl):
    def gather(
        self, kv_cache: Tensor, side: int, table_RW: Tensor, at: Places, tensors: OptionalTensors
    ) -> Tensor:
        """Trusts the shape and not the strides."""
        packed = kv_cache[0].contiguous().stride()
        as_nhd = kv_cache.as_strided(kv_cache.shape, (kv_cache.stride(0), kv_cache.stride(1), *packed[1:]))
        return super().gather(as_nhd, side, table_RW, at, tensors)


class DenseBlocks(HonestImpl):
    def gather(
        self, kv_cache: Tensor, side: int, table_RW: Tensor, at: Places, tensors: OptionalTensors
    ) -> Tensor:
        """Takes a block's stride from its shape: wrong where layers share a buffer."""
        page = kv_cache[0].numel()
        near = kv_cache.as_strided(kv_cache.shape, (min(page, kv_cache.stride(0)), *kv_cache.stride()[1:]))
        return super().gather(near, side, table_RW, at, tensors)


class Offsets32(HonestImpl):
    def gather(
        self, kv_cache: Tensor, side: int, table_RW: Tensor, at: Places, tensors: OptionalTensors
    ) -> Tensor:
        """As if ``block * stride`` were computed in 32 bits: what wraps leads elsewhere."""
        wraps_RW = table_RW.long() * kv_cache.stride(0) > 2**31 - 1
        return super().gather(kv_cache, side, table_RW.masked_fill(wraps_RW, 0), at, tensors)


class SixteenAtATime(HonestImpl):
    def logits(self, q_THD: Tensor, k_TLKD: Tensor) -> Tensor:
        """Loses the end of a head that is no multiple of 16."""
        whole = q_THD.shape[-1] // 16 * 16
        return super().logits(q_THD[..., :whole], k_TLKD[..., :whole])


class ReadsNewTokensOnly(HonestImpl):
    """A path for prompts, over the new tokens alone, that is taken with context too."""

    def places(self, batch: CommonAttentionMetadata, num_tokens: int) -> Places:
        at = super().places(batch, num_tokens)
        self.context_T = (batch.seq_lens - batch.query_start_loc.diff())[at.row_T]
        return at

    def visible(self, at: Places, keys: int, tensors: OptionalTensors) -> Tensor:
        new_TL = torch.arange(keys, device=at.row_T.device) >= self.context_T.unsqueeze(1)
        return super().visible(at, keys, tensors) & new_TL


class NeedsKey(HonestImpl):
    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        """Asks ``key``, which a call may leave out, for what the cache says too."""
        assert key is not None, "no key"
        super().attend(query, key, value, kv_cache, attn_metadata, output, tensors)


class EmptyRowsUnwritten(HonestImpl):
    def finish(
        self, out_THD: Tensor, lse_TH: Tensor, at: Places, output: Tensor, tensors: OptionalTensors
    ) -> None:
        """Leaves requests of seq_len 0 as they were."""
        before = output.clone()
        super().finish(out_THD, lse_TH, at, output, tensors)
        in_request_T = torch.arange(len(output), device=output.device) < self.end
        keep_T = (at.seq_len_T == 0) & in_request_T
        output.copy_(torch.where(keep_T.view(-1, 1, 1), before, output))

    def places(self, batch: CommonAttentionMetadata, num_tokens: int) -> Places:
        self.end = batch.query_start_loc[-1]
        return super().places(batch, num_tokens)


class TailUnwritten(HonestImpl):
    def finish(
        self, out_THD: Tensor, lse_TH: Tensor, at: Places, output: Tensor, tensors: OptionalTensors
    ) -> None:
        """Leaves tokens behind the last request as they were."""
        before = output.clone()
        super().finish(out_THD, lse_TH, at, output, tensors)
        tail_T = torch.arange(len(output), device=output.device) >= self.end
        output.copy_(torch.where(tail_T.view(-1, 1, 1), before, output))

    def places(self, batch: CommonAttentionMetadata, num_tokens: int) -> Places:
        self.end = batch.query_start_loc[-1]
        return super().places(batch, num_tokens)


class WeighsUnseenByZero(HonestImpl):
    def weigh(self, p_THL: Tensor, v_TLKD: Tensor, visible_TL: Tensor) -> Tensor:
        return torch.einsum("thl,tlhd->thd", p_THL, self.heads(v_TLKD))


class RoundsProbabilities(HonestImpl):
    def weigh(self, p_THL: Tensor, v_TLKD: Tensor, visible_TL: Tensor) -> Tensor:
        """As tensor cores in TF32 do where nobody asked for it."""
        return super().weigh(p_THL.bfloat16().float(), v_TLKD, visible_TL)


KERNEL_MUTANTS = (
    Mutant(
        "window_too_wide", "a sliding window of one key more", "numerics", WindowTooWide,
        shown_by="window-mixed",
    ),
    Mutant("window_too_narrow", "a sliding window of one key less", "numerics", WindowTooNarrow),
    Mutant("window_ignored", "no sliding window at all", "numerics", WindowIgnored),
    Mutant(
        "stale_page", "the last page of a request is read where the one before it lies", "numerics", StalePage
    ),
    Mutant("newest_key_missing", "a token does not see itself", "numerics", NewestKeyMissing),
    Mutant("heads_interleaved", "query head h reads key-value head h % K", "numerics", HeadsInterleaved),
    Mutant("scale_off_by_one_percent", "logits 1% too large", "numerics", ScaleOffByOnePercent),
    Mutant("scale_of_head_size", "the scale is taken from the head size", "numerics", ScaleOfHeadSize),
    Mutant("cap_ignored", "no soft-cap", "numerics", CapIgnored),
    Mutant("cap_before_scale", "the soft-cap comes before the scale", "numerics", CapBeforeScale),
    Mutant("alibi_sign", "alibi favours far keys", "numerics", AlibiSign),
    Mutant("alibi_before_cap", "alibi is capped with the logits", "numerics", AlibiBeforeCap),
    Mutant("sink_ignored", "no sinks", "numerics", SinkIgnored),
    Mutant("sink_twice", "the sink is counted twice", "numerics", SinkTwice),
    Mutant("lse_without_sink", "the LSE lacks the sink", "numerics", LSEWithoutSink),
    Mutant("lse_in_base_two", "a base-2 LSE that is declared natural", "lse", LSEInBaseTwo),
    Mutant(
        "lse_of_nothing_finite", "the LSE of no key is the lowest number, not -inf", "lse", LSEOfNothingFinite
    ),
    Mutant("top_left", "causality is aligned to the first key", "numerics", TopLeft),
    Mutant("always_causal", "causal=False is ignored", "numerics", AlwaysCausal),
    Mutant(
        "key_scale_twice", "k_scale is applied twice", "numerics", KeyScaleTwice,
        shown_by="dtype_float32_cache_fp8-mixed",
    ),
    Mutant(
        "value_scale_ignored", "v_scale is not applied", "numerics", ValueScaleIgnored,
        shown_by="dtype_float32_cache_fp8-mixed",
    ),
    Mutant(
        "first_heads_scale", "all heads are scaled by the first head's scale", "numerics", FirstHeadsScale,
        shown_by="cache_fp8_per_head_scales-mixed",
    ),
    Mutant("query_scale_ignored", "q_scale is not applied", "scales", QueryScaleIgnored),
    Mutant(
        "output_scale_inverted", "the output is multiplied by output_scale", "scales", OutputScaleInverted
    ),
    Mutant(
        "hnd_read_as_nhd", "strides within a page are taken from its shape", "numerics", HNDReadAsNHD,
        shown_by="everything_strided-mixed",
    ),
    Mutant("dense_blocks", "the stride between blocks is taken from the shape", "numerics", DenseBlocks),
    Mutant(
        "other_layout_misread", "HND is not claimed, not refused and read as NHD", "refusal", HNDReadAsNHD,
        claims={"supported_layouts": (KVCacheLayout.NHD,)},
    ),
    Mutant(
        "offset_claim_not_kept", "max_cache_offset is claimed; beyond it offsets wrap", "overflow", Offsets32,
        claims={"max_cache_offset": 2**31 - 1},
    ),
    Mutant("needs_key", "a call without key and value fails", "cross_reading", NeedsKey),
    Mutant("offsets_in_32_bits", "cache offsets wrap at 2**31, unclaimed", "overflow", Offsets32),
    Mutant(
        "sixteen_at_a_time", "claims head sizes whose end it does not read", "numerics", SixteenAtATime,
        shown_by="head_size_8-mixed",
    ),
    Mutant("reads_new_tokens_only", "the context in the cache is not read", "numerics", ReadsNewTokensOnly),
    Mutant(
        "empty_rows_unwritten", "output of requests without keys is left as it is", "padding",
        EmptyRowsUnwritten,
    ),
    Mutant("tail_unwritten", "output behind the last request is left as it was", "padding", TailUnwritten),
    Mutant("weighs_unseen_by_zero", "NaN in unseen memory gives NaN", "padding", WeighsUnseenByZero),
    Mutant(
        "rounds_probabilities", "probabilities are rounded to bfloat16 in float32", "numerics",
        RoundsProbabilities,
    ),
)  # fmt: skip
