"""Driving an exported serving step: batches of one request, prompts and greedy continuations.

Shape legend: T tokens, R requests, W block-table width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnbackend.layers import BatchTensors

ROWS, BLOCK_SIZE, WIDTH = 8, 16, 16


def batch_of(context: int, length: int, pad: int = 0, device: str = "cpu") -> tuple[Tensor, BatchTensors]:
    """Positions and batch of ``length`` tokens after ``context`` others, on shuffled pages, and padding."""
    pages = torch.tensor([5, 2, 7, 1, 8, 3, 6, 4])
    table = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
    table[0, : len(pages)] = pages
    positions = torch.arange(context, context + length)
    slots = pages[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    slots = torch.cat([slots, torch.full((pad,), -1)])
    starts = torch.full((ROWS + 1,), length, dtype=torch.int32)
    starts[0] = 0
    lens = torch.zeros(ROWS, dtype=torch.int32)
    lens[0] = context + length
    batch = BatchTensors(*(x.to(device) for x in (slots, starts, lens, table)))
    return torch.cat([positions, torch.zeros(pad, dtype=torch.int64)]).to(device), batch


def prompt_logits(step: Callable[..., Any], prompt: Sequence[int], caches: list[Tensor]) -> Tensor:
    """[T, V], of all tokens of a prompt in one step."""
    device = str(caches[0].device)
    positions, batch = batch_of(0, len(prompt), device=device)
    return step(torch.tensor(prompt, device=device), positions, positions, batch, caches)


def greedy(step: Callable[..., Any], prompt: Sequence[int], count: int, caches: list[Tensor]) -> list[int]:
    """The next ``count`` tokens, one a step. Steps of one token get one of padding beside it."""
    device = str(caches[0].device)
    tokens = [int(prompt_logits(step, prompt, caches)[-1].argmax())]
    while len(tokens) < count:
        positions, batch = batch_of(len(prompt) + len(tokens) - 1, 1, pad=1, device=device)
        ids = torch.tensor([tokens[-1], 0], device=device)
        logits = step(ids, positions, torch.zeros(1, dtype=torch.int64, device=device), batch, caches)
        tokens.append(int(logits[0].argmax()))
    return tokens
