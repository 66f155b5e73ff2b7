"""The next step of requests that all decode, made from the one before: everything is one further.

Shape suffixes: R rows of the batch, each with one token, E those among them that enter a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from attnbackend.runtime.arrays import IntArray
from attnbackend.runtime.batch_buffers import BlockTableBuffer, StepBuffers
from attnbackend.runtime.prepared_batch import PreparedBatch
from attnbackend.runtime.request import Request
from attnbackend.runtime.request_table import RequestTable
from attnbackend.runtime.sampler import SamplingPlan
from attnbackend.runtime.scheduler import ScheduledRequest


class _Row(NamedTuple):
    """A request's place in the batch and in the `RequestTable`."""

    row: int
    home: int
    start: int
    """Its position in the first of the steps."""
    request: Request


class SteadyDecodes:
    """What the buffers hold, of which only lengths and places change from step to step.

    The tokens are those that the step before sampled, row by row, so none need be known to the host. A step
    follows a wait, when little of the code that arrays need is in a near cache: it does with few of them.

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
        arrays, num_reqs = buffers.keep(), len(homes_R)
        self._positions_R, self._slots_R, self._seq_lens_R = (
            arrays[name][:num_reqs] for name in ("positions", "slot_mapping", "seq_lens")
        )
        self._input_ids_R = batch.input_ids[:num_reqs]
        self._num_steps = 0
        self._entering: dict[int, list[_Row]] = {}
        """The rows that enter a block after so many steps, modulo its size."""
        places = zip(homes_R.tolist(), self._positions_R.tolist(), scheduled, strict=True)
        for row, (home, start, (request, _)) in enumerate(places):
            self._entering.setdefault(-start % block_size, []).append(_Row(row, home, start, request))

    def continues(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether this is the next step: the same requests, and the step before was started."""
        return scheduled is self._scheduled and scheduled[0].request.num_computed == self._num_computed + 1

    def advance(self, last_ids_R: Tensor, are_fed: bool) -> PreparedBatch:
        """Fill the buffers for the next step and start their upload.

        Args:
            last_ids_R: the tokens of the step before, on the device.
            are_fed: whether they are in the input ids already.
        """
        self._num_computed += 1
        self._num_steps += 1
        self._positions_R += 1
        self._slots_R += 1
        self._seq_lens_R += 1
        if entering := self._entering.get(self._num_steps % self._block_size):
            self._enter_blocks(entering)
        are_fed &= not self._buffers.restore()
        sampling = self._fill_sampling()
        self._buffers.upload(len(self._homes_R))
        if not are_fed:
            self._input_ids_R.copy_(last_ids_R)
        return self._batch.advanced(self._num_steps, sampling)

    def _enter_blocks(self, rows: list[_Row]) -> None:
        """These rows go on in another block, which the scheduler has given them."""
        for row, home, start, request in rows:
            column = (start + self._num_steps) // self._block_size
            block = request.block_ids[column]
            self._slots_R[row] = block * self._block_size
            self._table.set_block(home, column, block)
            self._block_table.rows[row, column] = block
        self._block_table.upload(rows[0].row, rows[-1].row)

    def _fill_sampling(self) -> SamplingPlan | None:
        if self._batch.sampling is None:
            return None
        indices_R = self._seq_lens_R - self._table.prompt_len_H[self._homes_R]
        sampled = self._table.sampling.select(self._homes_R, indices_R)
        assert sampled is not None
        return self._buffers.sampling_plan(sampled)
