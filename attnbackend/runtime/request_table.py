"""Tokens, blocks and parameters of the running requests as arrays, so that a batch is gathered, not looped.

Shape suffixes: R rows of a batch, D those among them with one new token, H home rows (one for each running
request), L longest request, W block-table width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnbackend.runtime.arrays import IntArray, int_array
from attnbackend.runtime.request import Request
from attnbackend.runtime.sampling_table import SamplingTable
from attnbackend.runtime.scheduler import ScheduledRequest


class RequestTable:
    """A home row for each running request, extended as its tokens and blocks grow.

    Args:
        num_rows: most requests at a time.
        max_len: most tokens of a request, drafts included.
        width: most blocks of a request.
    """

    def __init__(self, num_rows: int, max_len: int, width: int) -> None:
        self.tokens_HL: IntArray = np.zeros((num_rows, max_len), dtype=np.int32)
        self.blocks_HW: IntArray = np.zeros((num_rows, width), dtype=np.int32)
        self.prompt_len_H: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.sampling = SamplingTable(num_rows)
        self._num_tokens_H: IntArray = np.zeros(num_rows, dtype=np.int64)
        self._num_blocks_H: IntArray = np.zeros(num_rows, dtype=np.int64)
        self._free = list(range(num_rows - 1, -1, -1))
        self._homes: dict[str, int] = {}

    @property
    def num_known(self) -> int:
        """Home rows that are taken."""
        return len(self._homes)

    def homes(self, scheduled: Sequence[ScheduledRequest]) -> IntArray:
        """Home rows of the requests, given to those that have none."""
        return int_array([self._home(request) for request, _ in scheduled])

    def remove(self, request_id: str) -> None:
        """Give the home row of a request up, if it has one."""
        home = self._homes.pop(request_id, None)
        if home is None:
            return
        self.blocks_HW[home, : self._num_blocks_H[home]] = 0
        self._num_tokens_H[home] = self._num_blocks_H[home] = 0
        self._free.append(home)

    def clear(self) -> None:
        """Give all home rows up."""
        self.blocks_HW.fill(0)
        self._num_tokens_H.fill(0)
        self._num_blocks_H.fill(0)
        self._free = list(range(len(self.blocks_HW) - 1, -1, -1))
        self._homes = {}

    def sync_tokens(self, homes_R: IntArray, scheduled: Sequence[ScheduledRequest]) -> IntArray:
        """Bring the rows' tokens up to date; how many each has [R]."""
        total_R = int_array([len(request.token_ids) for request, _ in scheduled])
        known_R = self._num_tokens_H[homes_R]
        behind_R = total_R - known_R
        rows_D = (behind_R == 1).nonzero()[0]  # Most are, after a step of decodes.
        newest_D = [scheduled[row][0].token_ids[-1] for row in rows_D.tolist()]
        self.tokens_HL[homes_R[rows_D], known_R[rows_D]] = newest_D
        for row in (behind_R > 1).nonzero()[0].tolist():
            known, total = known_R[row], total_R[row]
            self.tokens_HL[homes_R[row], known:total] = scheduled[row][0].token_ids[known:]
        self._num_tokens_H[homes_R] = total_R
        return total_R

    def write_drafts(self, homes_R: IntArray, starts_R: IntArray, drafts: Sequence[Sequence[int]]) -> None:
        """Put the drafts of each row behind its tokens; they are no tokens of the request."""
        drafts_RK = np.array(drafts, dtype=np.int32)
        columns_RK = starts_R[:, None] + np.arange(1, drafts_RK.shape[1] + 1)
        self.tokens_HL[homes_R[:, None], columns_RK] = drafts_RK

    def sync_blocks(self, homes_R: IntArray, scheduled: Sequence[ScheduledRequest]) -> list[tuple[int, int]]:
        """Bring the rows' blocks up to date; which rows got blocks, and from which column on."""
        total_R = int_array([len(request.block_ids) for request, _ in scheduled])
        known_R = self._num_blocks_H[homes_R]
        changed = []
        for row in np.flatnonzero(total_R != known_R).tolist():
            known, total, home = int(known_R[row]), int(total_R[row]), homes_R[row]
            assert known < total, f"home row {home} lost blocks ({known} to {total}) without remove"
            self.blocks_HW[home, known:total] = scheduled[row][0].block_ids[known:]
            changed.append((row, known))
        if changed:
            self._num_blocks_H[homes_R] = total_R
        return changed

    def _home(self, request: Request) -> int:
        home = self._homes.get(request.request_id)
        if home is None:
            assert self._free, f"no home row for {request.request_id}: {list(self._homes)}"
            home = self._homes[request.request_id] = self._free.pop()
            self.prompt_len_H[home] = request.prompt_len
            self.sampling.set(home, request.params, request.seed)
        return home
