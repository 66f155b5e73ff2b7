from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from runtime_toys import POISON

from attnbackend.runtime import InputBatch, PreparedBatch, SamplingParams, batch_buffers
from attnbackend.runtime.request import Request
from attnbackend.runtime.scheduler import ScheduledRequest, blocks_for

MAX_REQS, MAX_TOKENS, MAX_LEN, BLOCK = 6, 40, 37, 4
WIDTH = blocks_for(MAX_LEN, BLOCK)


def make_batch(block_size: int = BLOCK) -> InputBatch:
    return InputBatch(
        max_num_seqs=MAX_REQS,
        max_num_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        block_size=block_size,
        device=torch.device("cpu"),
    )


def make_request(name: str, prompt_len: int, total: int, computed: int, blocks: list[int]) -> Request:
    token_ids = [random.Random(f"{name} {i}").randrange(1000) for i in range(total)]
    return Request(name, None, prompt_len, token_ids, SamplingParams(), 0, 0, computed, blocks)


def expected_fields(scheduled: list[ScheduledRequest]) -> dict[str, list[int] | list[list[int]]]:
    """All fields by a loop over requests and tokens."""
    ids, positions, slots, starts, lens, tables, wanted = [], [], [], [0], [], [], []
    for request, count in scheduled:
        for position in range(request.num_computed, request.num_computed + count):
            ids.append(request.token_ids[position])
            positions.append(position)
            block = request.block_ids[position // BLOCK]
            slots.append(block * BLOCK + position % BLOCK)
        starts.append(len(ids))
        lens.append(request.num_computed + count)
        tables.append(request.block_ids + [0] * (WIDTH - len(request.block_ids)))
        if lens[-1] == len(request.token_ids):
            wanted.append(len(ids) - 1)
    missing, tail = MAX_REQS - len(scheduled), MAX_TOKENS - len(ids)
    return {
        "input_ids": ids + [0] * tail,
        "positions": positions + [0] * tail,
        "slot_mapping": slots + [-1] * tail,
        "query_start_loc": starts + [len(ids)] * missing,
        "seq_lens": lens + [0] * missing,
        "block_table": tables + [[0] * WIDTH] * missing,
        "logits_indices": wanted + [0] * (MAX_REQS - len(wanted)),
    }


def check(batch: PreparedBatch, scheduled: list[ScheduledRequest]) -> None:
    for name, expected in expected_fields(scheduled).items():
        assert getattr(batch, name).tolist() == expected, name
    assert batch.query_start_loc_cpu.tolist() == batch.query_start_loc.tolist()
    assert batch.seq_lens_cpu.tolist() == batch.seq_lens.tolist()
    counts = [count for _, count in scheduled]
    assert (batch.num_reqs, batch.num_tokens) == (len(scheduled), sum(counts))
    assert batch.max_query_len == max(counts)
    assert batch.max_seq_len == max(batch.seq_lens.tolist())
    assert batch.request_ids == tuple(request.request_id for request, _ in scheduled)


@dataclass
class World:
    """Requests that come, grow, lose their blocks and go, with blocks from a shared pool."""

    rng: random.Random
    requests: list[Request] = field(default_factory=list)
    pool: list[int] = field(default_factory=lambda: list(range(1, 200)))
    num_made: int = 0

    def churn(self, batch: InputBatch) -> None:
        for request in list(self.requests):
            if self.rng.random() < 0.15 or len(request.token_ids) >= MAX_LEN - 1:
                self.requests.remove(request)
                self._forget(batch, request)
            elif self.rng.random() < 0.1:
                self._forget(batch, request)
                request.block_ids, request.num_computed = [], 0
        while len(self.requests) < MAX_REQS and self.rng.random() < 0.5:
            total = self.rng.randrange(1, 20)
            self.num_made += 1
            self.requests.append(make_request(f"r{self.num_made}", total, total, 0, []))

    def schedule(self) -> list[ScheduledRequest]:
        count = self.rng.randrange(0, len(self.requests) + 1)
        scheduled, budget = [], MAX_TOKENS
        for request in self.rng.sample(self.requests, count):
            num_tokens = min(self.rng.randrange(1, request.num_uncomputed + 1), budget)
            if num_tokens:
                self._give_blocks(request, request.num_computed + num_tokens)
                scheduled.append(ScheduledRequest(request, num_tokens))
                budget -= num_tokens
        return sorted(scheduled, key=lambda s: not s.request.is_decoding)

    def advance(self, scheduled: list[ScheduledRequest]) -> None:
        for request, num_tokens in scheduled:
            request.num_computed += num_tokens
            if not request.num_uncomputed:
                request.token_ids.append(self.rng.randrange(1000))

    def _give_blocks(self, request: Request, num_tokens: int) -> None:
        while len(request.block_ids) * BLOCK < num_tokens:
            request.block_ids.append(self.pool.pop(self.rng.randrange(len(self.pool))))

    def _forget(self, batch: InputBatch, request: Request) -> None:
        self.pool += request.block_ids
        batch.remove(request.request_id)


@pytest.fixture(params=[True, False], ids=["host memory is the device's", "memory apart"])
def is_shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the device's memory is the host's, or its own."""
    if not request.param:
        monkeypatch.setattr(batch_buffers, "device_twin", lambda host, _: torch.zeros_like(host))
    return bool(request.param)


@pytest.mark.parametrize("seed", range(4))
def test_every_field_of_random_batches_equals_a_naive_loop(seed: int, is_shared: bool) -> None:
    world, batch, num_checked = World(random.Random(seed)), make_batch(), 0
    addresses = None
    for step in range(150):
        world.churn(batch)
        scheduled = world.schedule()
        if not scheduled:
            continue
        for buffer in batch.buffers.host.values():
            buffer.fill_(POISON)
        if step % 7 == 0:
            batch.block_table.host.fill_(POISON)
            batch.invalidate()
        prepared = batch.prepare(scheduled)
        check(prepared, scheduled)
        found = [getattr(prepared, name).data_ptr() for name in expected_fields(scheduled)]
        addresses = addresses or found
        assert found == addresses, "a buffer moved"
        world.advance(scheduled)
        num_checked += 1
    assert num_checked > 80


def test_dtypes_and_sizes_are_those_of_the_contract() -> None:
    request = make_request("a", 3, 3, 0, [5])
    prepared = make_batch().prepare([ScheduledRequest(request, 3)])
    found = {name: (t.dtype, tuple(t.shape)) for name, t in vars(prepared).items() if hasattr(t, "dtype")}
    assert found == {
        "input_ids": (torch.int64, (MAX_TOKENS,)),
        "positions": (torch.int64, (MAX_TOKENS,)),
        "slot_mapping": (torch.int64, (MAX_TOKENS,)),
        "logits_indices": (torch.int64, (MAX_REQS,)),
        "query_start_loc": (torch.int32, (MAX_REQS + 1,)),
        "seq_lens": (torch.int32, (MAX_REQS,)),
        "block_table": (torch.int32, (MAX_REQS, WIDTH)),
        "query_start_loc_cpu": (torch.int32, (MAX_REQS + 1,)),
        "seq_lens_cpu": (torch.int32, (MAX_REQS,)),
        "is_prefilling_cpu": (torch.bool, (MAX_REQS,)),
    }
    assert all(getattr(prepared, n).data_ptr() % 16 == 0 for n in ("positions", "seq_lens", "input_ids"))


def test_slots_beyond_32_bits_are_exact() -> None:
    request = make_request("a", 3, 3, 0, [2**31 - 1])
    prepared = make_batch().prepare([ScheduledRequest(request, 3)])
    first = (2**31 - 1) * BLOCK
    assert prepared.slot_mapping[:3].tolist() == [first, first + 1, first + 2]


def test_host_copies_outlive_the_next_step() -> None:
    batch, request = make_batch(), make_request("a", 3, 3, 0, [5])
    first = batch.prepare([ScheduledRequest(request, 3)])
    request.num_computed = 2
    batch.prepare([ScheduledRequest(request, 1)])
    assert first.query_start_loc_cpu.tolist() == [0] + [3] * MAX_REQS
    assert first.seq_lens_cpu.tolist() == [3] + [0] * (MAX_REQS - 1)


def test_a_one_token_step_inside_the_prompt_is_no_decode() -> None:
    decode = make_request("decode", 3, 5, 4, [1, 2])
    last_chunk = make_request("last chunk", 4, 4, 3, [3])
    one_token_prompt = make_request("one token", 1, 1, 0, [4])
    recompute = make_request("recompute", 2, 9, 3, [5, 6, 7])
    requests = [decode, last_chunk, one_token_prompt, recompute]
    prepared = make_batch().prepare([ScheduledRequest(r, 1) for r in requests])
    assert prepared.is_prefilling_cpu.tolist() == [False, True, True, True] + [False] * (MAX_REQS - 4)
    assert (prepared.num_decodes, prepared.is_pure_decode) == (1, False)
    assert prepared.sampled_rows == (0, 1, 2)
    assert make_batch().prepare([ScheduledRequest(decode, 1)]).is_pure_decode


def test_more_than_the_buffers_hold_is_refused() -> None:
    many = [make_request(f"r{i}", 1, 1, 0, [i + 1]) for i in range(MAX_REQS + 1)]
    with pytest.raises(AssertionError, match="no home row"):
        make_batch().prepare([ScheduledRequest(r, 1) for r in many])
    long = [make_request(f"r{i}", 30, 30, 0, list(range(1, 9))) for i in range(2)]
    with pytest.raises(AssertionError, match=r"60, 40"):
        make_batch().prepare([ScheduledRequest(r, 30) for r in long])


def test_blocks_taken_away_without_remove_are_noticed() -> None:
    batch, request = make_batch(), make_request("a", 9, 9, 0, [1, 2, 3])
    batch.prepare([ScheduledRequest(request, 9)])
    request.block_ids = [4]
    with pytest.raises(AssertionError, match="without remove"):
        batch.prepare([ScheduledRequest(request, 1)])


def test_preparing_eight_decodes_takes_well_under_a_millisecond() -> None:
    batch = InputBatch(
        max_num_seqs=64,
        max_num_tokens=2048,
        max_model_len=8192,
        block_size=16,
        device=torch.device("cpu"),
    )
    requests = [
        Request(f"r{i}", None, 900, [1] * 901, SamplingParams(), 0, i, 900, [*range(1, 70)]) for i in range(8)
    ]
    seconds = []
    for _ in range(100):
        start = time.perf_counter()
        batch.prepare([ScheduledRequest(request, 1) for request in requests])
        seconds.append(time.perf_counter() - start)
        for request in requests:
            request.num_computed += 1
            request.token_ids.append(1)
    assert sorted(seconds)[50] < 0.3e-3


def test_steps_of_the_same_decodes_equal_a_naive_loop_without_gathering(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    batch, rng = make_batch(), random.Random(3)
    requests = [make_request(f"r{i}", 3, 4 + i, 3 + i, [*range(10 * i + 1, 10 * i + 3)]) for i in range(4)]
    scheduled, gathered = [ScheduledRequest(request, 1) for request in requests], 0
    gather = batch._gather_rows

    def counted(scheduled: list[ScheduledRequest]) -> Any:
        nonlocal gathered
        gathered += 1
        return gather(scheduled)

    monkeypatch.setattr(batch, "_gather_rows", counted)
    for _ in range(12):
        for request in requests:
            if request.num_computed == len(request.block_ids) * BLOCK:
                request.block_ids.append(100 + rng.randrange(100))
        for buffer in batch.buffers.host.values() if is_shared else ():
            buffer.fill_(POISON)
        check(batch.prepare(scheduled), scheduled)
        ids = torch.tensor([rng.randrange(1000) for _ in requests])
        batch.started(ids)
        for request, token_id in zip(requests, ids.tolist(), strict=True):
            request.num_computed += 1
            request.token_ids.append(token_id)
    assert gathered == 1


def test_a_step_that_was_not_started_is_prepared_again() -> None:
    batch, request = make_batch(), make_request("a", 3, 5, 4, [5, 6])
    scheduled = [ScheduledRequest(request, 1)]
    for _ in range(3):
        check(batch.prepare(scheduled), scheduled)
    batch.started(torch.tensor([7]))
    request.num_computed += 1
    request.token_ids.append(7)
    for _ in range(2):
        check(batch.prepare(scheduled), scheduled)
