"""Toy model runners and tokenizers for the tests of the serving loop.

The toy model's next-token logits are a function of all tokens of the request. It has them only
through its paged store, written by slot and read by block table, so that a wrong slot, a stale
page, a wrong length or position changes the answer or trips an assertion.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnbackend.runtime import EngineCore, PreparedBatch, SamplingParams
from attnbackend.runtime.block_allocator import BlockAllocator
from attnbackend.runtime.detokenizer import Tokenizer
from attnbackend.runtime.request import Request, RequestStatus

POISON = -777


def toy_logits(token_ids: list[int], vocab_size: int) -> Tensor:
    digest = hashlib.blake2b(repr(token_ids).encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randn(vocab_size, generator=generator) * 3


class ToyRunner:
    def __init__(
        self,
        vocab_size: int = 50,
        max_model_len: int = 64,
        num_blocks: int = 33,
        block_size: int = 4,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device("cpu")
        self.tokens = [POISON] * (num_blocks * block_size)
        self.positions = [POISON] * (num_blocks * block_size)
        self.num_steps = 0

    def execute(self, batch: PreparedBatch) -> Tensor:
        self.num_steps += 1
        self._check_padding(batch)
        self._write(batch)
        places = batch.logits_indices[: batch.num_sampled].tolist()
        assert places == self._places(batch)
        ends = [int(batch.query_start_loc[row + 1]) - 1 for row in batch.sampled_rows]
        backs = [end - place for end, place in zip(ends, places, strict=True)]
        rows = [self._logits(batch, row, back) for row, back in zip(batch.sampled_rows, backs, strict=True)]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def poison(self, block_ids: set[int]) -> None:
        for block in block_ids:
            for slot in range(block * self.block_size, (block + 1) * self.block_size):
                self.tokens[slot] = self.positions[slot] = POISON

    def _check_padding(self, batch: PreparedBatch) -> None:
        num_reqs = batch.num_reqs
        assert set(batch.seq_lens[num_reqs:].tolist()) <= {0}
        assert set(batch.query_start_loc[num_reqs:].tolist()) == {batch.num_tokens}
        assert not batch.block_table[num_reqs:].any()
        assert not batch.logits_indices[batch.num_sampled :].any()

    def _write(self, batch: PreparedBatch) -> None:
        ids, positions = batch.input_ids.tolist(), batch.positions.tolist()
        for token, slot in enumerate(batch.slot_mapping.tolist()):
            assert (slot >= 0) == (token < batch.num_tokens), (token, slot)
            if slot >= 0:
                assert slot >= self.block_size, f"slot {slot} is in the reserved block"
                self.tokens[slot], self.positions[slot] = ids[token], positions[token]

    def _places(self, batch: PreparedBatch) -> list[int]:
        """The last token of each sampled row; where it is there several times, those before it too."""
        times = Counter(batch.sampled_rows)
        ends = {row: int(batch.query_start_loc[row + 1]) for row in times}
        assert all(count in (1, int(ends[r] - batch.query_start_loc[r])) for r, count in times.items())
        return [place for row, count in times.items() for place in range(ends[row] - count, ends[row])]

    def _logits(self, batch: PreparedBatch, row: int, back: int = 0) -> Tensor:
        """Logits behind the row's last token, or behind one before it."""
        blocks = batch.block_table[row].tolist()
        token_ids = []
        for position in range(int(batch.seq_lens[row]) - back):
            block, offset = divmod(position, self.block_size)
            slot = blocks[block] * self.block_size + offset
            held = min(position, self.max_model_len - 1)
            assert self.positions[slot] == held, (row, position, self.positions[slot])
            token_ids.append(self.tokens[slot])
        return toy_logits(token_ids, self.vocab_size)


def greedy_reference(prompt: list[int], max_tokens: int, vocab_size: int = 50) -> list[int]:
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(int(toy_logits(token_ids, vocab_size).argmax()))
    return token_ids[len(prompt) :]


def toy_engine(
    runner: ToyRunner | None = None,
    tokenizer: Tokenizer | None = None,
    max_num_seqs: int = 64,
    budget: int = 2048,
    **options: Any,
) -> EngineCore:
    return EngineCore(
        runner or ToyRunner(),
        tokenizer,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        **options,
    )


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    params: SamplingParams
    arrives_at: int


def random_jobs(seed: int, count: int, max_len: int = 60, vocab_size: int = 50) -> list[Job]:
    rng = random.Random(seed)
    jobs = []
    for index in range(count):
        prompt_len = rng.choice([1, 2, 4, 5, 8, rng.randrange(1, max_len // 2)])
        prompt = [rng.randrange(vocab_size) for _ in range(prompt_len)]
        max_tokens = rng.randrange(1, max_len - prompt_len + 1)
        params = SamplingParams(max_tokens=max_tokens)
        if rng.random() < 0.5:
            params = replace(params, temperature=0.8, top_k=20, top_p=0.9, seed=index)
        jobs.append(Job(prompt, params, rng.randrange(0, 12)))
    return jobs


def check_invariants(engine: EngineCore) -> None:
    scheduler, allocator = engine.scheduler, engine.scheduler.allocator
    owned = [block for request in scheduler.running for block in request.block_ids]
    assert len(owned) == len(set(owned)), "a block has two owners"
    assert 0 not in owned
    assert len(owned) + allocator.num_free == allocator.num_usable
    assert all(allocator.is_owned(block) for block in owned)
    order = [r.arrival for r in [*scheduler.running, *scheduler.waiting]]
    assert order == sorted(order)
    for request in scheduler.waiting:
        assert request.status is RequestStatus.WAITING
        assert not request.block_ids
        assert request.num_computed == 0


def poison_unowned(engine: EngineCore, runner: ToyRunner) -> None:
    allocator: BlockAllocator = engine.scheduler.allocator
    runner.poison({b for b in range(runner.num_blocks) if not allocator.is_owned(b)})


def poison_step_buffers(engine: EngineCore) -> None:
    for buffer in engine.input_batch.buffers.host.values():
        buffer.fill_(POISON)


def oldest(engine: EngineCore) -> Request:
    return [*engine.scheduler.running, *engine.scheduler.waiting][0]


class ByteTokenizer:
    """One token a byte; token 256 is end-of-sequence and special. Decodes as UTF-8, lossily."""

    eos_token_id = 256

    def __init__(self) -> None:
        self.num_decoded = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        self.num_decoded += len(token_ids)
        kept = [t for t in token_ids if t < 256]
        if len(kept) < len(token_ids) and not skip_special_tokens:
            return bytes(kept).decode(errors="replace") + "<eos>"
        return bytes(kept).decode(errors="replace")


class PieceTokenizer:
    """Each token is a given string."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(text)]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self.pieces[t] for t in token_ids)


class ScriptedRunner(ToyRunner):
    """Makes the tokens of a script, by the number of tokens already generated."""

    def __init__(self, script: list[int], prompt_len: int, vocab_size: int = 300) -> None:
        super().__init__(vocab_size=vocab_size)
        self.script = script
        self.prompt_len = prompt_len

    def execute(self, batch: PreparedBatch) -> Tensor:
        logits = torch.zeros(batch.num_sampled, self.vocab_size)
        for index, row in enumerate(batch.sampled_rows):
            logits[index, self.script[int(batch.seq_lens[row]) - self.prompt_len]] = 1
        return logits
