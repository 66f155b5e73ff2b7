"""Faults of what a kernel takes for granted, and what most calls grant.

Shape legend: as in ``honest.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnbackend.impl import OptionalTensors
from attnbackend.metadata import AttentionMetadata, CommonAttentionMetadata
from attnbackend.testing.conformance.honest import HonestBuilder, HonestImpl, Places
from attnbackend.testing.conformance.mutants.mutant import Mutant
from attnbackend.testing.conformance.mutants.paths import on_path
from attnbackend.testing.conformance.mutants.states import WORKSPACE, Jitters

__all__ = ["ASSUMPTION_MUTANTS"]


def _key_as_value(key: Tensor, value: Tensor) -> Tensor:
    """``key`` read with the stride of ``value``, as far as its memory goes."""
    return key.as_strided(key.shape, (min(key.stride(0), value.stride(0)), *key.stride()[1:]))


class KeyReadAsValue(HonestImpl):
    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        if key is not None and value is not None:
            key = _key_as_value(key, value)
        super().attend(query, key, value, kv_cache, attn_metadata, output, tensors)


class KeyWrittenAsValue(HonestImpl):
    def kv_cache_update(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, tensors: OptionalTensors
    ) -> None:
        super().kv_cache_update(_key_as_value(key, value), value, kv_cache, slot_mapping, tensors)


class ScaleOfPowersOfTwo(HonestImpl):
    def dequantize(self, x_TLKD: Tensor, scale: Tensor | None, side: int) -> Tensor:
        """As formats do whose scales are exponents alone."""
        rounded = None if scale is None else scale.log2().round().exp2()
        return super().dequantize(x_TLKD, rounded, side)


class ScaleInHalf(HonestImpl):
    def dequantize(self, x_TLKD: Tensor, scale: Tensor | None, side: int) -> Tensor:
        return super().dequantize(x_TLKD, None if scale is None else scale.bfloat16().float(), side)


class StopsAtEmptyRange(HonestImpl):
    def in_range(self, at: Places, keys: int, ranges_RG2: Tensor) -> Tensor:
        """Takes the first empty range for the end of the list."""
        empty_RG = ranges_RG2[..., 0] >= ranges_RG2[..., 1]
        ended_RG1 = (empty_RG.int().cumsum(1) > 0).unsqueeze(-1)
        return super().in_range(at, keys, ranges_RG2.masked_fill(ended_RG1, 0))


class NarrowSinksOverlooked(HonestImpl):
    def log_sum_exp(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        wide = tensors.sinks is not None and tensors.sinks.dtype is torch.float32
        return super().log_sum_exp(s_THL, at, tensors if wide else tensors._replace(sinks=None))


class TailOfOneTile(HonestImpl):
    def finish(
        self, out_THD: Tensor, lse_TH: Tensor, at: Places, output: Tensor, tensors: OptionalTensors
    ) -> None:
        """Writes 64 tokens behind the last request, not all."""
        before = output.clone()
        super().finish(out_THD, lse_TH, at, output, tensors)
        far_T = torch.arange(len(output), device=output.device) >= self.end + 64
        output.copy_(torch.where(far_T.view(-1, 1, 1), before, output))

    def places(self, batch: CommonAttentionMetadata, num_tokens: int) -> Places:
        self.end = batch.query_start_loc[-1]
        return super().places(batch, num_tokens)


class DropsLightKeys(HonestImpl):
    def weigh(self, p_THL: Tensor, v_TLKD: Tensor, visible_TL: Tensor) -> Tensor:
        """Skips keys of less than a thousandth of the largest weight."""
        light_THL = p_THL < p_THL.amax(-1, keepdim=True) * 1e-3
        return super().weigh(p_THL.masked_fill(light_THL, 0.0), v_TLKD, visible_TL)


class RoughExponential(HonestImpl):
    def weigh(self, p_THL: Tensor, v_TLKD: Tensor, visible_TL: Tensor) -> Tensor:
        """Off by 2**-12, as a polynomial of too low a degree."""
        return super().weigh(p_THL * (1 + 2.0**-12 * torch.sin(1e4 * p_THL)), v_TLKD, visible_TL)


class SumsInDefaultDtype(HonestImpl):
    def weigh(self, p_THL: Tensor, v_TLKD: Tensor, visible_TL: Tensor) -> Tensor:
        out_THD = super().weigh(p_THL, v_TLKD, visible_TL)
        return torch.zeros(out_THD.shape, device=out_THD.device).copy_(out_THD).float()


class InfinityToNaN(HonestImpl):
    def quantize(self, x_TKD: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        if dtype.itemsize > 1:
            return super().quantize(x_TKD, scale, dtype)
        return super().quantize(x_TKD.masked_fill(x_TKD.isinf(), torch.nan), scale, dtype)


class BoundOfThePlan(HonestImpl):
    def visible(self, at: Places, keys: int, tensors: OptionalTensors) -> Tensor:
        return super().visible(at, keys, tensors) & (torch.arange(keys, device=at.row_T.device) < self.bound)

    def places(self, batch: CommonAttentionMetadata, num_tokens: int) -> Places:
        self.bound = batch.max_seq_len
        return super().places(batch, num_tokens)


class BoundOfCapture(BoundOfThePlan):
    def places(self, batch: CommonAttentionMetadata, num_tokens: int) -> Places:
        """As a grid for the longest request there was, not for the longest there may be."""
        at = super().places(batch, num_tokens)
        self.bound = 10**9 if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.max())
        return at


class BoundOfTheFirstStep(HonestBuilder):
    bound = 0

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttentionMetadata:  # fmt: skip
        """Keeps the first step's longest request, with buffers of its own."""
        if self.limits is not None:
            self.bound = self.bound or common_attn_metadata.max_seq_len
            common_attn_metadata = common_attn_metadata.replace(max_seq_len=self.bound)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class JittersFarAway(Jitters):
    def logits(self, q_THD: Tensor, k_TLKD: Tensor) -> Tensor:
        """Splits of long requests are added up as they come."""
        return (
            super().logits(q_THD, k_TLKD) if k_TLKD.shape[1] > 512 else HonestImpl.logits(self, q_THD, k_TLKD)
        )


