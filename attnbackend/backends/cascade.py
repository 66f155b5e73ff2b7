"""Attention of requests that share a prefix, in two parts: the prefix once for all, the rest for each.

The prefix part is one request of all the batch's query tokens over the shared blocks. Every token
sees all of it, so it is not causal. The suffix part is the batch with the shared blocks left out.
Both give an LSE, by which their results merge. The blocks of the prefix are so read once, not once
a request.

Shape legend: T tokens, R requests (padded rows included), W block-table width, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnbackend.impl import AttentionParams, OptionalTensors
from attnbackend.metadata import BatchLimits, CommonAttentionMetadata
from attnbackend.ops.merge import merge_attn_states
from attnbackend.types import AttentionType, Reason

__all__ = [
    "DEFAULT_THRESHOLDS",
    "CascadeParts",
    "CascadePlanner",
    "CascadeThresholds",
    "MergeStates",
    "PartAttention",
    "attend_in_parts",
    "cascade_reasons",
    "takes_cascade",
    "use_cascade",
]


@dataclass(frozen=True, kw_only=True)
class CascadeThresholds:
    """From where a step is cut. The defaults are guesses: `benchmarks/cascade.py` is to replace them."""

    min_prefix_len: int = 2048
    """Tokens of the shared prefix, in whole blocks."""
    min_num_reqs: int = 8
    max_query_len: int = 16
    """Longer queries read the keys of a prefix less than once a token anyway."""


DEFAULT_THRESHOLDS = CascadeThresholds()


def cascade_reasons(
    params: AttentionParams, common_prefix_len: int, *, num_reqs: int, max_query_len: int,
    thresholds: CascadeThresholds = DEFAULT_THRESHOLDS,
) -> list[Reason]:  # fmt: skip
    """Every reason why a step should not be cut in parts; empty: it should."""
    prefix_len = common_prefix_len // params.block_size * params.block_size
    reasons = _mask_reasons(params)
    if prefix_len < thresholds.min_prefix_len:
        allowed = f"at least {thresholds.min_prefix_len} in whole blocks of {params.block_size}"
        reasons.append(Reason("common_prefix_len", common_prefix_len, allowed))
    if num_reqs < thresholds.min_num_reqs:
        reasons.append(Reason("num_reqs", num_reqs, f"at least {thresholds.min_num_reqs}"))
    if max_query_len > thresholds.max_query_len:
        reasons.append(Reason("max_query_len", max_query_len, f"up to {thresholds.max_query_len}"))
    return reasons


def _mask_reasons(params: AttentionParams) -> list[Reason]:
    """Why the two parts together would not give the layer's attention."""
    required = {
        "attn_type": (params.attn_type, AttentionType.DECODER),
        "causal": (params.causal, True),
        "sliding_window": (params.sliding_window, None),
        "attention_chunk_size": (params.attention_chunk_size, None),
    }
    reasons = [Reason(name, got, str(want)) for name, (got, want) in required.items() if got != want]
    if params.dtype is torch.float32:
        allowed = "float16, bfloat16: merging by a rounded LSE costs float32 results their last bits"
        reasons.append(Reason("dtype", params.dtype, allowed))
    return reasons


def use_cascade(
    params: AttentionParams, common_prefix_len: int, *, num_reqs: int, max_query_len: int,
    thresholds: CascadeThresholds = DEFAULT_THRESHOLDS,
) -> bool:  # fmt: skip
    """Whether to cut a step in parts, from what the host knows of it; see `cascade_reasons`."""
    return not cascade_reasons(
        params, common_prefix_len, num_reqs=num_reqs, max_query_len=max_query_len, thresholds=thresholds
    )


def takes_cascade(tensors: OptionalTensors) -> bool:
    """Whether a call's tensors let a plan in parts serve it: both parts count positions from 0."""
    return tensors.alibi_slopes is None and tensors.bidirectional_ranges is None


class CascadeParts(NamedTuple):
    """A batch over a shared prefix as two batches of the same query tokens."""

    prefix: CommonAttentionMetadata
    """One request: all tokens, over the shared blocks, not causal."""
    suffix: CommonAttentionMetadata
    """The batch without its shared blocks."""


@dataclass(frozen=True)
class _Buffers:
    """What the parts' tensors lie in."""

    prefix_start_loc: Tensor
    prefix_seq_lens: Tensor
    prefix_table_1W: Tensor
    seq_lens_R: Tensor
    table_RW: Tensor

    @classmethod
    def of_size(cls, rows: int, width: int, device: torch.device) -> _Buffers:
        shapes = (2,), (1,), (1, width), (rows,), (rows, width)
        return cls(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))


