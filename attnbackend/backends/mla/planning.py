"""The plan of a step of latent attention: which rows decode, and the pieces in which prompts are attended.

Shape legend: R rows of prompts, S keys of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnbackend.backends.host_lengths import with_host_lengths
from attnbackend.config import mla_context_tokens
from attnbackend.metadata import AttentionMetadata, CommonAttentionMetadata
from attnbackend.mla_metadata import ContextChunk, MLAMetadata, MLAPrefillMetadata, MLAPrefillPlan

__all__ = ["plan_mla_step"]

PlanPrefill = Callable[[MLAPrefillMetadata], MLAPrefillMetadata]


def plan_mla_step(
    common: CommonAttentionMetadata,
    build_decode: Callable[[CommonAttentionMetadata], AttentionMetadata],
    plan_prefill: PlanPrefill,
    *,
    block_size: int,
    threshold: int | None,
) -> MLAMetadata:
    """Decodes are the leading rows that bring up to ``threshold`` tokens; None: all rows are.

    So are all rows where lengths are not known on the host, and where a row brings more tokens than it has
    keys: the latent form is right for any batch, only slower for long prompts.
    """
    batch = common if threshold is None else with_host_lengths(common)
    rows = batch.seq_lens.shape[0] if threshold is None else _num_decodes(batch, threshold)
    if rows == batch.seq_lens.shape[0]:
        tokens = batch.num_actual_tokens
        return MLAMetadata(
            common=common,
            num_decodes=rows,
            num_decode_tokens=tokens,
            decode=build_decode(batch),
            prefill=None,
        )
    starts = batch.host_query_start_loc()
    tokens = int(starts[rows])
    leading = batch.unpadded(rows, tokens).replace(max_query_len=threshold)
    return MLAMetadata(
        common=common, num_decodes=rows, num_decode_tokens=tokens,
        decode=build_decode(leading) if tokens else None,
        prefill=_plan_prompts(batch, rows, plan_prefill, block_size),
    )  # fmt: skip


def _num_decodes(batch: CommonAttentionMetadata, threshold: int) -> int:
    """Leading rows that run on the latent cache."""
    if batch.query_start_loc_cpu is None or batch.seq_lens_cpu is None:
        return batch.seq_lens.shape[0]
    queries = batch.query_start_loc_cpu.diff()
    long = (queries > threshold).nonzero()
    if not len(long):
        return len(queries)
    first = int(long[0])
    without_keys = queries[first:] > batch.seq_lens_cpu[first:]
    return len(queries) if bool(without_keys.any()) else first


def _plan_prompts(
    batch: CommonAttentionMetadata, first_row: int, plan_prefill: PlanPrefill, block_size: int
) -> MLAPrefillPlan:
    starts, lens = batch.host_query_start_loc()[first_row:], batch.host_seq_lens()[first_row:]
    context = lens - starts.diff()
    cu_q = batch.query_start_loc[first_row:] - int(starts[0])
    cu_q_cpu = starts - starts[0]
    longest = int(cu_q_cpu.diff().max())
    new_tokens = MLAPrefillMetadata(
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_q, max_seqlen_q=longest, max_seqlen_k=longest, causal=True,
        cu_seqlens_q_cpu=cu_q_cpu, cu_seqlens_k_cpu=cu_q_cpu,
    )  # fmt: skip
    table = batch.block_table[first_row:]
    chunks = _chunks(context, cu_q, cu_q_cpu, table, block_size)
    return MLAPrefillPlan(
        new_tokens=plan_prefill(new_tokens), num_tokens=int(cu_q_cpu[-1]),
        chunks=tuple(
            ContextChunk(slots=c.slots, attention=plan_prefill(c.attention), start=c.start, stop=c.stop)
            for c in chunks
        ),
    )  # fmt: skip


def _chunks(
    context: Tensor, cu_q: Tensor, cu_q_cpu: Tensor, block_table: Tensor, block_size: int
) -> Iterator[ContextChunk]:
    """Every context token once: the requests' contexts behind each other, cut where a workspace is full."""
    ends, full = context.cumsum(0), mla_context_tokens()
    begins = ends - context
    for start in range(0, int(ends[-1]), full):
        first_keys = (start - begins).clamp(min=0)
        counts = (ends.clamp(max=start + full) - begins - first_keys).clamp(min=0)
        rows = (counts > 0).nonzero()
        first, last = int(rows[0]), int(rows[-1]) + 1
        keys = first_keys[first:last].int(), counts[first:last].int()
        yield _chunk(*keys, first, cu_q, cu_q_cpu, block_table, block_size)


def _chunk(
    first_keys: Tensor,
    counts: Tensor,
    first: int,
    cu_q: Tensor,
    cu_q_cpu: Tensor,
    block_table: Tensor,
    block_size: int,
) -> ContextChunk:
    """Of the requests from row ``first`` on, so many keys from each one's first."""
    rows = slice(first, first + len(counts) + 1)
    start, stop = int(cu_q_cpu[rows][0]), int(cu_q_cpu[rows][-1])
    cu_k_cpu = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    cu_k, begins = (_to_device(x, block_table.device) for x in (cu_k_cpu, first_keys))
    slots = _slots(cu_k, int(cu_k_cpu[-1]), begins, block_table[first : first + len(counts)], block_size)
    attention = MLAPrefillMetadata(
        cu_seqlens_q=cu_q[rows] - start, cu_seqlens_k=cu_k, causal=False,
        max_seqlen_q=int(cu_q_cpu[rows].diff().max()), max_seqlen_k=int(counts.max()),
        cu_seqlens_q_cpu=cu_q_cpu[rows] - start, cu_seqlens_k_cpu=cu_k_cpu,
    )  # fmt: skip
    return ContextChunk(slots=slots, attention=attention, start=start, stop=stop)


def _slots(cu_k: Tensor, total: int, begins: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """int64 [S]: where each key of a chunk lies."""
    counts = cu_k.diff().long()
    row_S = torch.repeat_interleave(counts, output_size=total)
    position_S = torch.arange(total, device=cu_k.device) + (begins - cu_k[:-1]).long()[row_S]
    block_S = block_table[row_S, position_S // block_size].long()
    return block_S * block_size + position_S % block_size


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """Without waiting for the device."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
