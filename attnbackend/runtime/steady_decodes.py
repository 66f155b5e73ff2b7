"""The next step of requests that all decode, made from the one before: everything is one further.

Shape suffixes: R rows of the batch, each with one token, W width of the block table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from attnbackend.runtime.arrays import IntArray
from attnbackend.runtime.batch_buffers import BlockTableBuffer, StepBuffers
from attnbackend.runtime.prepared_batch import PreparedBatch
from attnbackend.runtime.request_table import RequestTable
from attnbackend.runtime.sampler import SamplingPlan
from attnbackend.runtime.scheduler import ScheduledRequest


class SteadyDecodes:
    """What the buffers hold, of which only lengths and places change from step to step.

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
        self.scheduled = scheduled
        self._batch, self._homes_R = batch, homes_R
        self._buffers, self._block_table, self._table = buffers, block_table, table
        self._block_size = block_size
        arrays, num_reqs = buffers.keep(), len(homes_R)
        self._positions_R, self._slots_R, self._seq_lens_R = (
            arrays[name][:num_reqs] for name in ("positions", "slot_mapping", "seq_lens")
        )
        self._first_R: IntArray = self._positions_R.copy()
        self._input_ids_R = batch.input_ids[:num_reqs]
        self.num_steps = 0
        """Made since `batch`."""

    def advance(self) -> PreparedBatch:
        """The next step, which the step before has left in the device's buffers: see `advance_decodes`."""
        self.num_steps += 1
        return self._batch.advanced(self.num_steps, None)

    def fill(self, last_ids_R: Tensor, are_fed: bool, has_new_blocks: bool) -> PreparedBatch:
        """Fill the buffers for the next step and start their upload.

        Args:
            last_ids_R: the tokens of the step before, on the device.
            are_fed: whether they are in the input ids already.
            has_new_blocks: whether any request has.
        """
        self.num_steps += 1
        if has_new_blocks:
            appended = self._table.sync_blocks(self._homes_R, self.scheduled)
            self._block_table.update(self._table.blocks_HW, self._homes_R, appended)
        self._write_places()
        are_fed &= not self._buffers.restore()
        sampling = self._fill_sampling()
        self._buffers.upload(len(self._homes_R))
        if not are_fed:
            self._input_ids_R.copy_(last_ids_R)
        return self._batch.advanced(self.num_steps, sampling)

    def _write_places(self) -> None:
        positions_R = self._first_R + self.num_steps
        blocks_R = self._table.blocks_HW[self._homes_R, positions_R // self._block_size].astype(np.int64)
        self._positions_R[:] = positions_R
        self._slots_R[:] = blocks_R * self._block_size + positions_R % self._block_size
        self._seq_lens_R[:] = positions_R + 1

    def _fill_sampling(self) -> SamplingPlan | None:
        if self._batch.sampling is None:
            return None
        indices_R = self._seq_lens_R - self._table.prompt_len_H[self._homes_R]
        sampled = self._table.sampling.select(self._homes_R, indices_R)
        assert sampled is not None
        return self._buffers.sampling_plan(sampled)
