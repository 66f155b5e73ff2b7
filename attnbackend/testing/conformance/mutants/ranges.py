"""Faults beyond what a number or a vector holds: of narrow types, low logits, long sums, far blocks.

Shape legend: as in ``honest.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnbackend.impl import OptionalTensors
from attnbackend.metadata import CommonAttentionMetadata
from attnbackend.testing.conformance.honest import HonestImpl, Places
from attnbackend.testing.conformance.mutants.assumptions import DecodesWithoutValueScale
from attnbackend.testing.conformance.mutants.mutant import Mutant
from attnbackend.testing.conformance.mutants.paths import CROSS, on_path

__all__ = ["RANGE_MUTANTS"]

_HALF: dict[str, Any] = {"supported_dtypes": (torch.float16, torch.bfloat16)}


class SumsInHalf(HonestImpl):
    def weigh(self, p_THL: Tensor, v_TLKD: Tensor, visible_TL: Tensor) -> Tensor:
        """Adds up tiles of 64 keys in the model's type."""
        tiles = zip(p_THL.split(64, -1), v_TLKD.split(64, 1), visible_TL.split(64, 1), strict=True)
        sum_THD = p_THL.new_zeros(())
        for tile in tiles:
            sum_THD = (sum_THD + super().weigh(*tile)).to(self.params.dtype).float()
        return sum_THD