class WorkspaceOfOneToken(HonestImpl):
    def logits(self, q_THD: Tensor, k_TLKD: Tensor) -> Tensor:
        if len(q_THD) == 1:
            WORKSPACE.add_(1.0)
        return super().logits(q_THD, k_TLKD)


class OutputScaleOfPrompts(HonestImpl):
    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        """A path for one token that does not divide by output_scale."""
        if len(query) == 1 and tensors.output_scale is not None:
            tensors = tensors._replace(output_scale=torch.ones_like(tensors.output_scale))
        super().forward(query, key, value, kv_cache, attn_metadata, output, tensors)


class WritesOneTileOnly(HonestImpl):
    def kv_cache_update(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, tensors: OptionalTensors
    ) -> None:
        """Tokens from the 129th on are not written."""
        super().kv_cache_update(key[:128], value[:128], kv_cache, slot_mapping[:128], tensors)


class DecodesWithoutValueScale(HonestImpl):
    def gather(
        self, kv_cache: Tensor, side: int, table_RW: Tensor, at: Places, tensors: OptionalTensors
    ) -> Tensor:
        """As many tokens as requests: a kernel of its own."""
        ours = tensors if len(at.row_T) != len(table_RW) else tensors._replace(v_scale=None)
        return super().gather(kv_cache, side, table_RW, at, ours)


