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
PAGES = [(3, 0), (0, 0), (0, 32), (0, 64), (2, 0), (0, 96)]
"""Row and first key of each, the last behind its row's."""


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


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
def test_pages_hold_the_keys_of_their_rows(
    shape: dict[str, Any], dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    batch = make_batch(ROWS, cache_dtype=cache_dtype, dtype=F32, **shape)
    output = poison((2, len(PAGES), N, *batch.key_cache.shape[2:]), dtype)
    assert batch.block_table is not None
    rows, firsts = map(int32, zip(*PAGES, strict=True))
    widen_pages(
        batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens, rows, firsts, output,
        k_scale=batch.k_scale, v_scale=batch.v_scale,
    )  # fmt: skip
    for place, (row, first) in enumerate(PAGES):
        for side, real in ((0, batch.keys[row]), (1, batch.values[row])):
            page, here = output[side, place], real[first : first + N].float().to(dtype)
            assert torch.equal(page[: len(here)], here), (place, side)
            assert (page[len(here) :] == 0).all(), (place, side)


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_stored_value_is_exact(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Subnormals, NaN and, of e5m2, infinities too: torch's own conversion is the reference."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(cache_dtype).view(2, 16, 1, 8)
    output = poison((2, 1, N, 1, 8), dtype)
    widen_pages(codes, codes.flip(0), int32([[1, 0]]), int32([32]), int32([0]), int32([0]), output)
    for side, stored in ((0, codes.flip(0)), (1, codes)):
        real = stored.float().to(dtype).flatten(0, 1)
        assert torch.equal(output[side, 0].isnan(), real.isnan())
        assert torch.equal(output[side, 0].nan_to_num(7.0), real.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (0, lambda x: x.float(), "key_cache.dtype is torch.float32"),
        (1, lambda x: x.view(torch.uint8).view(E5M2), "value_cache.dtype is torch.float8_e5m2"),
        (1, lambda x: x[:, :, :1], "value_cache is"),
        (2, lambda x: x.long(), "block_table is"),
        (2, lambda x: x[:1], "seq_lens is"),
        (3, lambda x: x.repeat_interleave(2)[::2], "seq_lens is"),
        (4, lambda x: x[:1], "page_rows is"),
        (5, lambda x: x.long(), "page_keys is"),
        (6, lambda x: x[..., :8], "output is"),
        (6, lambda x: x.to(E4M3), "output is"),
    ],
)
def test_other_arguments_are_refused(name: int, change: Any, words: str) -> None:
    batch = make_batch([(1, 3), (1, 3)], cache_dtype=E4M3)
    given = [
        batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens, int32([0, 1]), int32([0, 0]),
        poison((2, 2, N, *batch.key_cache.shape[2:]), F16),
    ]  # fmt: skip
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=words):
        widen_pages(*given)  # type: ignore[arg-type]
