"""Weights that are moved to huge pages: the same values, shared as before, and only what should move."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from attnbackend.host_memory import _PAGE, keep_freed_memory, move_to_huge_pages

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone has such pages")
MANY = 1 << 30


def mapped(folder: Path, *shape: int) -> nn.Parameter:
    """A weight that is a file."""
    path = folder / f"weight{len(list(folder.iterdir()))}"
    torch.randn(shape).numpy().tofile(path)
    count = torch.Size(shape).numel()
    return nn.Parameter(torch.from_file(str(path), shared=False, size=count).view(shape), requires_grad=False)


def test_weights_of_a_file_are_copied_and_stay_the_same_parameters(tmp_path: Path) -> None:
    weights = [mapped(tmp_path, 600, 1000), mapped(tmp_path, 3, 5), mapped(tmp_path, 700, 1000)]
    before = [weight.clone() for weight in weights]
    copied = move_to_huge_pages([*weights, weights[0]], MANY)
    assert copied == 600 * 1000 * 4 + 64 + 700 * 1000 * 4
    assert weights[0].data_ptr() % _PAGE == 0
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    for weight, values in zip(weights, before, strict=True):
        assert torch.equal(weight, values)
        assert weight.data_ptr() % 64 == 0
    assert move_to_huge_pages(weights, MANY) == 0


def test_copies_that_would_take_too_much_are_not_made(tmp_path: Path) -> None:
    weight = mapped(tmp_path, 600, 1000)
    address = weight.data_ptr()
    assert move_to_huge_pages([weight], 600 * 1000 * 4 - 1) == 0
    assert weight.data_ptr() == address


def test_weights_in_memory_stay_where_they_are() -> None:
    weights = [
        nn.Parameter(torch.randn(1024, 1024)),
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(0)),
    ]
    places = [(weight.data_ptr(), weight.clone()) for weight in weights]
    shared = nn.Parameter(torch.ones(8).share_memory_())
    addresses = shared.data_ptr()
    on_meta = nn.Parameter(torch.ones(8, device="meta"))
    assert move_to_huge_pages([*weights, shared, on_meta], MANY) == 0
    assert shared.data_ptr() == addresses
    for weight, (address, values) in zip(weights, places, strict=True):
        assert weight.data_ptr() == address
        assert torch.equal(weight, values)


def faults_of_an_allocation(size: int) -> int:
    from resource import RUSAGE_SELF, getrusage

    before = getrusage(RUSAGE_SELF).ru_minflt
    torch.ones(size, dtype=torch.uint8)
    return getrusage(RUSAGE_SELF).ru_minflt - before


def test_large_activations_are_kept_for_the_next_step() -> None:
    size = 50 << 20
    keep_freed_memory(4 * size)
    faults_of_an_allocation(size + (1 << 16))
    assert faults_of_an_allocation(size) < size // 4096 // 10
