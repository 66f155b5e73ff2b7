"""Queries rounded to float8 by a kernel: every value of 16 bits, as torch converts what is in range.

NaN stays NaN; its sign says nothing, and GPUs clear it where torch keeps that of bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from paged_batches import BF16, DEVICE, E4M3, F16, pytestmark  # noqa: F401 (pytestmark)

from attnbackend.kernels.triton import round_queries

LARGEST = 448.0


def assert_rounded(found: torch.Tensor, query: torch.Tensor) -> None:
    expected = query.float().cpu().clamp(-LARGEST, LARGEST).to(E4M3).view(torch.uint8)
    given = found.cpu().view(torch.uint8)
    is_nan = query.isnan().cpu()
    assert (given[is_nan] & 0x7F == 0x7F).all()
    assert torch.equal(given[~is_nan], expected[~is_nan])


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_value(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(16, 32, 128)
    query = bits.view(dtype).to(DEVICE)
    found = round_queries(query)
    assert found.dtype is E4M3
    assert_rounded(found, query)


@pytest.mark.parametrize("shape", [(3, 5, 40), (2, 40, 192), (0, 4, 64)], ids=str)
def test_rows_lie_anywhere(shape: tuple[int, int, int]) -> None:
    tokens, heads, size = shape
    wide = torch.randn(tokens, 3 * heads, size + 8, device=DEVICE, dtype=BF16)
    for query in (wide[:, heads : 2 * heads, :size], wide[..., :size].contiguous()[:, heads : 2 * heads]):
        found = round_queries(query)
        assert found.is_contiguous()
        assert_rounded(found, query)


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"query.dtype is torch.float64"):
        round_queries(torch.zeros(1, 1, 32, dtype=torch.float64, device=DEVICE))
