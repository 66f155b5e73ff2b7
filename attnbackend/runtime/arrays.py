"""The type of the host's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[Any]


def int_array(values: list[int]) -> IntArray:
    """int64, of one dimension, also when there are none."""
    return np.array(values, dtype=np.int64)
