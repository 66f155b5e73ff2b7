"""Fills the persistent buffers of one step from the scheduled requests.

Shape suffixes: R rows of the batch, T tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from attnbackend.cudagraph.dispatcher import BatchShape
from attnbackend.runtime.batch_buffers import BlockTableBuffer, IntArray, StepBuffers
from attnbackend.runtime.prepared_batch import PreparedBatch
from attnbackend.runtime.request_table import RequestTable
from attnbackend.runtime.scheduler import ScheduledRequest, blocks_for


class _Rows(NamedTuple):
    """What one pass over the scheduled requests gathers."""

    homes_R: IntArray
    starts_R: IntArray
    counts_R: IntArray
    appended: list[tuple[int, int]]
    sampled: list[int]
    prefilling: list[bool]


class InputBatch:
    """Host and device buffers of the largest size, refilled at every step.

    On a CPU the device buffers are the host buffers; for CUDA the host side is pinned and copied
    without waiting. Every padded field is reset at every step; rows of the block table are
    rewritten only where they changed. Who writes to the device buffers from elsewhere (a warm-up,
    a graph capture) calls `invalidate` afterwards.

    Args:
        max_num_seqs: most requests a step, `max_reqs` below.
        max_num_tokens: most tokens a step, `max_tokens` below.
        max_model_len: most tokens of a request.
        block_size: tokens a cache block.
        device: where the model runs.
        padded_tokens: tokens that a batch of a shape is padded to; None pads none.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        padded_tokens: Callable[[BatchShape], int] | None = None,
    ) -> None:
        self._padded_tokens = padded_tokens
        self.block_size = block_size
        self.width = blocks_for(max_model_len, block_size)
        self.buffers = StepBuffers(max_num_seqs, max_num_tokens, device)
        self.block_table = BlockTableBuffer(max_num_seqs, self.width, device)
        self._table = RequestTable(max_num_seqs, max_model_len, self.width)
        self._iota_T: IntArray = np.arange(max(max_num_tokens, max_num_seqs + 1), dtype=np.int64)
        make_event = cast("Callable[[], torch.cuda.Event]", torch.cuda.Event)
        self._uploaded = make_event() if device.type == "cuda" else None

    def remove(self, request_id: str) -> None:
        """Forget a request that finished or was preempted; unknown ids are fine."""
        self._table.remove(request_id)

    def invalidate(self) -> None:
        """Rewrite the whole block table at the next step, whatever the buffers hold."""
        self.block_table.invalidate()

    def prepare(self, scheduled: Sequence[ScheduledRequest]) -> PreparedBatch:
        """Fill the buffers for one step, start their upload and describe the batch.

        Args:
            scheduled: requests with the number of tokens each computes, decodes first; no more
                requests and tokens than the buffers hold.
        """
        rows = self._gather_rows(scheduled)
        return self._fill(scheduled, rows, self._padding_of(rows))

    def padding(self, num_tokens: int) -> PreparedBatch:
        """A batch of ``num_tokens`` tokens of padding, which writes nothing to the cache."""
        nothing = self._gather_rows([])
        batch = self._fill([], nothing, num_tokens)
        self.invalidate()
        return batch

    def _fill(self, scheduled: Sequence[ScheduledRequest], rows: _Rows, padding: int) -> PreparedBatch:
        if self._uploaded is not None:
            self._uploaded.synchronize()
        self._fill_rows(rows, padding)
        self._fill_tokens(rows)
        self.buffers.upload()
        self.block_table.update(self._table.blocks_HW, rows.homes_R, rows.appended)
        if self._uploaded is not None:
            self._uploaded.record()
        return self._describe(scheduled, rows, padding)

    def _padding_of(self, rows: _Rows) -> int:
        """Tokens of padding that the batch runs with."""
        if self._padded_tokens is None:
            return 0
        shape = BatchShape(
            int(rows.counts_R.sum()), len(rows.counts_R), int(rows.counts_R.max(initial=0)),
            not any(rows.prefilling),
        )  # fmt: skip
        return self._padded_tokens(shape) - shape.num_tokens

    def _gather_rows(self, scheduled: Sequence[ScheduledRequest]) -> _Rows:
        homes, appended, sampled = [], [], []
        for row, (request, count) in enumerate(scheduled):
            home, first_column = self._table.sync(request)
            homes.append(home)
            if first_column is not None:
                appended.append((row, first_column))
            if request.num_computed + count == len(request.token_ids):
                sampled.append(row)
        return _Rows(
            homes_R=np.array(homes, dtype=np.int64),
            starts_R=np.array([request.num_computed for request, _ in scheduled], dtype=np.int64),
            counts_R=np.array([count for _, count in scheduled], dtype=np.int64),
            appended=appended,
            sampled=sampled,
            prefilling=[not request.is_decoding for request, _ in scheduled],
        )

    def _fill_rows(self, rows: _Rows, padding: int) -> None:
        buffers, num_reqs = self.buffers, len(rows.counts_R)
        assert num_reqs <= len(buffers.seq_lens_R), (num_reqs, len(buffers.seq_lens_R))
        starts_R = buffers.query_start_loc_R
        starts_R[0] = 0
        np.cumsum(rows.counts_R, out=starts_R[1 : num_reqs + 1])
        # Requests of one token, seq_len 0: kernels write zeros there, and read nothing.
        padded_R = np.minimum(self._iota_T[1 : len(starts_R) - num_reqs], padding)
        starts_R[num_reqs + 1 :] = starts_R[num_reqs] + padded_R
        np.add(rows.starts_R, rows.counts_R, out=buffers.seq_lens_R[:num_reqs], casting="unsafe")
        buffers.seq_lens_R[num_reqs:] = 0
        num_sampled = len(rows.sampled)
        buffers.logits_indices_R[:num_sampled] = starts_R[1 : num_reqs + 1][rows.sampled] - 1
        buffers.logits_indices_R[num_sampled:] = 0

    def _fill_tokens(self, rows: _Rows) -> None:
        buffers, num_reqs = self.buffers, len(rows.counts_R)
        num_tokens = int(buffers.query_start_loc_R[num_reqs])
        assert num_tokens <= len(buffers.input_ids_T), (num_tokens, len(buffers.input_ids_T))
        homes_T, positions_T = rows.homes_R, rows.starts_R
        if num_tokens != num_reqs:
            offsets_R = rows.starts_R - buffers.query_start_loc_R[:num_reqs]
            positions_T = offsets_R.repeat(rows.counts_R) + self._iota_T[:num_tokens]
            homes_T = rows.homes_R.repeat(rows.counts_R)
        blocks_T, in_block_T = np.divmod(positions_T, self.block_size)
        slots_T = self._table.blocks_HW[homes_T, blocks_T].astype(np.int64)
        slots_T *= self.block_size
        slots_T += in_block_T
        tokens_T = self._table.tokens_HL[homes_T, positions_T]
        _write(buffers.input_ids_T, tokens_T, padding=0)
        _write(buffers.positions_T, positions_T, padding=0)
        _write(buffers.slot_mapping_T, slots_T, padding=-1)

    def _describe(self, scheduled: Sequence[ScheduledRequest], rows: _Rows, padding: int) -> PreparedBatch:
        buffers, num_reqs = self.buffers, len(scheduled)
        num_tokens = int(buffers.query_start_loc_R[num_reqs])
        is_prefilling = torch.zeros(len(buffers.seq_lens_R), dtype=torch.bool)
        num_prefills = sum(rows.prefilling)
        if num_prefills:
            is_prefilling[:num_reqs] = torch.tensor(rows.prefilling)
        return PreparedBatch(
            **buffers.device,
            block_table=self.block_table.device,
            query_start_loc_cpu=buffers.host["query_start_loc"].clone(),
            seq_lens_cpu=buffers.host["seq_lens"].clone(),
            is_prefilling_cpu=is_prefilling,
            num_reqs=num_reqs,
            num_decodes=num_reqs - num_prefills,
            num_tokens=num_tokens,
            num_padded_tokens=num_tokens + padding,
            max_query_len=int(rows.counts_R.max(initial=0)),
            max_seq_len=int(buffers.seq_lens_R.max()),
            sampled_rows=tuple(rows.sampled),
            request_ids=tuple(request.request_id for request, _ in scheduled),
        )


def _write(buffer_T: IntArray, values_T: IntArray, padding: int) -> None:
    buffer_T[: len(values_T)] = values_T
    buffer_T[len(values_T) :] = padding
