"""FlashInfer's plan/run objects behind the two forms that the backend needs.

Shape legend: T tokens, R rows, H query heads, K key-value heads, D head size, B blocks, S block_size.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnbackend.backends.flashinfer.compiled_call import compiled_call
from attnbackend.backends.flashinfer.page_lists import PageLists, workspace_bytes
from attnbackend.impl import AttentionParams
from attnbackend.kv_cache import resolve_kv_cache_dtype
from attnbackend.native_calls import LibraryCall, new_step

__all__ = ["DecodeGraph", "EagerPlans", "Planner", "scratch_tensors", "shared_workspace"]

_INT_WORKSPACE = 1 << 20
"""Bytes of a decode graph's plan: 13 a row and tile, so 1 MiB is 40,000 rows."""


_PLANNERS: weakref.WeakSet[Planner] = weakref.WeakSet()


class Planner:
    """What is common: the library's arguments that come from the layer, and the guard of its host buffer.

    A plan writes page-locked host memory and copies it to the device later; it must not be written again
    before that has happened.
    """

    wrapper: Any

    def __init__(self, params: AttentionParams) -> None:
        self.params = params
        self._copied: torch.cuda.Event | None = None
        _PLANNERS.add(self)

    def _begin_plan(self) -> None:
        """Lets what was learned of calls under the last plan be forgotten, and waits for its copy."""
        new_step()
        if self._copied is not None:
            self._copied.synchronize()

    def _note_copy(self, device: torch.device) -> None:
        if device.type != "cuda":
            return
        if self._copied is None:
            self._copied = torch.cuda.Event()
        self._copied.record()

    def _options(self) -> dict[str, Any]:
        p = self.params
        return {
            "sm_scale": p.scale,
            "window_left": -1 if p.sliding_window is None else p.sliding_window - 1,
            "logits_soft_cap": p.logits_soft_cap,
            "q_data_type": p.dtype,
            "kv_data_type": resolve_kv_cache_dtype(p.kv_cache_dtype, p.dtype),
        }

    def run(self, query: Tensor, kv_cache: Tensor, output: Tensor, lse: Tensor | None) -> None:
        """Attention of the planned batch: query [T, H, D], output [T, H, D] and lse [T, H] contiguous."""
        sides = tuple(kv_cache.unbind(1))
        if lse is None:
            self.wrapper.run(query, sides, out=output)
        else:
            self.wrapper.run(query, sides, out=output, lse=lse, return_lse=True)

    def library_call(self, query: Tensor, kv_cache: Tensor, output: Tensor) -> LibraryCall | None:
        """What `run` of the same tensors, without LSE, amounts to."""
        key, value = kv_cache.unbind(1)
        return compiled_call(self.wrapper, query, (key, value), output)


class EagerPlans(Planner):
    """Batches of any form, outside of graphs."""

    def __init__(self, params: AttentionParams, workspace: Tensor, backend: str) -> None:
        super().__init__(params)
        import flashinfer

        self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, kv_layout="NHD", backend=backend
        )

    def plan(self, query_start_loc: Tensor, pages: PageLists, block_table: Tensor) -> None:
        """Plans the batch of ``query_start_loc`` on the host."""
        from attnbackend.kernels import triton

        p = self.params
        self._begin_plan()
        indices = torch.empty(max(1, pages.num_pages), dtype=torch.int32, device=block_table.device)
        starts = pages.starts.to(block_table.device, non_blocking=True)
        triton.gather_page_indices(block_table, starts, indices)
        self.wrapper.plan(
            query_start_loc, pages.starts, indices, pages.last_lens, p.num_heads, p.num_kv_heads,
            p.head_size, p.block_size, causal=p.causal,
            max_token_per_sequence=int(query_start_loc.diff().max()), **self._options(),
        )  # fmt: skip
        self._note_copy(block_table.device)


class DecodeGraph(Planner):
    """Batches of R rows with one token each, in memory that a CUDA graph may read.

    The first plan is the library's full one; later ones skip what only a first one needs.
    """

    def __init__(self, params: AttentionParams, workspace: Tensor, rows: int, indices: Tensor) -> None:
        super().__init__(params)
        import flashinfer

        device = workspace.device
        self._host = torch.zeros(
            2 * rows + 1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
        )
        self._lists = torch.zeros(2 * rows + 1, dtype=torch.int32, device=device)
        self._indices = indices
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, kv_layout="NHD", use_cuda_graph=True, use_tensor_cores=True, backend="fa2",
            paged_kv_indptr_buffer=self._lists[: rows + 1], paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=self._lists[rows + 1 :],
        )  # fmt: skip
        plan = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=device)
        self.wrapper.reset_workspace_buffer(workspace, plan)
        self._rows, self._is_planned = rows, False

    def plan(self, pages: PageLists, block_table: Tensor) -> None:
        from attnbackend.kernels import triton

        self._begin_plan()
        starts = self._lists[: self._rows + 1]
        self._host[: self._rows + 1] = pages.starts
        self._host[self._rows + 1 :] = pages.last_lens
        self._lists.copy_(self._host, non_blocking=True)
        triton.gather_page_indices(block_table, starts, self._indices)
        self._plan(pages)
        self._note_copy(block_table.device)

    def _plan(self, pages: PageLists) -> None:
        import flashinfer

        p = self.params
        indices = self._indices[: max(1, pages.num_pages)]
        shape = (p.num_heads, p.num_kv_heads, p.head_size, p.block_size)
        if self._is_planned:
            flashinfer.fast_decode_plan(
                self.wrapper, pages.starts, indices, pages.last_lens, *shape,
                global_override_indptr_cpu=pages.starts, **self._options(),
            )  # fmt: skip
        else:
            self.wrapper.plan(pages.starts, indices, pages.last_lens, *shape, **self._options())
            self._is_planned = True


def shared_workspace(params: AttentionParams, decode_rows: int, device: torch.device) -> Tensor:
    """Memory for partial results, one for all layers and groups that need as much."""
    needed = workspace_bytes(
        num_heads=params.num_heads, num_kv_heads=params.num_kv_heads, head_size=params.head_size,
        decode_rows=decode_rows, processors=torch.cuda.get_device_properties(device).multi_processor_count,
    )  # fmt: skip
    index = torch.cuda.current_device() if device.index is None else device.index
    return _workspace(1 << (needed - 1).bit_length(), index)


@cache
def _workspace(size: int, device_index: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=torch.device("cuda", device_index))


def scratch_tensors() -> Iterator[Tensor]:
    """Memory that plans and calls write, of the library's objects and of those here."""
    for planner in _PLANNERS:
        for owner in (planner, planner.wrapper):
            yield from (x for x in vars(owner).values() if isinstance(x, Tensor))
