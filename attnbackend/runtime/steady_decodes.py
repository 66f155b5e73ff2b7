"""The next step of requests that all decode, made from the one before: everything is one further.

Shape suffixes: R rows of the batch, T its tokens; here each row has one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnbackend.runtime.arrays import IntArray
from attnbackend.runtime.batch_buffers import BlockTableBuffer, StepBuffers
from attnbackend.runtime.prepared_batch import PreparedBatch
from attnbackend.runtime.request_table import RequestTable
from attnbackend.runtime.sampler import SamplingPlan
from attnbackend.runtime.scheduler import ScheduledRequest

_COPIED = ("positions_T", "slot_mapping_T", "logits_indices_N", "query_start_loc_R", "seq_lens_R")


class SteadyDecodes:
    """Copies of what the buffers hold, of which only lengths and places change from step to step.

    The tokens are those that the step before sampled, row by row, so none need be known to the host.

    Args:
        scheduled: the requests of `batch`, each of which decodes one token.
        batch: as it was prepared, and is in the buffers.
        homes_R: home row of each request.
        buffers, block_table, table: those of the `InputBatch`.
        block_size: tokens a cache block.
    """

    def __init__(
        self, scheduled: Sequence[ScheduledRequest], batch: PreparedBatch, homes_R: IntArray,
        buffers: StepBuffers, block_table: BlockTableBuffer, table: RequestTable, block_size: int,
    ) -> None:  # fmt: skip
        self._scheduled, self._batch, self._homes_R = scheduled, batch, homes_R
        self._num_computed = scheduled[0].request.num_computed
        self._buffers, self._block_table, self._table = buffers, block_table, table
        self._block_size = block_size
        held = {name: getattr(buffers, name).copy() for name in _COPIED}
        self._arrays: list[tuple[IntArray, IntArray]] = [
            (getattr(buffers, name), held[name]) for name in held
        ]
        self._positions_R: IntArray = held["positions_T"][: len(homes_R)]
        self._slots_R: IntArray = held["slot_mapping_T"][: len(homes_R)]
        self._all_seq_lens_R: IntArray = held["seq_lens_R"]
        self._seq_lens_R = self._all_seq_lens_R[: len(homes_R)]
        self._input_ids_R = batch.input_ids[: len(homes_R)]

    def continues(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether this is the next step: the same requests, and the step before was started."""
        return scheduled is self._scheduled and scheduled[0].request.num_computed == self._num_computed + 1

    def advance(self, last_ids_R: Tensor) -> PreparedBatch:
        """Fill the buffers for the next step and start their upload.

        Args:
            last_ids_R: the tokens of the step before, on the device.
        """
        self._num_computed += 1
        for array_R in (self._positions_R, self._slots_R, self._seq_lens_R):
            array_R += 1
        grown = self._enter_blocks()
        for buffer, array in self._arrays:
            buffer[:] = array
        self._buffers.input_ids_T.fill(0)
        sampling = self._fill_sampling()
        self._buffers.upload()
        self._block_table.extend(self._table.blocks_HW, self._homes_R, grown)
        self._input_ids_R.copy_(last_ids_R)
        self._batch = self._batch.advanced(
            torch.from_numpy(self._all_seq_lens_R.copy()), self._batch.max_seq_len + 1, sampling
        )
        return self._batch

    def _enter_blocks(self) -> list[tuple[int, int]]:
        """Slots of the rows that go on in another block; these rows, each with the block's column."""
        entering = []
        for row in (self._positions_R % self._block_size == 0).nonzero()[0].tolist():
            column = int(self._positions_R[row]) // self._block_size
            block = self._scheduled[row].request.block_ids[column]
            self._table.set_block(int(self._homes_R[row]), column, block)
            self._slots_R[row] = block * self._block_size
            entering.append((row, column))
        return entering

    def _fill_sampling(self) -> SamplingPlan | None:
        if self._batch.sampling is None:
            return None
        indices_R = self._seq_lens_R - self._table.prompt_len_H[self._homes_R]
        sampled = self._table.sampling.select(self._homes_R, indices_R)
        assert sampled is not None
        return self._buffers.sampling_plan(sampled)
