from __future__ import annotations

import random

import pytest

from attnbackend.runtime import BlockAllocator, SamplingParams, Scheduler
from attnbackend.runtime.request import Request, RequestStatus
from attnbackend.runtime.scheduler import Schedule, blocks_for


def make_scheduler(
    num_blocks: int = 33, block_size: int = 4, max_num_seqs: int = 8, budget: int = 16
) -> Scheduler:
    return Scheduler(
        BlockAllocator(num_blocks),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )


def add(scheduler: Scheduler, name: str, prompt_len: int, max_tokens: int = 8) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(name, None, prompt_len, [1] * prompt_len, params, seed=0)
    scheduler.add(request)
    return request


def run_step(scheduler: Scheduler) -> Schedule:
    """Schedule, pretend that the model ran, give every request its token."""
    return complete(scheduler, scheduler.schedule())


def complete(scheduler: Scheduler, step: Schedule) -> Schedule:
    scheduler.commit(step.scheduled)
    scheduler.settle()
    for request, _ in step.scheduled:
        request.num_pending = 0
        if not request.num_uncomputed:
            request.token_ids.append(1)
            if request.num_outputs == request.params.max_tokens:
                scheduler.finish(request)
    return step


def plan(step: Schedule) -> list[tuple[str, int]]:
    return [(request.request_id, count) for request, count in step.scheduled]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_are_rounded_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 4) == blocks


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    scheduler = make_scheduler(budget=16)
    add(scheduler, "long", 40)
    assert [plan(run_step(scheduler)) for _ in range(4)] == [
        [("long", 16)],
        [("long", 16)],
        [("long", 8)],
        [("long", 1)],
    ]


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    scheduler = make_scheduler(budget=16)
    add(scheduler, "a", 3)
    assert plan(run_step(scheduler)) == [("a", 3)]
    add(scheduler, "b", 20)
    add(scheduler, "c", 5)
    assert plan(run_step(scheduler)) == [("a", 1), ("b", 15)]
    assert plan(run_step(scheduler)) == [("a", 1), ("b", 5), ("c", 5)]
    assert plan(run_step(scheduler)) == [("a", 1), ("b", 1), ("c", 1)]


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 2, max_tokens=2)
    assert plan(run_step(scheduler)) == [("a", 2), ("b", 2)]
    assert plan(run_step(scheduler)) == [("a", 1), ("b", 1)]
    assert plan(run_step(scheduler)) == [("c", 2)]


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    scheduler = make_scheduler(num_blocks=9, budget=64)
    add(scheduler, "first", 20)
    run_step(scheduler)
    add(scheduler, "large", 24)
    add(scheduler, "small", 1)
    assert plan(run_step(scheduler)) == [("first", 1)]


def test_a_newcomer_waits_while_running_requests_have_no_spare_block() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    add(scheduler, "a", 2, max_tokens=1)
    add(scheduler, "b", 3, max_tokens=1)
    assert plan(run_step(scheduler)) == [("a", 2)], "2 blocks are free: b's, and none to grow into"
    assert plan(run_step(scheduler)) == [("b", 3)]


def test_the_youngest_running_request_is_preempted_and_waits_at_the_front() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=2, budget=32)
    old, young = add(scheduler, "old", 4), add(scheduler, "young", 3)
    run_step(scheduler)
    later = add(scheduler, "later", 6)
    steps = [run_step(scheduler) for _ in range(3)]
    assert [s.preempted for s in steps] == [[], [], [young]]
    assert list(scheduler.waiting) == [young, later]
    assert young.status is RequestStatus.WAITING
    assert (young.num_computed, young.block_ids) == (0, [])
    assert young.num_outputs == 3, "the tokens generated so far are kept"
    assert plan(steps[2]) == [("old", 1)]
    while old.status is not RequestStatus.FINISHED:
        run_step(scheduler)
    assert plan(run_step(scheduler))[0] == ("young", 6), "prompt and generated tokens"