class CascadePlanner:
    """Cuts batches in parts, on the device, with no wait for it.

    With limits, all parts lie in buffers of one address, so a CUDA graph that was captured over
    parts replays any other batch that was cut since, of any prefix length, 0 included: such a graph
    is to be replayed on plans that are in parts.
    """

    def __init__(self, block_size: int, limits: BatchLimits | None, device: torch.device) -> None:
        self.block_size = block_size
        self.limits = limits
        self.device = device
        self._kept: _Buffers | None = None

    def split(self, common_prefix_len: int, common: CommonAttentionMetadata) -> CascadeParts:
        """The parts of a batch.

        Args:
            common_prefix_len: tokens that all requests share, rounded down to whole blocks here. Each
                request that brings tokens has them all in its context, in the same blocks. Requests of
                seq_len 0 that bring tokens (padding) come after the others.
            common: the batch; its own tensors are only read.

        Raises:
            ValueError: the prefix is longer than the block table or, where the batch's host copies
                tell, than a request's context; padding stands before a request; the batch exceeds
                the limits.
        """
        blocks = common_prefix_len // self.block_size
        _check_prefix(blocks, self.block_size, common)
        buffers = self._buffers_for(common)
        return CascadeParts(
            self._prefix(blocks, common, buffers), self._suffix(blocks, common, buffers)
        )  # fmt: skip

    def _buffers_for(self, common: CommonAttentionMetadata) -> _Buffers:
        rows, width = common.block_table.shape
        if self.limits is None:
            return _Buffers.of_size(rows, width, self.device)
        most = self.limits.max_num_seqs, -(-self.limits.max_model_len // self.block_size)
        if rows > most[0] or width > most[1]:
            raise ValueError(f"block_table has shape {(rows, width)}; the builder's limits allow {most}")
        if self._kept is None:
            self._kept = _Buffers.of_size(*most, self.device)
        return self._kept

    def _prefix(self, blocks: int, common: CommonAttentionMetadata, to: _Buffers) -> CommonAttentionMetadata:
        width = common.block_table.shape[1]
        starts = common.query_start_loc
        shares_R = (common.seq_lens > 0) & (starts[1:] > starts[:-1])
        ends_R = torch.where(shares_R, starts[1:], 0)
        to.prefix_start_loc[1:].copy_(ends_R.amax(0, keepdim=True))
        to.prefix_seq_lens.fill_(blocks * self.block_size)
        # Of the first request that brings tokens: rows of padding point at block 0.
        first = shares_R.int().argmax(0, keepdim=True)
        to.prefix_table_1W[:, :width].copy_(common.block_table.index_select(0, first))
        return CommonAttentionMetadata(
            query_start_loc=to.prefix_start_loc,
            seq_lens=to.prefix_seq_lens,
            block_table=to.prefix_table_1W[:, :width],
            num_reqs=1,
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.num_actual_tokens,
            max_seq_len=blocks * self.block_size,
            causal=False,
        )

    def _suffix(self, blocks: int, common: CommonAttentionMetadata, to: _Buffers) -> CommonAttentionMetadata:
        rows, width = common.block_table.shape
        prefix_len, left = blocks * self.block_size, width - blocks
        lens_R, table_RW = to.seq_lens_R[:rows], to.table_RW[:rows, :width]
        torch.sub(common.seq_lens, prefix_len, out=lens_R).clamp_(min=0)
        table_RW[:, :left].copy_(common.block_table[:, blocks:])
        table_RW[:, left:].zero_()
        on_host = common.seq_lens_cpu
        return common.replace(
            seq_lens=lens_R,
            block_table=table_RW,
            max_seq_len=max(common.max_seq_len - prefix_len, 0),
            seq_lens_cpu=None if on_host is None else (on_host - prefix_len).clamp(min=0),
        )


def _check_prefix(blocks: int, block_size: int, common: CommonAttentionMetadata) -> None:
    width = common.block_table.shape[1]
    if not 0 <= blocks <= width:
        raise ValueError(
            f"common_prefix_len is {blocks} blocks of {block_size}; expected 0 to {width}, the width of "
            "block_table"
        )
    starts, lens = common.query_start_loc_cpu, common.seq_lens_cpu
    if starts is None or lens is None:
        return
    queries = starts.diff()
    short = (queries > 0) & (lens > 0) & (lens - queries < blocks * block_size)
    if bool(short.any()):
        row = int(short.int().argmax())
        raise ValueError(
            f"common_prefix_len is {blocks * block_size} in whole blocks, but request {row} has "
            f"{int(lens[row] - queries[row])} tokens of context; all of the prefix must be context"
        )
    _check_padding_last(queries, lens)


def _check_padding_last(queries: Tensor, lens: Tensor) -> None:
    padding = (queries > 0) & (lens == 0)
    behind = padding.cumsum(0) > 0
    misplaced = behind & (queries > 0) & (lens > 0)
    if bool(misplaced.any()):
        raise ValueError(
            f"request {int(misplaced.int().argmax())} comes after a padding request (of seq_len 0, with "
            "tokens); expected all padding behind the requests that share a prefix"
        )


PartAttention = Callable[[CommonAttentionMetadata, Tensor, OptionalTensors, bool], None]
"""attend(batch, output [T, H, D], tensors, causal): attention of a part; ``tensors.lse`` is given and to
be written, natural log."""

MergeStates = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""merge(out_a [T, H, D], lse_a [T, H], out_b, lse_b): the merged state, written over b."""


def merge_over(out_a_THD: Tensor, lse_a_TH: Tensor, out_b_THD: Tensor, lse_b_TH: Tensor) -> None:
    """`merge_attn_states`, written over b."""
    out_THD, lse_TH = merge_attn_states(out_a_THD, lse_a_TH, out_b_THD, lse_b_TH)
    out_b_THD.copy_(out_THD)
    lse_b_TH.copy_(lse_TH)


def attend_in_parts(
    attend: PartAttention, parts: CascadeParts, output: Tensor, tensors: OptionalTensors,
    merge: MergeStates = merge_over,
) -> None:  # fmt: skip
    """Writes the attention of a batch in parts to ``output`` [T, H, D] and ``tensors.lse``.

    The sinks count in the suffix only, once.
    """
    prefix_out = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    lse_a, lse_b = output.new_empty(2, *output.shape[:2], dtype=torch.float32)
    lse = lse_b if tensors.lse is None else tensors.lse
    attend(parts.prefix, prefix_out, tensors._replace(lse=lse_a, sinks=None), False)
    attend(parts.suffix, output, tensors._replace(lse=lse), True)
    merge(prefix_out, lse_a, output, lse)
