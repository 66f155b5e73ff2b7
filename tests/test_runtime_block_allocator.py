from __future__ import annotations

import random
import time

import pytest

from attnbackend.runtime import BlockAllocator


def test_all_blocks_but_the_reserved_one_are_handed_out_once() -> None:
    allocator = BlockAllocator(9)
    assert allocator.num_free == allocator.num_usable == 8
    blocks = allocator.allocate(8)
    assert sorted(blocks) == list(range(1, 9))
    assert allocator.num_free == 0


def test_allocating_nothing_gives_nothing_even_when_full() -> None:
    allocator = BlockAllocator(2)
    allocator.allocate(1)
    assert allocator.allocate(0) == []


def test_allocating_more_than_is_free_is_refused_and_takes_nothing() -> None:
    allocator = BlockAllocator(4)
    with pytest.raises(AssertionError, match=r"allocate\(4\) with 3 free"):
        allocator.allocate(4)
    assert allocator.num_free == 3


def test_double_free_is_refused() -> None:
    allocator = BlockAllocator(4)
    (block,) = allocator.allocate(1)
    allocator.free([block])
    with pytest.raises(AssertionError, match="free already"):
        allocator.free([block])


@pytest.mark.parametrize("foreign", [0, -1, 4])
def test_ids_that_were_never_handed_out_are_refused(foreign: int) -> None:
    with pytest.raises(AssertionError, match=r"not one of 1\.\.3"):
        BlockAllocator(4).free([foreign])


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_cache_with_no_usable_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks}.*at least 2"):
        BlockAllocator(num_blocks)


def test_random_traffic_keeps_every_block_owned_once_or_free() -> None:
    rng, allocator, held = random.Random(0), BlockAllocator(64), []
    for _ in range(500):
        if rng.random() < 0.55 and allocator.num_free:
            held.append(allocator.allocate(rng.randrange(1, allocator.num_free + 1) % 6))
        elif held:
            allocator.free(held.pop(rng.randrange(len(held))))
        owned = [block for blocks in held for block in blocks]
        assert len(owned) == len(set(owned))
        assert len(owned) + allocator.num_free == 63


def test_cost_of_a_block_does_not_grow_with_the_cache() -> None:
    def seconds_for(num_blocks: int) -> float:
        allocator = BlockAllocator(num_blocks)
        start = time.perf_counter()
        for _ in range(2000):
            allocator.free(allocator.allocate(4))
        return time.perf_counter() - start

    seconds_for(100)
    assert min(seconds_for(1_000_000) for _ in range(3)) < 20 * seconds_for(100)
