"""Fills the persistent buffers of one step from the scheduled requests.

Shape suffixes: R rows of the batch, T tokens of the batch, N rows of its logits, H home rows of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from attnbackend.cudagraph.dispatcher import BatchShape
from attnbackend.runtime.arrays import IntArray, int_array
from attnbackend.runtime.batch_buffers import BlockTableBuffer, StepBuffers
from attnbackend.runtime.prepared_batch import PreparedBatch
from attnbackend.runtime.request_table import RequestTable
from attnbackend.runtime.sampler import SamplingPlan
from attnbackend.runtime.scheduler import ScheduledRequest, blocks_for
from attnbackend.runtime.steady_decodes import SteadyDecodes


class _Rows(NamedTuple):
    """What is gathered from the scheduled requests."""

    homes_R: IntArray
    starts_R: IntArray
    counts_R: IntArray
    known_R: IntArray
    """Tokens that the host knows."""
    is_decoding_R: IntArray
    appended: list[tuple[int, int]]
    request_ids: tuple[str, ...]


class _Wanted(NamedTuple):
    """The rows of the logits."""

    rows_N: IntArray
    back_N: IntArray | int
    """Tokens of the request in this step behind the one whose logits they are."""
    homes_N: IntArray


class InputBatch:
    """Host and device buffers of the largest size, refilled at every step.

    On a CPU the device buffers are the host buffers; for CUDA the host side is pinned and copied
    without waiting. Every padded field is reset at every step; rows of the block table are
    rewritten only where they changed. Who writes to the device buffers from elsewhere (a warm-up,
    a graph capture) calls `invalidate` afterwards.

    A step may be prepared before the tokens of the one before it are known to the host: they go from
    the device's memory, named by `started`, to where they are needed.

    Args:
        max_num_seqs: most requests a step, `max_reqs` below.
        max_num_tokens: most tokens a step, `max_tokens` below.
        max_model_len: most tokens of a request.
        block_size: tokens a cache block.
        device: where the model runs.
        padded_tokens: tokens that a batch of a shape is padded to; None pads none.
        decode_len: tokens a decoding request brings to a step: its newest, and its drafts.
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
        decode_len: int = 1,
    ) -> None:
        self._padded_tokens = padded_tokens
        self.block_size = block_size
        self.decode_len = decode_len
        self._last_position = max_model_len - 1
        max_len = max_model_len + decode_len - 1
        self.width = blocks_for(max_len, block_size)
        self.buffers = StepBuffers(max_num_seqs, max_num_tokens, device, max_num_seqs * decode_len)
        self.block_table = BlockTableBuffer(max_num_seqs, self.width, device)
        self._table = RequestTable(max_num_seqs, max_len, self.width)
        self._logits_row_H: IntArray = np.zeros(max_num_seqs, dtype=np.int64)
        self._last_ids: Tensor | None = None
        self._has_advanced = False
        self._is_started = False
        self._wanted_homes_N: IntArray | None = None
        """Homes of the rows of logits, where they are others than those of the step before."""
        self._steady: SteadyDecodes | None = None
        self._iota_T: IntArray = np.arange(1 + max(max_num_tokens, max_num_seqs), dtype=np.int64)
        make_event = cast("Callable[[], torch.cuda.Event]", torch.cuda.Event)
        self._uploaded = make_event() if device.type == "cuda" else None

    @property
    def num_known(self) -> int:
        """Requests that have a row: those that ran and have not been removed."""
        return self._table.num_known

    def remove(self, request_id: str) -> None:
        """Forget a request that finished or was preempted; unknown ids are fine."""
        self._table.remove(request_id)
        self._steady = None

    def clear(self) -> None:
        """Forget all requests and steps, whatever state a call that broke off left them in."""
        if self._uploaded is not None:
            self._uploaded.record()  # A copy may have been started after which it was not.
        self._table.clear()
        self._is_started = False
        self.invalidate()

    def invalidate(self) -> None:
        """Rewrite the whole block table at the next step, whatever the buffers hold."""
        self.block_table.invalidate()
        self._steady = None

    def prepare(self, scheduled: Sequence[ScheduledRequest], has_new_blocks: bool = True) -> PreparedBatch:
        """Fill the buffers for one step, start their upload and describe the batch.

        Args:
            scheduled: requests with the number of tokens each computes, decodes first; no more
                requests and tokens than the buffers hold. The same list means the same requests
                and numbers.
            has_new_blocks: False: where the list is the same, so are the requests' blocks.
        """
        steady = self._steady
        if self._is_started and steady is not None and steady.scheduled is scheduled:
            return self._advance(steady, has_new_blocks)
        self._is_started = False
        rows = self._gather_rows(scheduled)
        if self.decode_len > 1:
            self._write_drafts(scheduled, rows)
        all_decode = bool(rows.is_decoding_R.all())
        batch = self._fill(rows, self._padding_of(rows), self.decode_len if all_decode else 1)
        self._steady = None
        if all_decode and scheduled and self.decode_len == 1:
            self._steady = SteadyDecodes(
                scheduled, batch, rows.homes_R, self.buffers, self.block_table, self._table, self.block_size
            )
        return batch

    def _advance(self, steady: SteadyDecodes, has_new_blocks: bool) -> PreparedBatch:
        self._is_started = False
        if self._has_advanced and not has_new_blocks:
            return steady.advance()
        assert self._last_ids is not None
        if self._uploaded is not None:
            self._uploaded.synchronize()
        batch = steady.fill(self._last_ids, self._has_advanced, has_new_blocks)
        if self._uploaded is not None:
            self._uploaded.record()
        return batch

    def started(self, ids_N: Tensor, has_advanced: bool = False) -> None:
        """Say where the device will have the tokens of the batch prepared last.

        Args:
            ids_N: int64 [N].
            has_advanced: whether the step, one of decodes, makes the batch the next one of the same requests:
                see `advance_decodes`.
        """
        self._last_ids, self._has_advanced, self._is_started = ids_N, has_advanced, True
        if self._wanted_homes_N is not None:
            self._logits_row_H[self._wanted_homes_N] = self._iota_T[: len(self._wanted_homes_N)]
            self._wanted_homes_N = None

    def repeated(self) -> None:
        """Say that the batch prepared last was started again, as it had advanced itself."""
        assert self._steady is not None
        self._steady.num_steps += 1

    def padding(self, num_tokens: int, query_len: int = 1) -> PreparedBatch:
        """A batch of padding, requests of `query_len` tokens, which writes nothing to the cache."""
        batch = self._fill(self._gather_rows([]), num_tokens, query_len)
        self.invalidate()
        return batch

    def _gather_rows(self, scheduled: Sequence[ScheduledRequest]) -> _Rows:
        starts_R = int_array([request.num_computed for request, _ in scheduled])
        homes_R = self._table.homes(scheduled)
        counts_R = int_array([count for _, count in scheduled])
        request_ids = tuple([request.request_id for request, _ in scheduled])
        known_R = self._table.sync_tokens(homes_R, scheduled)
        appended = self._table.sync_blocks(homes_R, scheduled)
        is_decoding_R = (starts_R >= known_R - 1) & (starts_R >= self._table.prompt_len_H[homes_R])
        return _Rows(homes_R, starts_R, counts_R, known_R, is_decoding_R, appended, request_ids)

    def _write_drafts(self, scheduled: Sequence[ScheduledRequest], rows: _Rows) -> None:
        num_decodes = int(rows.is_decoding_R.sum())
        if num_decodes:
            drafts = [request.drafts for request, _ in scheduled[:num_decodes]]
            self._table.write_drafts(rows.homes_R[:num_decodes], rows.starts_R[:num_decodes], drafts)

    def _padding_of(self, rows: _Rows) -> int:
        """Tokens of padding that the batch runs with."""
        if self._padded_tokens is None:
            return 0
        shape = BatchShape(
            int(rows.counts_R.sum()), len(rows.counts_R), int(rows.counts_R.max(initial=0)),
            bool(rows.is_decoding_R.all()),
        )  # fmt: skip
        return self._padded_tokens(shape) - shape.num_tokens

    def _fill(self, rows: _Rows, padding: int, query_len: int) -> PreparedBatch:
        if self._uploaded is not None:
            self._uploaded.synchronize()
        self._fill_rows(rows, padding, query_len)
        self._fill_tokens(rows)
        wanted = self._fill_logits(rows)
        sampling = self._fill_sampling(rows, wanted)
        num_fed = self._fill_fed(rows)
        self.buffers.upload()
        self.block_table.update(self._table.blocks_HW, rows.homes_R, rows.appended)
        if num_fed:
            self._feed(num_fed)
        if self._uploaded is not None:
            self._uploaded.record()
        return self._describe(rows, wanted, sampling, padding)

    def _fill_rows(self, rows: _Rows, padding: int, query_len: int) -> None:
        buffers, num_reqs = self.buffers, len(rows.counts_R)
        assert num_reqs <= len(buffers.seq_lens_R), (num_reqs, len(buffers.seq_lens_R))
        starts_R = buffers.query_start_loc_R
        starts_R[0] = 0
        np.cumsum(rows.counts_R, out=starts_R[1 : num_reqs + 1])
        # Requests of seq_len 0: kernels write zeros there, and read nothing.
        padded_R = np.minimum(self._iota_T[1 : len(starts_R) - num_reqs] * query_len, padding)
        starts_R[num_reqs + 1 :] = starts_R[num_reqs] + padded_R
        np.add(rows.starts_R, rows.counts_R, out=buffers.seq_lens_R[:num_reqs], casting="unsafe")
        buffers.seq_lens_R[num_reqs:] = 0

    def _fill_tokens(self, rows: _Rows) -> None:
        buffers, num_reqs = self.buffers, len(rows.counts_R)
        num_tokens = int(buffers.query_start_loc_R[num_reqs])
        assert num_tokens <= len(buffers.input_ids_T), (num_tokens, len(buffers.input_ids_T))
        homes_T, positions_T = rows.homes_R, rows.starts_R
        if num_tokens != num_reqs:
            offsets_R = rows.starts_R - buffers.query_start_loc_R[:num_reqs]
            positions_T = offsets_R.repeat(rows.counts_R) + self._iota_T[:num_tokens]
            homes_T = rows.homes_R.repeat(rows.counts_R)
        blocks_T = positions_T // self.block_size
        slots_T = self._table.blocks_HW[homes_T, blocks_T].astype(np.int64)
        slots_T -= blocks_T
        slots_T *= self.block_size
        slots_T += positions_T
        tokens_T = self._table.tokens_HL[homes_T, positions_T]
        if self.decode_len > 1:  # Drafts behind the longest length have no position, and are never kept.
            positions_T = np.minimum(positions_T, self._last_position)
        _write(buffers.input_ids_T, tokens_T, padding=0)
        _write(buffers.positions_T, positions_T, padding=0)
        _write(buffers.slot_mapping_T, slots_T, padding=-1)

    def _fill_logits(self, rows: _Rows) -> _Wanted:
        """Logits are wanted after the last token of each request that has no more, and after drafts."""
        buffers = self.buffers
        rows_N: IntArray = (rows.starts_R + rows.counts_R >= rows.known_R).nonzero()[0]
        back_N: IntArray | int = 0
        if self.decode_len > 1:
            times_N = np.where(rows.is_decoding_R, rows.counts_R, 1)[rows_N]
            back_N = np.cumsum(times_N).repeat(times_N) - self._iota_T[1 : int(times_N.sum()) + 1]
            rows_N = rows_N.repeat(times_N)
        num_logits = len(rows_N)
        buffers.logits_indices_N[:num_logits] = buffers.query_start_loc_R[rows_N + 1] - (back_N + 1)
        buffers.logits_indices_N[num_logits:] = 0
        return _Wanted(rows_N, back_N, rows.homes_R[rows_N])

    def _fill_sampling(self, rows: _Rows, wanted: _Wanted) -> SamplingPlan | None:
        lens_N = self.buffers.seq_lens_R[wanted.rows_N] - wanted.back_N
        sampled = self._table.sampling.select(
            wanted.homes_N, lens_N - self._table.prompt_len_H[wanted.homes_N]
        )
        return None if sampled is None else self.buffers.sampling_plan(sampled)

    def _fill_fed(self, rows: _Rows) -> int:
        """Where the tokens go that only the device has: decodes whose newest is not known here."""
        rows_F = (rows.starts_R >= rows.known_R).nonzero()[0]
        if len(rows_F):
            self.buffers.fed_tokens_R[: len(rows_F)] = self.buffers.query_start_loc_R[rows_F]
            self.buffers.fed_rows_R[: len(rows_F)] = self._logits_row_H[rows.homes_R[rows_F]]
        return len(rows_F)

    def _feed(self, count: int) -> None:
        buffers = self.buffers
        assert self._last_ids is not None, "tokens are pending, and no step was started"
        ids = self._last_ids.index_select(0, buffers.fed_rows[:count])
        buffers.device["input_ids"].index_copy_(0, buffers.fed_tokens[:count], ids)

    def _describe(
        self, rows: _Rows, wanted: _Wanted, sampling: SamplingPlan | None, padding: int
    ) -> PreparedBatch:
        buffers, num_reqs = self.buffers, len(rows.counts_R)
        num_tokens = int(buffers.query_start_loc_R[num_reqs])
        is_prefilling = torch.zeros(len(buffers.seq_lens_R), dtype=torch.bool, device="cpu")
        num_decodes = int(rows.is_decoding_R.sum())
        if num_decodes < num_reqs:
            is_prefilling[:num_reqs] = torch.from_numpy(~rows.is_decoding_R)
        self._wanted_homes_N = wanted.homes_N
        return PreparedBatch(
            **buffers.device,
            block_table=self.block_table.device,
            query_start_loc_cpu=buffers.host["query_start_loc"].clone(),
            seq_lens_cpu=buffers.host["seq_lens"].clone(),
            is_prefilling_cpu=is_prefilling,
            num_reqs=num_reqs,
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            num_padded_tokens=num_tokens + padding,
            max_query_len=int(rows.counts_R.max(initial=0)),
            max_seq_len=int(buffers.seq_lens_R.max()),
            sampled_rows=tuple(wanted.rows_N.tolist()),
            request_ids=rows.request_ids,
            sampling=sampling,
        )


def _write(buffer_T: IntArray, values_T: IntArray, padding: int) -> None:
    buffer_T[: len(values_T)] = values_T
    buffer_T[len(values_T) :] = padding
