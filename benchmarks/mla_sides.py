"""Who takes part in `benchmarks.mla`: backends through their ops, and the same libraries called directly.

A side is made for a point's inputs and gives a function that writes the output. One that cannot serve raises
`Unserved`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbackend import AttentionSelectorConfig, CommonAttentionMetadata, resolve_backend
from attnbackend.backends.mla.flashmla import attend_into, flash_mla, flash_mla_problem
from attnbackend.impl import AttentionParams, MLADims
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import AttentionMetadata, BatchLimits
from attnbackend.ops.generate import backend_op
from attnbackend.ops.library import MLA_ATTENTION
from attnbackend.selector import backend_reasons

__all__ = ["DIRECT_OF", "PLANS", "RANK", "ROPE", "SIDES", "TILES", "Inputs", "Unserved"]

RANK, ROPE = 512, 64
SCALE = (128 + ROPE) ** -0.5
PLANS: dict[tuple[int, str], AttentionMetadata] = {}
"""The plans of the point that is measured; whoever measures makes them the forward context's."""
Run = Callable[[], object]


class Unserved(Exception):
    """A side does not serve a point, because of the message."""


@dataclass(frozen=True)
class Inputs:
    """One batch."""

    query: Tensor
    """[T, H, 576]"""
    kv_cache: Tensor
    common: CommonAttentionMetadata

    @classmethod
    def of(cls, query: Tensor, kv_cache: Tensor, starts: Tensor, lens: Tensor, table: Tensor) -> Inputs:
        """starts and lens on the host."""
        common = CommonAttentionMetadata.from_tensors(
            starts.cuda(), lens.cuda(), table, num_tokens=len(query), block_size=kv_cache.shape[1]
        ).replace(
            query_start_loc_cpu=starts, seq_lens_cpu=lens, max_query_len=int(starts.diff().max()),
            max_seq_len=int(lens.max()),
        )  # fmt: skip
        return cls(query, kv_cache, common)

    def in_blocks_of(self, block_size: int) -> Inputs:
        """The same memory as smaller blocks."""
        common, each = self.common, self.kv_cache.shape[1] // block_size
        inside = torch.arange(each, device=common.block_table.device, dtype=torch.int32)
        table = (common.block_table.unsqueeze(-1) * each + inside).flatten(1)
        cache = self.kv_cache.view(-1, block_size, RANK + ROPE)
        return replace(self, kv_cache=cache, common=common.replace(block_table=table))

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        return self.query[..., :RANK], self.query[..., RANK:]

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        return self.kv_cache[..., :RANK], self.kv_cache[..., RANK:]

    def attend(self, row: int, tokens: slice, dtype: torch.dtype) -> Tensor:
        """What a request's tokens must get, computed in `dtype`."""
        assert self.common.seq_lens_cpu is not None
        length = int(self.common.seq_lens_cpu[row])
        pages = self.common.block_table[row, : -(-length // self.kv_cache.shape[1])].long()
        rows_NW = self.kv_cache[pages].flatten(0, 1)[:length].to(dtype)
        query = self.query[tokens].to(dtype)
        scores = torch.einsum("thw,nw->thn", query, rows_NW) * SCALE
        own = torch.arange(len(query), device="cuda") + length - len(query)
        unseen = torch.arange(length, device="cuda") > own.unsqueeze(1)
        weights = scores.masked_fill(unseen.unsqueeze(1), -torch.inf).softmax(-1)
        return torch.einsum("thn,nl->thl", weights, rows_NW[:, :RANK])


def in_blocks(block_size: int, make: Callable[[Inputs, Tensor], Run]) -> Callable[[Inputs, Tensor], Run]:
    """A side that reads the cache as blocks of another size."""
    return lambda inputs, output: make(inputs.in_blocks_of(block_size), output)


def through_op(name: str) -> Callable[[Inputs, Tensor], Run]:
    """The backend's op, planned by its builder as for a graph."""

    def make(inputs: Inputs, output: Tensor) -> Run:
        heads, batch = inputs.query.shape[1], inputs.common
        config = AttentionSelectorConfig.dense(
            device_type="cuda", head_size=RANK + ROPE, kv_lora_rank=RANK, num_heads=heads, num_kv_heads=1,
            dtype=torch.bfloat16, block_size=inputs.kv_cache.shape[1], use_mla=True,
        )  # fmt: skip
        if reasons := backend_reasons(name, config):
            raise Unserved("; ".join(map(str, reasons)))
        params = AttentionParams(
            num_heads=heads, num_kv_heads=1, head_size=RANK + ROPE, dtype=torch.bfloat16, scale=SCALE,
            kv_cache_dtype="auto", block_size=inputs.kv_cache.shape[1], device_type="cuda",
            mla=MLADims(kv_lora_rank=RANK, qk_rope_head_dim=ROPE),
        )  # fmt: skip
        limits = BatchLimits(batch.seq_lens.shape[0], len(inputs.query), batch.max_seq_len)
        builder = resolve_backend(name).get_builder_cls()(
            params, spec_of(params), limits, inputs.query.device
        )
        PLANS[0, name] = builder.build_for_cudagraph_capture(batch)
        op = backend_op(name, MLA_ATTENTION)
        assert op is not None
        return lambda: op(
            *inputs.parts, inputs.kv_cache, output, batch.query_start_loc, batch.seq_lens, batch.block_table,
            scale=SCALE, group=0,
        )  # fmt: skip

    return make


def kernel(**options: Any) -> Callable[[Inputs, Tensor], Run]:
    """The project's kernels without an op."""

    def make(inputs: Inputs, output: Tensor) -> Run:
        from attnbackend.kernels import triton

        batch = inputs.common
        return lambda: triton.mla_attention(
            *inputs.parts, inputs.kv_cache, output, batch.query_start_loc, batch.seq_lens, batch.block_table,
            scale=SCALE, **options,
        )  # fmt: skip

    return make


def flashinfer_direct(backend: str) -> Callable[[Inputs, Tensor], Run]:
    def make(inputs: Inputs, output: Tensor) -> Run:
        try:
            from flashinfer.mla import BatchMLAPagedAttentionWrapper
        except ImportError as error:
            raise Unserved(f"ImportError: {error}") from None
        batch = inputs.common
        starts, lens = batch.host_query_start_loc(), batch.host_seq_lens()
        pages = (lens + inputs.kv_cache.shape[1] - 1) // inputs.kv_cache.shape[1]
        kv_starts = torch.cat([pages.new_zeros(1), pages.cumsum(0)]).int()
        rows = zip(batch.block_table, pages.tolist(), strict=True)
        indices = torch.cat([row[:count] for row, count in rows])
        wrapper = BatchMLAPagedAttentionWrapper(
            torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"), backend=backend
        )
        wrapper.plan(
            starts, kv_starts, indices, lens, inputs.query.shape[1], RANK, ROPE, inputs.kv_cache.shape[1],
            batch.max_query_len > 1, SCALE, torch.bfloat16, torch.bfloat16,
        )  # fmt: skip
        return lambda: wrapper.run(*inputs.parts, *inputs.sides, out=output)

    return make


def fa3_direct(inputs: Inputs, output: Tensor) -> Run:
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise Unserved(f"ImportError: {error}") from None
    batch, (latent, rope), (values, keys) = inputs.common, inputs.parts, inputs.sides
    return lambda: flash_attn_varlen_func(
        q=rope, k=keys.unsqueeze(2), v=values.unsqueeze(2), q_v=latent, out=output,
        cu_seqlens_q=batch.query_start_loc, max_seqlen_q=batch.max_query_len, seqused_k=batch.seq_lens,
        max_seqlen_k=batch.max_seq_len, block_table=batch.block_table, softmax_scale=SCALE, causal=True,
        fa_version=3,
    )  # fmt: skip


def flash_mla_direct(inputs: Inputs, output: Tensor, *, in_graph: bool = False) -> Run:
    """With the library's schedule made ahead for the lengths of this point alone; or, as where a graph is
    replayed on other lengths, by the first of a graph's calls."""
    if problem := flash_mla_problem(("get_mla_metadata",)):
        raise Unserved(problem)
    library, batch, heads = flash_mla(), inputs.common, inputs.query.shape[1]
    query = inputs.query.view(batch.seq_lens.shape[0], -1, heads, RANK + ROPE)
    schedules: dict[bool, tuple[Any, Any]] = {}

    def run() -> None:
        inside = in_graph and torch.cuda.is_current_stream_capturing()
        if inside not in schedules:
            schedules[inside] = library.get_mla_metadata(batch.seq_lens, query.shape[1] * heads, 1)
        attend = partial(
            library.flash_mla_with_kvcache, query, inputs.kv_cache.unsqueeze(2), batch.block_table,
            batch.seq_lens, RANK, *schedules[inside], softmax_scale=SCALE, causal=True,
        )  # fmt: skip
        attend_into(output, attend, query.shape[1])

    return run


SIDES = {
    "TRITON_MLA": through_op("TRITON_MLA"),
    "FLASH_ATTN_MLA": in_blocks(32, through_op("FLASH_ATTN_MLA")),
    "FLASHINFER_MLA": through_op("FLASHINFER_MLA"),
    "FLASHMLA": through_op("FLASHMLA"),
    "flashinfer_fa3": flashinfer_direct("fa3"),
    "flashinfer_fa2": flashinfer_direct("fa2"),
    "fa3_direct": fa3_direct,
    "fa3_direct_32": in_blocks(32, fa3_direct),
    "flash_mla_direct": flash_mla_direct,
    "flash_mla_in_graph": partial(flash_mla_direct, in_graph=True),
}
DIRECT_OF = {
    "FLASH_ATTN_MLA": "fa3_direct_32",
    "FLASHINFER_MLA": "flashinfer_fa3",
    "FLASHMLA": "flash_mla_in_graph",
}


PORTABLE = ((64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 3), (16, 64, 4, 2), (16, 32, 4, 3))


def _tiles() -> dict[str, Callable[[Inputs, Tensor], Run]]:
    from attnbackend.kernels.triton.config import TileConfig

    sides = {"chosen": kernel()} | {f"{n} splits": kernel(num_splits=n) for n in (2, 4, 8, 16, 32)}
    for rows, keys, warps, stages in PORTABLE:
        name = f"portable {rows}x{keys}, {warps} warps, {stages} stages"
        sides[name] = kernel(tile=TileConfig(rows, keys, warps, stages))
    return sides


TILES = _tiles()