class MaximumFromZero(HonestImpl):
    def log_sum_exp(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        most_TH = s_THL.amax(-1).clamp(min=0.0)
        lse_TH = (s_THL - most_TH.unsqueeze(-1)).exp().sum(-1).log() + most_TH
        return lse_TH if tensors.sinks is None else torch.logaddexp(lse_TH, tensors.sinks.float())


class LSEClamped(HonestImpl):
    def finish(
        self, out_THD: Tensor, lse_TH: Tensor, at: Places, output: Tensor, tensors: OptionalTensors
    ) -> None:
        some_TH = lse_TH > -torch.inf
        super().finish(out_THD, torch.where(some_TH, lse_TH.clamp(min=-30), lse_TH), at, output, tensors)


class StaleSplits(HonestImpl):
    """Merges as many partial results of 512 keys as the call before had."""

    splits_R: Tensor | None = None

    def places(self, batch: CommonAttentionMetadata, num_tokens: int) -> Places:
        now_R, last_R = (batch.seq_lens + 511) // 512, self.splits_R
        at = super().places(batch, num_tokens)
        if last_R is None or last_R.shape != now_R.shape:
            last_R = now_R
        self.splits_R, self.stale_T = now_R, (last_R > now_R)[at.row_T]
        return at

    def logits(self, q_THD: Tensor, k_TLKD: Tensor) -> Tensor:
        return super().logits(q_THD, k_TLKD) * torch.where(self.stale_T, 1.01, 1.0).view(-1, 1, 1)


class BlocksIn16Bits(HonestImpl):
    def blocks(self, table_RW: Tensor, at: Places) -> Tensor:
        return super().blocks(table_RW.to(torch.int16), at)


class NarrowHeadsCut(HonestImpl):
    def dequantize(self, x_TLKD: Tensor, scale: Tensor | None, side: int) -> Tensor:
        """Reads float8 by 16 elements, and no rest."""
        real, whole = super().dequantize(x_TLKD, scale, side), self.params.head_size // 16 * 16
        if "fp8" not in self.params.kv_cache_dtype:
            return real
        return torch.cat([real[..., :whole], torch.zeros_like(real[..., whole:])], -1)


class _ReadsWithStrides(HonestImpl):
    def wrong(self, kv_cache: Tensor) -> tuple[int, ...]:
        raise NotImplementedError

    def gather(
        self, kv_cache: Tensor, side: int, table_RW: Tensor, at: Places, tensors: OptionalTensors
    ) -> Tensor:
        if "fp8" in self.params.kv_cache_dtype:
            kv_cache = kv_cache.as_strided(kv_cache.shape, self.wrong(kv_cache))
        return super().gather(kv_cache, side, table_RW, at, tensors)


class DenseNarrowBlocks(_ReadsWithStrides):
    def wrong(self, kv_cache: Tensor) -> tuple[int, ...]:
        block, *inner = kv_cache.stride()
        return (min(block, kv_cache[0].numel()), *inner)


class NarrowPagesOf16(_ReadsWithStrides):
    def wrong(self, kv_cache: Tensor) -> tuple[int, ...]:
        *outer, token, head, element = kv_cache.stride()
        return (*outer, token, min(head, 16 * token) if token < head else head, element)


class LargePagesWhole(HonestImpl):
    def weigh(self, p_THL: Tensor, v_TLKD: Tensor, visible_TL: Tensor) -> Tensor:
        """For prompts, what lies behind the last key of a page of 128 is multiplied by 0."""
        if self.params.block_size == 128 and len(p_THL) > 128:
            visible_TL = torch.ones_like(visible_TL)
        return super().weigh(p_THL, v_TLKD, visible_TL)


class AsksForScale(HonestImpl):
    def dequantize(self, x_TLKD: Tensor, scale: Tensor | None, side: int) -> Tensor:
        return super().dequantize(x_TLKD, None if scale is None else x_TLKD.new_tensor(scale.tolist()), side)


RANGE_MUTANTS = (
    Mutant(
        "sums_in_half", "sums over tiles of keys are kept in 16 bits", "numerics", SumsInHalf,
        shown_by="long_sums_bfloat16-long_context",
    ),
    Mutant(
        "maximum_from_zero", "the maximum of logits is at least 0", "numerics", MaximumFromZero,
        shown_by="low_logits-mixed",
    ),
    Mutant("lse_clamped", "the LSE is at least -30", "numerics", LSEClamped, shown_by="low_logits-mixed"),
    Mutant(
        "stale_splits", "partial results of a longer call are merged into a shorter one", "stateless",
        StaleSplits,
    ),
    Mutant("blocks_in_16_bits", "the numbers of blocks are read as 16 bits", "overflow", BlocksIn16Bits),
    Mutant(
        "narrow_heads_cut", "float8 heads are read by 16 elements, without a rest", "numerics",
        NarrowHeadsCut, shown_by="head_size_24_cache_fp8-mixed",
    ),
    Mutant(
        "dense_narrow_blocks", "the stride between float8 blocks is taken from the shape", "numerics",
        DenseNarrowBlocks, shown_by="layers_interleaved_cache_fp8-mixed",
    ),
    Mutant(
        "narrow_pages_of_16", "heads of a float8 page in HND lie 16 tokens apart", "numerics",
        NarrowPagesOf16, shown_by="block_size_64_HND_cache_fp8-mixed",
    ),
    on_path(
        "bfloat16_decode", "in decodes in bfloat16",
        lambda c: c.is_decode and c.query.dtype is torch.bfloat16,
        "dtype_bfloat16-decode",
    ),
    on_path(
        "fp8_decode", "in decodes from float8 caches", lambda c: c.is_decode and c.is_fp8,
        "dtype_float32_cache_fp8-decode",
    ),
    on_path(
        "odd_heads_in_bfloat16", "in bfloat16 for head sizes that are no multiple of 32",
        lambda c: c.query.dtype is torch.bfloat16 and c.params.head_size % 32,
        "head_size_24_bfloat16-mixed",
    ),
    on_path(
        "drafts_under_wide_window", "for a few tokens each under a window wider than a page",
        lambda c: c.window > c.params.block_size and bool((c.query_lens == 4).all()),
        "window_over_pages-uniform_of_four",
    ),
    on_path("hnd_decode", "in decodes from HND caches", lambda c: c.is_decode and c.is_hnd, "hnd-decode"),
    on_path(
        "odd_pages_of_decodes", "in decodes from pages of no power of 2",
        lambda c: c.is_decode and c.params.block_size & (c.params.block_size - 1), "block_size_48-decode",
    ),
    on_path(
        "odd_groups_of_prompts", "for groups of no power of 2, in prompts",
        lambda c: not c.is_decode and c.group & (c.group - 1), "group_of_three-mixed",
    ),
    on_path(
        "cross_decode", "in decodes of cross attention", lambda c: c.is_decode and c.is_kind(CROSS),
        "cross-decode",
    ),
    on_path(
        "odd_groups_with_odd_heads", "for groups of no power of 2 with heads that 16 does not divide",
        lambda c: c.group & (c.group - 1) and c.params.head_size % 16, "crossed_*",
    ),
    on_path(
        "odd_pages_with_wide_window", "under a window in pages of no power of 2",
        lambda c: c.window and c.params.block_size & (c.params.block_size - 1), "crossed_*",
    ),
    Mutant(
        "large_pages_whole", "prompts read pages of 128 whole, NaN behind the last key or not", "numerics",
        LargePagesWhole, shown_by="block_size_128-long_prompt",
    ),
    Mutant(
        "decodes_of_halves_without_value_scale", "16 bits alone; v_scale is not applied in decodes",
        "stateless", DecodesWithoutValueScale, claims=_HALF,
    ),
    Mutant(
        "asks_for_scale_of_halves", "16 bits alone; waits for the scale of a float8 cache", "host_sync",
        AsksForScale, claims=_HALF, shown_by="dtype_float16_cache_fp8-decode",
    ),
)  # fmt: skip
