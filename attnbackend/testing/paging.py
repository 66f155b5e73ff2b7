"""Where the tokens of a test batch lie: a poisoned cache, and pages in an awkward order.

Shape suffixes: B blocks, S block size, K key/value heads, D head size, R rows, W table width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attnbackend.testing.cases import AttentionCase

__all__ = ["PagePlan", "PagedCase", "batch_metadata", "plan_pages", "poisoned_cache"]


class PagedCase(Protocol):
    """What the place of a batch's tokens depends on, whatever a cache holds of each."""

    @property
    def query_lens(self) -> tuple[int, ...]: ...
    @property
    def context_lens(self) -> tuple[int, ...]: ...
    @property
    def seq_lens(self) -> tuple[int, ...]: ...
    @property
    def num_padded_rows(self) -> int: ...
    @property
    def num_padded_tokens(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def spare_blocks(self) -> int: ...


@dataclass(frozen=True)
class PagePlan:
    """Which block holds which page of which request; block 0 belongs to nobody."""

    num_blocks: int
    pages: tuple[tuple[int, ...], ...]
    """Block ids of each request, in token order."""
    spare: int
    """A block that nobody owns, named by table entries past a request's last page; 0 if none."""

    def slots(self, request: int, first: int, last: int, block_size: int) -> list[int]:
        """Slots of tokens first..last-1 of a request; -1 for positions before its sequence."""
        pages = self.pages[request]
        return [
            pages[j // block_size] * block_size + j % block_size if j >= 0 else -1 for j in range(first, last)
        ]

    def block_table(self, num_rows: int) -> Tensor:
        """int32 [R, W], one column wider than the longest request; rows without a page are 0."""
        width = 1 + max((len(pages) for pages in self.pages), default=0)
        table_RW = torch.zeros(num_rows, width, dtype=torch.int32)
        for row, pages in enumerate(self.pages):
            if pages:
                table_RW[row] = self.spare
                table_RW[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return table_RW


def plan_pages(case: PagedCase, generator: torch.Generator) -> PagePlan:
    """Shuffled over all requests; no request of two pages or more has them in rising order."""
    counts = [-(-length // case.block_size) for length in case.seq_lens]
    num_blocks = 1 + sum(counts) + case.spare_blocks
    shuffled = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    pages = []
    for count in counts:
        owned, shuffled = shuffled[:count], shuffled[count:]
        pages.append(tuple(reversed(owned)) if owned == sorted(owned) else tuple(owned))
    return PagePlan(num_blocks, tuple(pages), shuffled[0] if shuffled else 0)


def batch_metadata(case: PagedCase, plan: PagePlan) -> dict[str, Tensor]:
    """query_start_loc, seq_lens and slot_mapping."""
    padding = [0] * case.num_padded_rows
    lengths = torch.tensor([0, *case.query_lens, *padding], dtype=torch.int32)
    slots: list[int] = []
    for request, length in enumerate(case.seq_lens):
        slots += plan.slots(request, case.context_lens[request], length, case.block_size)
    slots += [-1] * case.num_padded_tokens
    return {
        "query_start_loc": lengths.cumsum(0, dtype=torch.int32),
        "seq_lens": torch.tensor([*case.seq_lens, *padding], dtype=torch.int32),
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
    }


def poisoned_cache(case: AttentionCase, num_blocks: int) -> Tensor:
    """The buffer of all layers, all NaN, on the CPU: logical [B, layers, 2, S, K, D]."""
    sizes = {
        "block": num_blocks,
        "layer": case.num_layers,
        "side": 2,
        "token": case.block_size,
        "head": case.num_kv_heads,
        "element": case.head_size,
    }
    inner = ["token", "head"] if case.layout == "NHD" else ["head", "token"]
    outer = ["side", "block", "layer"] if case.kv_outermost else ["block", "layer", "side"]
    physical = [*outer, *inner, "element"]
    # Through float32: filling fp8 directly is not implemented on every device and version.
    buffer = torch.full([sizes[name] for name in physical], torch.nan)
    return buffer.to(case.cache_dtype).permute([physical.index(name) for name in sizes])
