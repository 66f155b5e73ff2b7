"""Tokens and blocks of the running requests as arrays, so that a batch is gathered, not looped.

Shape suffixes: H home rows (one for each running request), L longest request, W block-table width.
"""

from __future__ import annotations

import numpy as np

from attnbackend.runtime.batch_buffers import IntArray
from attnbackend.runtime.request import Request


class RequestTable:
    """A home row for each running request, extended as its tokens and blocks grow.

    Args:
        num_rows: most requests at a time.
        max_model_len: most tokens of a request.
        width: most blocks of a request.
    """

    def __init__(self, num_rows: int, max_model_len: int, width: int) -> None:
        self.tokens_HL: IntArray = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.blocks_HW: IntArray = np.zeros((num_rows, width), dtype=np.int32)
        self._free = list(range(num_rows - 1, -1, -1))
        self._homes: dict[str, int] = {}
        self._num_tokens = [0] * num_rows
        self._num_blocks = [0] * num_rows

    def sync(self, request: Request) -> tuple[int, int | None]:
        """Bring the request's home row up to date.

        Returns:
            The home row, and the first block column that changed: 0 for a request that is new
            here, None when no block was added.
        """
        home = self._homes.get(request.request_id)
        is_new = home is None
        if home is None:
            assert self._free, f"no home row for {request.request_id}: {list(self._homes)}"
            home = self._homes[request.request_id] = self._free.pop()
        self._sync_tokens(home, request.token_ids)
        added_from = self._sync_blocks(home, request.block_ids)
        return home, 0 if is_new else added_from

    def remove(self, request_id: str) -> None:
        """Give the home row of a request up, if it has one."""
        home = self._homes.pop(request_id, None)
        if home is None:
            return
        self.blocks_HW[home, : self._num_blocks[home]] = 0
        self._num_tokens[home] = self._num_blocks[home] = 0
        self._free.append(home)

    def _sync_tokens(self, home: int, token_ids: list[int]) -> None:
        known, total = self._num_tokens[home], len(token_ids)
        if known != total:
            self.tokens_HL[home, known:total] = token_ids[known:]
            self._num_tokens[home] = total

    def _sync_blocks(self, home: int, block_ids: list[int]) -> int | None:
        known, total = self._num_blocks[home], len(block_ids)
        if known == total:
            return None
        assert known < total, f"home row {home} lost blocks ({known} to {total}) without remove"
        self.blocks_HW[home, known:total] = block_ids[known:]
        self._num_blocks[home] = total
        return known
