"""Outputs that the Triton kernels write in float8: exactly what quantising their float32 output gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_batches import BATCHES, DEVICE, F16, F32, SINKS, Options, expected, make_batch, poison, run

from attnbackend.kernels.triton import paged_attention, takes_output_groups

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS = Options(0.4, True, 18, sinks=SINKS)


def quantized(out: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return (out / scale).clamp(-limit, limit).to(dtype)


def once_more(value: Any) -> list[Any]:
    """The last batch again, with another value of the last parameter."""
    return [pytest.param(*BATCHES[-1].values, value, id=f"{BATCHES[-1].id}, {value}")]


@pytest.mark.parametrize(
    ("kernel", "rows", "extra", "dtype"),
    [pytest.param(*batch.values, E4M3, id=batch.id) for batch in BATCHES] + once_more(E5M2),
)
def test_one_scale_for_all(kernel: Any, rows: Any, extra: Any, dtype: torch.dtype) -> None:
    batch = make_batch(rows, dtype=F32, tail=int("num_splits" in extra and kernel is paged_attention))
    scale = torch.full((1,), 0.004 if dtype == E4M3 else 2e-5, device=DEVICE)
    exact, exact_lse = run(kernel, batch, OPTIONS, **extra)
    out, lse = poison(exact.shape, dtype), poison(exact.shape[:2], F32)
    call(kernel, batch, out, lse, output_scale=scale, **extra)
    wanted = quantized(exact, scale, dtype)
    assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(lse, exact_lse)
    assert bool((out.float().abs() == torch.finfo(dtype).max).any()), "nothing saturates: a weak test"


@pytest.mark.parametrize(
    ("kernel", "rows", "extra", "group"),
    [pytest.param(*batch.values, 8, id=batch.id) for batch in BATCHES] + once_more(32),
)
def test_a_scale_for_each_group(kernel: Any, rows: Any, extra: Any, group: int) -> None:
    batch = make_batch(rows, dtype=F32)
    exact, exact_lse = run(kernel, batch, OPTIONS, **extra)
    tokens, heads, size = exact.shape
    out, lse = poison(exact.shape, E4M3), poison(exact.shape[:2], F32)
    # Rows of scales that do not follow each other in memory.
    scales = poison((tokens, heads * size // group + 3), F32)[:, : heads * size // group]
    call(kernel, batch, out, lse, output_block_scale=scales, **extra)
    groups = exact.view(tokens, -1, group)
    largest = groups.abs().amax(-1)
    wanted = largest / torch.full_like(largest, 448.0)  # On a GPU, torch multiplies by a number's reciprocal.
    assert torch.equal(scales, wanted)
    stored = quantized(groups, torch.where(wanted == 0, 1.0, wanted)[..., None], E4M3).view(exact.shape)
    assert torch.equal(out.view(torch.uint8), stored.view(torch.uint8))
    assert torch.equal(lse, exact_lse)
    assert bool((scales == 0).any()), "no row of zeros: a weak test"


@pytest.mark.parametrize(("kernel", "rows", "extra"), BATCHES[::3])
def test_half_precision_is_rounded_once(kernel: Any, rows: Any, extra: Any) -> None:
    """Not to float16 first: the exact quotient within half a step of float8, an eighth."""
    batch, scale = make_batch(rows, dtype=F16), torch.full((1,), 0.25, device=DEVICE)
    exact, _ = expected(batch, OPTIONS, torch.float64)
    out, lse = poison(tuple(exact.shape), E4M3), poison(tuple(exact.shape[:2]), F32)
    call(kernel, batch, out, lse, output_scale=scale, **extra)
    quotient = exact / 0.25
    error = (out.double() - quotient).abs()
    assert bool((error <= quotient.abs() * (2**-4 + 2**-9) + 2**-9).all()), float(error.max())


def call(kernel: Any, batch: Any, out: torch.Tensor, lse: torch.Tensor, **extra: Any) -> None:
    options = {name: value for name, value in vars(OPTIONS).items() if name != "ranges"}
    kernel(*batch.tensors(out), **options, lse=lse, **extra)


ONE = torch.ones(1, device=DEVICE)


@pytest.mark.parametrize(
    ("dtype", "scales", "message"),
    [
        (E4M3, {}, "where no scale is given"),
        (F32, {"output_scale": ONE}, "dtype of an output with scales"),
        (E4M3, {"output_scale": ONE.expand(2)}, "one torch.float32 number"),
        (E4M3, {"output_scale": ONE, "output_block_scale": ONE[None]}, "one of the two"),
        (E4M3, {"output_block_scale": torch.ones(3, 4, device=DEVICE)}, "torch.float32 \\(5, groups\\)"),
        (E4M3, {"output_block_scale": torch.ones(5, 2, device=DEVICE)}, "elements of a group is 64"),
        (E4M3, {"output_block_scale": torch.ones(5, 7, device=DEVICE)}, "elements of a group is 0"),
    ],
)
def test_what_the_kernels_refuse(dtype: torch.dtype, scales: dict[str, Any], message: str) -> None:
    batch = make_batch([(5, 21)], dtype=F32)
    with pytest.raises(ValueError, match=message):
        call(paged_attention, batch, poison((5, 4, 32), dtype), poison((5, 4), F32), **scales)


def test_which_groups_are_taken() -> None:
    assert takes_output_groups(128, 128)
    assert takes_output_groups(16, 64)
    assert not any(takes_output_groups(*sizes) for sizes in ((256, 128), (16, 80), (24, 48), (0, 64)))
