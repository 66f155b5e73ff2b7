"""Faults of what a query may see: chunks, bidirectional ranges, encoders, cross attention.

Shape legend: as in ``honest.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbackend.impl import AttentionParams, OptionalTensors
from attnbackend.metadata import CommonAttentionMetadata
from attnbackend.testing.conformance.honest import HonestImpl, Places
from attnbackend.testing.conformance.mutants.mutant import Mutant
from attnbackend.types import AttentionType

__all__ = ["KIND_MUTANTS"]


class ChunksIgnored(HonestImpl):
    def __init__(self, params: AttentionParams) -> None:
        super().__init__(replace(params, attention_chunk_size=None))


class ChunksFromTheNewest(HonestImpl):
    def in_chunk(self, at: Places, keys: int) -> Tensor:
        """A window of the chunk's size."""
        size = self.params.attention_chunk_size
        return super().in_chunk(at, keys) if size is None else self.distance(at, keys) > -size


class ChunksStartLate(HonestImpl):
    def in_chunk(self, at: Places, keys: int) -> Tensor:
        size = self.params.attention_chunk_size or keys + 1
        is_first_L = torch.arange(keys, device=at.row_T.device) % size == 0
        own_TL = self.distance(at, keys) == 0
        return super().in_chunk(at, keys) & (~is_first_L | own_TL | (size > keys))


class RangesIgnored(HonestImpl):
    def in_range(self, at: Places, keys: int, ranges_RG2: Tensor) -> Tensor:
        return torch.zeros(len(at.row_T), keys, dtype=torch.bool, device=at.row_T.device)


class RangesHoldTheirEnd(HonestImpl):
    def in_range(self, at: Places, keys: int, ranges_RG2: Tensor) -> Tensor:
        empty_RG1 = (ranges_RG2[..., 1:] == ranges_RG2[..., :1]).int()
        stretch_RG2 = torch.cat([torch.zeros_like(empty_RG1), 1 - empty_RG1], -1)
        return super().in_range(at, keys, ranges_RG2 + stretch_RG2)


class RangesSeenByAll(HonestImpl):
    def in_range(self, at: Places, keys: int, ranges_RG2: Tensor) -> Tensor:
        """Tokens before a range see into it."""
        start_TG1, end_TG1 = ranges_RG2[at.row_T].unsqueeze(-1).unbind(2)
        key_L = torch.arange(keys, device=at.row_T.device)
        return ((key_L >= start_TG1) & (key_L < end_TG1)).any(1)


class RangesWithinTheWindow(HonestImpl):
    def visible(self, at: Places, keys: int, tensors: OptionalTensors) -> Tensor:
        inside_TL = self.in_window(self.distance(at, keys)) & self.in_chunk(at, keys)
        return super().visible(at, keys, tensors) & inside_TL


class RangesOfTheFirstRequest(HonestImpl):
    def in_range(self, at: Places, keys: int, ranges_RG2: Tensor) -> Tensor:
        return super().in_range(at, keys, ranges_RG2[:1].expand_as(ranges_RG2))


class EncoderWindowOneSided(HonestImpl):
    def in_window(self, distance_TL: Tensor) -> Tensor:
        window = self.params.sliding_window
        everything_TL = torch.ones_like(distance_TL, dtype=torch.bool)
        return everything_TL if window is None else everything_TL & (distance_TL > -window)


class EncoderSeesTheWholeBatch(HonestImpl):
    def own_keys(self, x_TKD: Tensor, at: Places, starts: Tensor) -> Tensor:
        """Every request's keys are read from the first row on."""
        return super().own_keys(x_TKD, at, torch.zeros_like(starts))


class EncoderIsCausal(HonestImpl):
    def __init__(self, params: AttentionParams) -> None:
        super().__init__(replace(params, causal=params.causal or params.attn_type.keeps_no_cache))


class CrossReadsItsQueriesLength(HonestImpl):
    def places(self, batch: CommonAttentionMetadata, num_tokens: int) -> Places:
        """No more keys are read than there are queries."""
        at = super().places(batch, num_tokens)
        if self.params.attn_type is not AttentionType.ENCODER_DECODER:
            return at
        return replace(at, seq_len_T=at.seq_len_T.minimum(batch.query_start_loc.diff()[at.row_T]))


class AlibiOneSided(HonestImpl):
    def bias(self, s_THL: Tensor, at: Places, tensors: OptionalTensors) -> Tensor:
        """Keys ahead are favoured: right under a causal mask alone."""
        if tensors.alibi_slopes is None:
            return s_THL
        distance_TL: Any = self.distance(at, s_THL.shape[-1])
        return s_THL + tensors.alibi_slopes.view(-1, 1) * distance_TL.unsqueeze(1)


KIND_MUTANTS = (
    Mutant("chunks_ignored", "attention_chunk_size is not applied", "numerics", ChunksIgnored),
    Mutant("chunks_from_the_newest", "a chunk is taken as a window", "numerics", ChunksFromTheNewest),
    Mutant("chunks_start_late", "a chunk's first key is seen by itself only", "numerics", ChunksStartLate),
    Mutant("ranges_ignored", "bidirectional_ranges are not applied", "numerics", RangesIgnored),
    Mutant("ranges_hold_their_end", "a range is one position longer", "numerics", RangesHoldTheirEnd),
    Mutant("ranges_seen_by_all", "tokens outside of a range see into it", "numerics", RangesSeenByAll),
    Mutant(
        "ranges_within_the_window", "a range ends where the window or chunk does", "numerics",
        RangesWithinTheWindow,
    ),
    Mutant(
        "ranges_of_the_first_request", "all requests have the first one's ranges", "numerics",
        RangesOfTheFirstRequest, shown_by="ranges-mixed",
    ),
    Mutant(
        "encoder_window_one_sided", "an encoder's window has no right side", "numerics",
        EncoderWindowOneSided, shown_by="encoder_window-mixed",
    ),
    Mutant(
        "encoder_sees_the_whole_batch", "an encoder reads the batch from its first row", "numerics",
        EncoderSeesTheWholeBatch, shown_by="encoder_only-mixed",
    ),
    Mutant(
        "encoder_is_causal", "an encoder is causal whatever is asked", "numerics", EncoderIsCausal,
        shown_by="encoder_only-mixed",
    ),
    Mutant(
        "cross_reads_its_queries_length", "cross attention reads as many keys as there are queries",
        "numerics", CrossReadsItsQueriesLength, shown_by="cross-mixed",
    ),
    Mutant(
        "alibi_one_sided", "alibi favours keys ahead where they are seen", "numerics", AlibiOneSided,
        shown_by="not_causal_alibi-mixed",
    ),
)  # fmt: skip
