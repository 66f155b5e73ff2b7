"""The next step of requests that all decode, made from the one before: everything is one further.

Shape suffixes: R rows of the batch, each with one token, E those among them that enter a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnbackend.runtime.arrays import IntArray, int_array
from attnbackend.runtime.batch_buffers import BlockTableBuffer, StepBuffers
from attnbackend.runtime.prepared_batch import PreparedBatch
from attnbackend.runtime.request import Request
from attnbackend.runtime.request_table import RequestTable
from attnbackend.runtime.sampler import SamplingPlan
from attnbackend.runtime.scheduler import ScheduledRequest


class _Rows(NamedTuple):
    """Rows that enter their next block in the same steps."""

    rows_E: IntArray
    homes_E: IntArray
    columns_E: IntArray
    """Of the block that they enter next."""
    requests: list[Request]


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
        buffers.keep()
        buffers.kept["input_ids"].fill(0)
        num_reqs = len(homes_R)
        self._positions_R, self._slots_R, self._seq_lens_R = (
            buffers.kept[name][:num_reqs] for name in ("positions", "slot_mapping", "seq_lens")
        )
        self._input_ids_R = batch.input_ids[:num_reqs]
        self._entering: dict[int, _Rows] = {}
        """The rows that enter a block after so many steps, modulo its size."""
        steps_R = -self._positions_R % block_size
        for steps in set(steps_R.tolist()):
            rows_E = (steps_R == steps).nonzero()[0]
            requests = [scheduled[row].request for row in rows_E.tolist()]
            columns_E = self._positions_R[rows_E] // block_size + 1
            self._entering[steps] = _Rows(rows_E, homes_R[rows_E], columns_E, requests)
        self._num_advanced = 0

    def continues(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether this is the next step: the same requests, and the step before was started."""
        return scheduled is self._scheduled and scheduled[0].request.num_computed == self._num_computed + 1

    def advance(self, last_ids_R: Tensor) -> PreparedBatch:
        """Fill the buffers for the next step and start their upload.

        Args:
            last_ids_R: the tokens of the step before, on the device.
        """
        self._num_computed += 1
        self._num_advanced += 1
        for array_R in (self._positions_R, self._slots_R, self._seq_lens_R):
            array_R += 1
        entering = self._entering.get(self._num_advanced % self._block_size)
        if entering is not None:
            self._enter_blocks(*entering)
        num_reqs = len(self._homes_R)
        self._buffers.restore(num_reqs)
        sampling = self._fill_sampling()
        self._buffers.upload(num_reqs)
        self._input_ids_R.copy_(last_ids_R)
        seq_lens_cpu = torch.from_numpy(self._buffers.kept["seq_lens"].copy())
        self._batch = self._batch.advanced(seq_lens_cpu, self._batch.max_seq_len + 1, sampling)
        return self._batch

    def _enter_blocks(
        self, rows_E: IntArray, homes_E: IntArray, columns_E: IntArray, requests: list[Request]
    ) -> None:  # fmt: skip
        """These rows go on in another block, which the scheduler has given them."""
        columns = columns_E.tolist()
        blocks_E = int_array([r.block_ids[c] for r, c in zip(requests, columns, strict=True)])
        self._slots_R[rows_E] = blocks_E * self._block_size
        self._table.set_blocks(homes_E, columns_E, blocks_E)
        self._block_table.append(rows_E, columns_E, blocks_E)
        columns_E += 1

    def _fill_sampling(self) -> SamplingPlan | None:
        if self._batch.sampling is None:
            return None
        indices_R = self._seq_lens_R - self._table.prompt_len_H[self._homes_R]
        sampled = self._table.sampling.select(self._homes_R, indices_R)
        assert sampled is not None
        return self._buffers.sampling_plan(sampled)