def test_a_youngest_decode_without_a_block_waits_and_keeps_its_cache() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, budget=32)
    add(scheduler, "old", 2)
    young = add(scheduler, "young", 1)
    assert plan(run_step(scheduler)) == [("old", 2), ("young", 1)]
    assert plan(run_step(scheduler)) == [("old", 1), ("young", 1)]
    held = list(young.block_ids)
    step = run_step(scheduler)
    assert (plan(step), step.preempted) == ([("old", 1)], [])
    assert (young.block_ids, young.num_computed) == (held, 2)
    assert run_step(scheduler).preempted == [young], "only once an older one needs the block"


def test_a_budget_below_the_number_of_decodes_serves_the_oldest() -> None:
    scheduler = make_scheduler(budget=2)
    for name in "abc":
        add(scheduler, name, 1, max_tokens=3)
    steps = [plan(run_step(scheduler)) for _ in range(6)]
    assert steps[:3] == [[("a", 1), ("b", 1)]] * 3
    assert steps[3:] == [[("c", 1)]] * 3


def test_a_step_that_failed_is_chosen_again() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 5)
    first = scheduler.schedule()
    free = scheduler.allocator.num_free
    assert plan(scheduler.schedule()) == plan(first)
    assert scheduler.allocator.num_free == free


def test_finishing_frees_the_blocks_of_running_and_waiting_requests() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = add(scheduler, "a", 9), add(scheduler, "b", 9)
    scheduler.schedule()
    scheduler.finish(waiting)
    scheduler.finish(running)
    assert not scheduler.has_unfinished
    assert scheduler.allocator.num_free == scheduler.allocator.num_usable


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_always_advances_the_oldest_and_ends(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks=rng.randrange(8, 20),
        max_num_seqs=rng.randrange(1, 7),
        budget=rng.randrange(1, 20),
    )
    num_left = 25
    for _ in range(5000):
        if num_left and rng.random() < 0.4:
            num_left -= 1
            prompt_len = rng.randrange(1, 16)
            add(scheduler, str(num_left), prompt_len, rng.randrange(1, 28 - prompt_len))
        if scheduler.has_unfinished:
            check_random_step(scheduler)
        elif not num_left:
            break
    assert num_left == 0
    assert not scheduler.has_unfinished
    assert scheduler.allocator.num_free == scheduler.allocator.num_usable


def check_random_step(scheduler: Scheduler) -> None:
    oldest = [*scheduler.running, *scheduler.waiting][0]
    step = scheduler.schedule()
    chosen = [request for request, _ in step.scheduled]
    assert oldest in chosen
    assert sum(count for _, count in step.scheduled) <= scheduler.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    is_prefill = [not request.is_decoding for request in chosen]
    assert is_prefill == sorted(is_prefill), "decodes first"
    for request, count in step.scheduled:
        room = len(request.block_ids) * scheduler.block_size
        assert request.num_computed + count <= room
    complete(scheduler, step)


@pytest.mark.parametrize(
    ("num_blocks", "new"),
    [(40, [[1, 1, 1], [0, 0, 0], [0, 0, 0]]), (10, [[0, 0, 1], [1, 0, 0], [0, 1, 0]])],
    ids=["plenty", "few"],
)
def test_where_there_are_plenty_all_that_soon_need_a_block_get_one_together(
    num_blocks: int, new: list[list[int]]
) -> None:
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=4, budget=32)
    requests = [add(scheduler, name, length) for name, length in (("a", 6), ("b", 5), ("c", 7))]
    run_step(scheduler)
    run_step(scheduler)
    for expected in new:
        held = [len(request.block_ids) for request in requests]
        step = run_step(scheduler)
        grown = [len(request.block_ids) - count for request, count in zip(requests, held, strict=True)]
        assert grown == expected
        assert step.has_new_blocks == any(grown)
