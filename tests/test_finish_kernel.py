"""What is left to do after a library's kernel, when there are more rows than one look takes in."""

from __future__ import annotations

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
pytest.importorskip("triton")

from attnbackend.kernels.triton import finish_attention, unavailable_reason  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
pytestmark = pytest.mark.skipif(
    unavailable_reason(DEVICE) is not None, reason=str(unavailable_reason(DEVICE))
)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_among_many(causal: bool) -> None:
    """300 rows of 0 to 2 tokens, some without keys or with fewer than tokens, and 3 tokens behind them."""
    queries = [(i * 7) % 3 if i % 5 == 0 else 0 for i in range(300)]
    lens = [(i * 3) % 4 for i in range(300)]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    tokens = int(starts[-1]) + 3
    out, lse = torch.full((tokens, 2, 16), 7.0), torch.full((tokens, 2), 0.5)
    seen = torch.zeros(tokens, dtype=torch.bool)
    for row, (n, keys) in enumerate(zip(queries, lens, strict=True)):
        first = max(0, n - keys) if causal else 0
        seen[int(starts[row]) + first : int(starts[row + 1])] = keys > 0
    got, got_lse = (x.clone().to(DEVICE) for x in (out, lse))
    finish_attention(
        got, got_lse, got_lse, starts.to(DEVICE), torch.tensor(lens).int().to(DEVICE), causal=causal
    )
    without_lse = out.clone().to(DEVICE)
    finish_attention(
        without_lse, None, None, starts.to(DEVICE), torch.tensor(lens).int().to(DEVICE), causal=causal
    )
    assert 0 < int(seen.sum()) < tokens
    assert torch.equal(without_lse, got)
    assert torch.equal(got.cpu(), torch.where(seen.view(-1, 1, 1), out, 0.0))
    assert torch.equal(got_lse.cpu(), torch.where(seen.view(-1, 1), lse, -torch.inf))
