"""The sampling parameters of the running requests as arrays.

Shape suffixes: H home rows (one for each running request), N rows of logits, M rows among them that sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attnbackend.runtime.arrays import IntArray
from attnbackend.runtime.random_draws import draw_keys, seed_state
from attnbackend.runtime.sampling_params import SamplingParams


class SampledRows(NamedTuple):
    """The rows of logits that are not greedy, and what decides them besides the logits."""

    rows: IntArray
    """int64 [M], ascending."""
    temperature: IntArray
    """float64 [M], above 0."""
    top_k: IntArray
    """int64 [M]; 0 keeps all."""
    top_p: IntArray
    """float64 [M]."""
    keys: IntArray
    """int64 [M], see `draw_key`."""


class SamplingTable:
    """A row for each request, written when it begins to run."""

    def __init__(self, num_rows: int) -> None:
        self._temperature_H = np.zeros(num_rows, dtype=np.float64)
        self._top_k_H = np.zeros(num_rows, dtype=np.int64)
        self._top_p_H = np.ones(num_rows, dtype=np.float64)
        self._state_H = np.zeros(num_rows, dtype=np.uint64)

    def set(self, home: int, params: SamplingParams, seed: int) -> None:
        """Write a request's row."""
        self._temperature_H[home] = params.temperature
        self._top_k_H[home] = max(0, params.top_k)
        self._top_p_H[home] = params.top_p
        self._state_H[home] = seed_state(seed)

    def select(self, homes_N: IntArray, output_indices_N: IntArray) -> SampledRows | None:
        """Those of the requests in `homes_N` that sample; None where all are greedy.

        Args:
            homes_N: the request of each row of logits.
            output_indices_N: which of its generated tokens the row gives, from 0.
        """
        temperature_N = self._temperature_H[homes_N]
        rows_M = temperature_N.nonzero()[0]
        if not len(rows_M):
            return None
        homes_M = homes_N[rows_M]
        keys_M = draw_keys(self._state_H[homes_M], output_indices_N[rows_M])
        return SampledRows(
            rows_M, temperature_N[rows_M], self._top_k_H[homes_M], self._top_p_H[homes_M], keys_M
        )
