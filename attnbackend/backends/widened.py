"""Float8 caches for prompt backends that read none: pages of a step's prompts, widened to the query's type.

A copy is made for each layer in turn, of all keys of the requests that bring prompts, in pages of its own. It
costs 3 bytes of memory traffic an element; decode, which reads each key once, is never served so. The decode
backend reads the copy, too, of prompts on which it leads.

Shape legend: R rows, W table width, P pages of the copy, S block_size, K key-value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnbackend.backend import AttentionBackend
from attnbackend.config import widened_bytes
from attnbackend.impl import AttentionParams, OptionalTensors
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import BatchLimits, CommonAttentionMetadata

__all__ = ["FLOAT8", "PAGE", "WidenedBuilder", "WidenedPlan", "attend_copy", "widened_params", "widens"]

PAGE = 128
"""Slots of a page of the copy: as many as FlashAttention 3 reads at once."""
FLOAT8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
_WORTH = 96
"""Queries of a key-value head, in the mean over all keys, from which on a copy pays: measured on an H200."""
_FIXED_KEYS = 3072
"""Keys whose copy takes as long as the launches that come with any."""
_ROUNDED_LEADS = {64: 16384}
"""Head size -> keys of the longest request beyond which a prompt backend that may round its queries to float8
takes less time so than over a copy. Measured on an H200."""


def widens(prefill: type[AttentionBackend], kv_cache_dtype: str) -> bool:
    """Whether a prompt backend is given such a cache widened: it reads none, or rounds its queries for it."""
    if kv_cache_dtype not in FLOAT8 or not _reads_copies(prefill):
        return False
    return _rounds(prefill, kv_cache_dtype) or not prefill.supports_kv_cache_dtype(kv_cache_dtype)


def _rounds(prefill: type[AttentionBackend], kv_cache_dtype: str) -> bool:
    reads = prefill.supports_kv_cache_dtype(kv_cache_dtype)
    return reads and prefill.query_dtype(kv_cache_dtype) is not None


def _reads_copies(backend: type[AttentionBackend]) -> bool:
    return (
        backend.supports_kv_cache_dtype("auto")
        and backend.supports_block_size(PAGE)
        and backend.get_kv_cache_shape(7, PAGE, 3, 64) == (7, 2, PAGE, 3, 64)
    )


def widened_params(params: AttentionParams) -> AttentionParams:
    """The layer as a backend sees it that is given the copy."""
    return replace(params, kv_cache_dtype="auto", block_size=PAGE, clean_pages=True)


@dataclass(frozen=True, kw_only=True)
class WidenedPlan:
    """A plan over a copy, and where its pages come from."""

    plan: Any
    part: int
    """Whose plan: 0 is the prompt backend, 1 the decode backend, on batches of prompts on which it leads."""
    source: CommonAttentionMetadata
    page_rows: Tensor
    """int32 [P], whose keys a page of the copy holds."""
    page_keys: Tensor
    """int32 [P], the first of them."""


class WidenedBuilder:
    """Plans prompts over a copy of their keys, where that pays and takes no more than `widened_bytes`.

    A prompt backend that may round its queries is left to it where that takes less time.
    """

    def __init__(
        self, parts: tuple[type[AttentionBackend], ...], params: AttentionParams, limits: BatchLimits | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        own = self._params = widened_params(params)
        self._device = device
        self._builders = [
            part.get_builder_cls()(own, spec_of(own), limits, device) for part in parts if _reads_copies(part)
        ]
        self._rounding = None
        if _rounds(parts[0], params.kv_cache_dtype):
            self._rounding = parts[0].get_builder_cls()(params, spec_of(params), limits, device)

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool) -> Any:
        """A `WidenedPlan`, a plan of the prompt backend's over the cache itself, or None: neither pays."""
        import numpy as np

        starts, lens = common.query_start_loc_cpu, common.seq_lens_cpu
        if starts is None or lens is None or self._params.attn_type.keeps_no_cache:
            return None
        queries = np.diff(starts.numpy()).astype(np.int64)
        keys = np.where(queries > 0, lens.numpy(), 0).astype(np.int64)
        if not self._pays(queries, keys):
            return None
        p, pages = self._params, -(-keys // PAGE)
        room = _room(int(pages.sum()), p.num_kv_heads, p.head_size) * p.dtype.itemsize
        is_bounded = room > widened_bytes()
        if self._rounding and (is_bounded or keys.max() > _ROUNDED_LEADS.get(p.head_size, math.inf)):
            return self._rounding.build(common_prefix_len, common, fast_build)
        if is_bounded:
            return None
        table, rows, first_keys = self._place(pages)
        own = common.replace(block_table=table)
        part = int(any(builder.leads_on_prompts(own) for builder in self._builders[1:]))
        plan = self._builders[part].build(common_prefix_len, own, fast_build)
        return WidenedPlan(plan=plan, part=part, source=common, page_rows=rows, page_keys=first_keys)

    def _pays(self, queries: Any, keys: Any) -> bool:
        """Whether enough queries see each key: what is won grows with both, the copy with the keys alone."""
        import numpy as np

        p = self._params
        reach = p.sliding_window or p.attention_chunk_size
        seen = keys if reach is None else np.minimum(keys, queries + reach)
        group = p.num_heads // p.num_kv_heads
        return bool(group * (queries * seen).sum() >= _WORTH * (keys.sum() + _FIXED_KEYS))

    def _place(self, pages: Any) -> tuple[Tensor, ...]:
        """The copy's block table, and row and first key of each page; on their way to the device."""
        import numpy as np

        total, begins = int(pages.sum()), pages.cumsum() - pages
        # What is behind a row's last page is not read, but is a page.
        table = np.minimum(begins[:, None] + np.arange(max(1, pages.max())), max(0, total - 1))
        rows = np.repeat(np.arange(len(pages)), pages)
        first_keys = (np.arange(total) - begins[rows]) * PAGE
        packed = torch.from_numpy(np.concatenate([table.ravel(), rows, first_keys]).astype(np.int32))
        if self._device.type == "cuda":
            packed = packed.pin_memory().to(self._device, non_blocking=True)
        flat, *of_pages = packed.split([table.size, total, total])
        return flat.view(table.shape), *of_pages


def _room(pages: int, heads: int, size: int) -> int:
    """Elements of a copy's memory: a power of two, so that copies of a growing prompt share a few pieces."""
    return 1 << (2 * pages * PAGE * heads * size - 1).bit_length()


def attend_copy(
    attend: Callable[..., None], plan: WidenedPlan, dtype: torch.dtype, query: Tensor, kv_cache: Tensor,
    output: Tensor, tensors: OptionalTensors,
) -> None:  # fmt: skip
    """Lets ``attend``, with the arguments of an `AttentionImpl.forward`, read a copy of the plan's pages.

    New keys and values are in the copy, and scales in its elements: none of them is given.
    """
    copy = widened_cache(kv_cache, plan, dtype, tensors)
    unscaled = tensors._replace(k_scale=None, v_scale=None)
    attend(query, None, None, copy, plan.plan, output, unscaled)


def widened_cache(
    kv_cache: Tensor, plan: WidenedPlan, dtype: torch.dtype, tensors: OptionalTensors
) -> Tensor:
    """[P, 2, PAGE, K, D]: keys and values of the plan's requests, times their scales."""
    from attnbackend.kernels import triton

    keys, values = kv_cache.unbind(1)
    pages, (heads, size) = len(plan.page_rows), keys.shape[2:]
    room = keys.new_empty(_room(pages, heads, size), dtype=dtype)
    copy = room[: 2 * pages * PAGE * heads * size].view(2, pages, PAGE, heads, size)
    triton.widen_pages(
        keys, values, plan.source.block_table, plan.source.seq_lens, plan.page_rows, plan.page_keys, copy,
        k_scale=tensors.k_scale, v_scale=tensors.v_scale,
    )  # fmt: skip
    return copy.transpose(0, 1)