class SlopesOfEightHeads(HonestImpl):
    def bias(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        slopes = tensors.alibi_slopes
        if slopes is not None:
            tensors = tensors._replace(alibi_slopes=slopes[torch.arange(len(slopes)) % 8])
        return super().bias(s_THL, at, tensors)


class SinksOfEightHeads(HonestImpl):
    def log_sum_exp(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        if tensors.sinks is not None:
            tensors = tensors._replace(sinks=tensors.sinks[torch.arange(len(tensors.sinks)) % 8])
        return super().log_sum_exp(s_THL, at, tensors)


ASSUMPTION_MUTANTS = (
    on_path(
        "planned_decode_with_window", "under a window, where a plan says that it is a decode",
        lambda c: c.batch.max_query_len == 1 < len(c.query) and c.window, "window-*",
    ),
    on_path(
        "planned_without_lse", "in HND caches with a plan and without an LSE",
        lambda c: c.is_hnd and c.tensors.lse is None and c.batch.seq_lens_cpu is not None, "hnd-*",
    ),
    on_path(
        "tokens_counted_for_decode", "where there are as many tokens as requests, which is no decode",
        lambda c: len(c.query) == len(c.batch.seq_lens) > 1 and not c.is_decode,
    ),
    on_path(
        "decode_with_gaps", "in decodes of which some requests have no token",
        lambda c: c.is_decode and bool((c.query_lens == 0).any()),
    ),
    on_path(
        "tiles_filled", "for prompts that fill tiles of 64",
        lambda c: (c.query_lens % 64 == 0)[c.at.row_T] & (c.query_lens > 0)[c.at.row_T],
    ),
    on_path("many_kv_heads", "for more than 8 key-value heads", lambda c: c.params.num_kv_heads > 8),
    on_path(
        "heads_of_96", "for head sizes that are a multiple of 96", lambda c: c.params.head_size % 96 == 0,
        shown_by="head_size_96-mixed",
    ),
    on_path(
        "pages_beyond_64", "for pages of more than 64 tokens", lambda c: c.params.block_size > 64,
        shown_by="block_size_128-mixed",
    ),
    on_path(
        "odd_heads", "for head sizes that are no multiple of 16, but for 8",
        lambda c: c.params.head_size > 8 and c.params.head_size % 16 > 0, shown_by="head_size_24-mixed",
    ),
    on_path("many_requests", "for batches of more than 128 requests", lambda c: len(c.batch.seq_lens) > 128),
    on_path(
        "prompt_of_a_page", "for prompts of one page",
        lambda c: ((c.query_lens == c.params.block_size) & (c.batch.seq_lens == c.query_lens))[c.at.row_T],
    ),
    Mutant(
        "slopes_of_eight_heads", "the ninth head has the first one's slope", "numerics", SlopesOfEightHeads,
        shown_by="alibi-*",
    ),
    Mutant(
        "sinks_of_eight_heads", "the ninth head has the first one's sink", "numerics", SinksOfEightHeads,
        shown_by="sinks-*",
    ),
    Mutant(
        "decodes_without_value_scale", "v_scale is not applied in decodes", "stateless",
        DecodesWithoutValueScale,
    ),
    Mutant(
        "key_read_as_value", "keys have the strides of values", "numerics", KeyReadAsValue,
        shown_by="encoder_strided-mixed",
    ),
    Mutant("key_written_as_value", "keys have the strides of values", "cache_writes", KeyWrittenAsValue),
    Mutant(
        "scale_of_powers_of_two", "scales are rounded to powers of 2", "numerics", ScaleOfPowersOfTwo,
        shown_by="cache_fp8_odd_scales-mixed",
    ),
    Mutant(
        "scale_in_half", "scales are rounded to bfloat16", "numerics", ScaleInHalf,
        shown_by="cache_fp8_odd_scales-mixed",
    ),
    Mutant(
        "stops_at_empty_range", "ranges behind an empty one are not read", "numerics", StopsAtEmptyRange,
        shown_by="ranges-mixed",
    ),
    Mutant(
        "narrow_sinks_overlooked", "sinks in the model's type are ignored", "numerics", NarrowSinksOverlooked,
        shown_by="sinks_of_the_model-mixed",
    ),
    Mutant("tail_of_one_tile", "64 padding tokens are written, not all", "padding", TailOfOneTile),
    Mutant("drops_light_keys", "keys of little weight are skipped", "numerics", DropsLightKeys),
    Mutant("rough_exponential", "the exponential is off by 2**-12", "numerics", RoughExponential),
    Mutant(
        "sums_in_default_dtype", "results pass through torch's default dtype", "numerics", SumsInDefaultDtype,
        shown_by="plain-*",
    ),
    Mutant("infinity_to_nan", "infinity is stored as NaN", "cache_writes", InfinityToNaN),
    Mutant(
        "bound_of_the_first_step", "keys beyond the first step's longest request are not read", "plan",
        BoundOfThePlan, BoundOfTheFirstStep,
    ),
    Mutant(
        "bound_of_capture", "keys beyond the captured batch's longest request are not read", "graphs",
        BoundOfCapture,
    ),
    Mutant("jitters_far_away", "long requests give other bits each time", "determinism", JittersFarAway),
    Mutant(
        "workspace_of_one_token", "for one token, forward writes a tensor of its module", "state_audit",
        WorkspaceOfOneToken,
    ),
    Mutant(
        "output_scale_of_prompts", "output_scale is not applied for one token", "scales", OutputScaleOfPrompts
    ),
    Mutant("writes_one_tile_only", "no more than 128 tokens are written", "cache_writes", WritesOneTileOnly),
)  # fmt: skip
