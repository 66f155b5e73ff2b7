"""Float8 pages widened to 16 bits: every bit, where it goes, and what is left alone.

Legend: S block size, N slots of a written page, Hk kv heads, D head size.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_batches import (  # noqa: F401 (pytestmark)
    BF16,
    DEVICE,
    E4M3,
    E5M2,
    F16,
    F32,
    make_batch,
    poison,
    pytestmark,
)

from attnbackend.kernels.triton import widen_pages

N = 32
ROWS = [(1, 70), (1, 0), (1, 32), (1, 5)]
ENDS = [3, 3, 4, 5]


def widened(batch: Any, dtype: torch.dtype, ends: list[int] = ENDS, spare: int = 1) -> torch.Tensor:
    """Pages [2, P, N, Hk, D] written over NaN, `spare` of them of no row."""
    output = poison((2, ends[-1] + spare, N, *batch.key_cache.shape[2:]), dtype)
    widen_pages(
        batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens,
        torch.tensor(ends, dtype=torch.int32, device=DEVICE), output,
        k_scale=batch.k_scale, v_scale=batch.v_scale,
    )  # fmt: skip
    return output


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    "shape",
    [
        {}, {"block_size": 64, "layout": "HND"}, {"layout": "layers interleaved", "dim": 72, "kv_heads": 3},
        {"k_scale": [0.3], "v_scale": [0.5, 1.7]}, {"k_scale": [3.0, 0.01]},
    ],
    ids=str,
)  # fmt: skip
def test_rows_lie_one_after_the_other(
    shape: dict[str, Any], dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    batch = make_batch(ROWS, cache_dtype=cache_dtype, dtype=F32, **shape)
    found = widened(batch, dtype)
    assert found[:, ENDS[-1] :].isnan().all(), "a page of no row was written"
    begin = 0
    for row, ((_, length), end) in enumerate(zip(ROWS, ENDS, strict=True)):
        for side, real in ((0, batch.keys[row]), (1, batch.values[row])):
            pages = found[side, begin:end].flatten(0, 1)
            assert torch.equal(pages[:length], real.float().to(dtype)), (row, side)
            assert (pages[length:] == 0).all(), (row, side)
        begin = end


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_stored_value_is_exact(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Subnormals, NaN and, of e5m2, infinities too: torch's own conversion is the reference."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(cache_dtype).view(2, 16, 1, 8)
    ints = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([[1, 0]], [32], [1])]
    output = poison((2, 1, N, 1, 8), dtype)
    widen_pages(codes, codes.flip(0), ints[0], ints[1], ints[2], output)
    for side, stored in ((0, codes.flip(0)), (1, codes)):
        real = stored.float().to(dtype).flatten(0, 1)
        assert torch.equal(output[side, 0].isnan(), real.isnan())
        assert torch.equal(output[side, 0].nan_to_num(7.0), real.nan_to_num(7.0))


def test_more_rows_than_are_counted_at_once() -> None:
    rows = [(1, 0)] * 90 + [(1, 3 + i % 2) for i in range(50)]
    batch = make_batch(rows, cache_dtype=E4M3, dtype=F32, kv_heads=1, dim=8, heads=1)
    found = widened(batch, F32, [0] * 90 + list(range(1, 51)), spare=0)
    for row in (90, 91, 127, 128, 129, 139):
        assert torch.equal(found[1, row - 90, : rows[row][1]].double(), batch.values[row]), row


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (0, lambda x: x.float(), "key_cache.dtype is torch.float32"),
        (1, lambda x: x.view(torch.uint8).view(E5M2), "value_cache.dtype is torch.float8_e5m2"),
        (1, lambda x: x[:, :, :1], "value_cache is"),
        (2, lambda x: x.long(), "block_table is"),
        (3, lambda x: x[:1], "block_table is"),
        (4, lambda x: x[:1], "page_ends is"),
        (5, lambda x: x[..., :8], "output is"),
        (5, lambda x: x.to(E4M3), "output is"),
    ],
)
def test_other_arguments_are_refused(name: int, change: Any, words: str) -> None:
    batch = make_batch([(1, 3), (1, 3)], cache_dtype=E4M3)
    ends = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    given = [
        batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens, ends,
        poison((2, 2, N, *batch.key_cache.shape[2:]), F16),
    ]  # fmt: skip
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=words):
        widen_pages(*given)  # type: ignore[arg-type]
