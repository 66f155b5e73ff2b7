"""A batch's pages in the form that FlashInfer plans with.

Shape legend: R rows, W table width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PageLists", "workspace_bytes"]


@dataclass(frozen=True)
class PageLists:
    """Where each row's pages lie in one list of them all, on the host."""

    starts: Tensor
    """int32 [R+1], cumulative counts of pages; rows without tokens list none."""
    last_lens: Tensor
    """int32 [R], keys in each row's last page; 0 where there is no page."""

    @classmethod
    def of(cls, query_start_loc: Tensor, seq_lens: Tensor, block_size: int, table_width: int) -> PageLists:
        """From the lengths on the host.

        Raises:
            ValueError: a request is longer than the block table is wide.
        """
        lens = torch.where(query_start_loc.diff() > 0, seq_lens, 0)
        pages = (lens + (block_size - 1)).div_(block_size, rounding_mode="floor")
        longest = int(pages.max()) if len(pages) else 0
        if longest > table_width:
            row = int(pages.argmax())
            raise ValueError(
                f"seq_lens[{row}] is {int(seq_lens[row])}; expected at most {table_width * block_size}, what "
                f"block_table holds ({table_width} blocks of {block_size})"
            )
        starts = torch.zeros(len(pages) + 1, dtype=torch.int32, device=pages.device)
        torch.cumsum(pages, 0, dtype=torch.int32, out=starts[1:])
        last_lens = torch.where(pages > 0, lens - (pages - 1) * block_size, 0)
        return cls(starts, last_lens.to(torch.int32))

    @property
    def num_pages(self) -> int:
        return int(self.starts[-1])


def workspace_bytes(
    *, num_heads: int, num_kv_heads: int, head_size: int, decode_rows: int, processors: int
) -> int:
    """Memory for partial results, in float32, that no plan exceeds.

    From FlashInfer's planner (``PrefillPlan``): a split batch has at most two tiles a processor, shared by
    the key-value heads, of up to 128 packed queries; in a graph of single-token decode there is room for one
    tile of 16 packed queries a row at least. Each query has ``head_size`` values and one LSE.
    """
    group = num_heads // num_kv_heads
    split = -(-2 * processors // num_kv_heads)
    graph = max(split, -(-decode_rows * group // 16) + decode_rows)
    queries = num_heads * max(split * 128, graph * 16)
    return max(32 << 20, queries * (head_size + 1) * 4 + (1 << 20))
