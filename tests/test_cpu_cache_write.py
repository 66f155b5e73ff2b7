"""The C++ cache writer against torch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cpu_kernel_batches import FP8, INF, LAYOUTS, Case, empty_cache, pytestmark  # noqa: F401
from torch import Tensor

from attnbackend.kernels.cpu import (
    cache_write,
    paged_attention,
)

# ---- writing the cache ---------------------------------------------------------------------------


def all_halves(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def interesting_floats() -> Tensor:
    """Random bit patterns, every fp8 and half value, and the midpoints next to them."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).int()
    codes = [torch.arange(256).to(torch.uint8).view(dtype).float() for dtype in FP8]
    halves = all_halves(torch.float16).float()
    near = torch.cat([*codes, halves])
    steps = [near, near * (1 + 2**-4), near * (1 + 2**-3), near * 1.0625, near + 2**-10]
    nudged = [torch.nextafter(x, torch.tensor(s * INF)) for x in steps for s in (1, -1)]
    midpoints = (halves[:-1] + halves[1:]) / 2
    values = torch.cat([bits.view(torch.float32), *steps, *nudged, midpoints])
    return values[: len(values) // 64 * 64]


def stored_by_torch(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x.float() if scale is None else x.float() / scale
    if dtype in FP8:
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    nan = expected.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    assert torch.equal(got.view(as_int)[~nan], expected.view(as_int)[~nan])


SOURCES: dict[torch.dtype, Callable[[], Tensor]] = {
    torch.float32: interesting_floats,
    torch.float16: lambda: all_halves(torch.float16),
    torch.bfloat16: lambda: all_halves(torch.bfloat16),
}


@pytest.mark.parametrize("scale", [None, 0.3, 1.0, 37.5], ids=lambda s: f"scale {s}")
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16, *FP8], ids=str)
def test_conversions_equal_torch_bit_for_bit(
    source: torch.dtype, target: torch.dtype, scale: float | None
) -> None:
    x_THD = SOURCES[source]().view(-1, 1, 64)
    scales = None if scale is None else torch.tensor([scale])
    cache = torch.zeros(len(x_THD), 2, 1, 1, 64).to(target)
    slots = torch.arange(len(x_THD))
    cache_write(x_THD, x_THD, cache[:, 0], cache[:, 1], slots, k_scale=scales, v_scale=scales)
    expected = stored_by_torch(x_THD, scales, target)
    assert_same_bits(cache[:, 0, 0].contiguous(), expected)
    assert_same_bits(cache[:, 1, 0].contiguous(), expected)


@pytest.mark.parametrize("heads", [1, 16], ids=["few rows", "many rows"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FP8], ids=str)
def test_every_stored_value_reads_back_exactly(dtype: torch.dtype, heads: int) -> None:
    every = all_halves(dtype) if dtype.itemsize == 2 else torch.arange(256).byte().view(dtype)
    value_BSHD = every.view(-1, 1, 1, 64)
    key_BSHD = torch.zeros(value_BSHD.shape).to(dtype)
    count = len(value_BSHD)
    output = torch.full((count, heads, 64), INF)
    paged_attention(
        torch.zeros(count, heads, 64),
        key_BSHD,
        value_BSHD,
        output,
        torch.arange(count + 1, dtype=torch.int32),
        torch.ones(count, dtype=torch.int32),
        torch.arange(count, dtype=torch.int32).view(-1, 1),
        scale=1.0,
    )
    expected = value_BSHD.float().view(count, 1, 64).expand(count, heads, 64)
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 200])
def test_cache_write_changes_only_its_slots(layout: str, tokens: int) -> None:
    case = Case(kv_heads=3, head_size=40, value_size=24, layout=layout, poison=7.0)
    cache = empty_cache(case, 16)
    expected = cache.clone()
    slots = torch.randperm(256)[:tokens]
    slots[::5] = -1
    key, value = torch.randn(tokens, 3, 64)[..., :40], torch.randn(3, tokens, 24).transpose(0, 1)
    cache_write(key, value, cache[:, 0], cache[:, 1, ..., :24], slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 16, 0, slot % 16] = key[token]
            expected[slot // 16, 1, slot % 16, :, :24] = value[token]
    assert torch.equal(cache, expected)


def test_cache_write_uses_a_scale_for_each_head() -> None:
    key = torch.randn(4, 3, 32)
    cache = torch.zeros(2, 2, 4, 3, 32).to(FP8[0])
    k_scale, v_scale = torch.tensor([0.1, 0.2, 0.4]), torch.tensor([2.0, 3.0, 5.0])
    cache_write(key, key, cache[:, 0], cache[:, 1], torch.arange(4, 8), k_scale=k_scale, v_scale=v_scale)
    for index, scale in enumerate((k_scale, v_scale)):
        expected = stored_by_torch(key, scale.view(3, 1), FP8[0])
        assert torch.equal(cache[1, index].view(torch.uint8), expected.view(torch.uint8))


def test_hnd_cache_round_trip_uses_the_given_block_size() -> None:
    for heads in (8, 6):
        cache = torch.zeros(10, 2, heads, 16, 64).transpose(2, 3)
        key, value = torch.randn(3, heads, 64), torch.randn(3, heads, 64)
        cache_write(key, value, cache[:, 0], cache[:, 1], torch.tensor([0, 17, 159]))
        for token, (block, slot) in enumerate([(0, 0), (1, 1), (9, 15)]):
            assert torch.equal(cache[block, 0, slot], key[token])
            assert torch.equal(cache[block, 1, slot], value[token])
