"""What is measured against what: the project's ops under a plan, and the same kernels called directly.

A side is made for a point and its inputs, and gives a function that writes the output and nothing else. One
that cannot serve a point raises `Unserved`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbackend import AttentionSelectorConfig, resolve_backend, set_config
from attnbackend.kv_cache import resolve_kv_cache_dtype, spec_of
from attnbackend.metadata import AttentionMetadata, BatchLimits
from attnbackend.ops.generate import backend_op
from attnbackend.ops.library import ATTENTION
from attnbackend.selector import backend_reasons
from benchmarks.attention_grid import Inputs, Point

__all__ = ["DIRECT", "OURS", "PLANS", "Run", "Unserved", "contenders", "flashinfer_plan", "selector_config"]

Run = Callable[[], Tensor | None]
"""Writes the output, or gives a result of as many elements that nobody copies while it is timed."""
Side = Callable[[Point, Inputs, Tensor], Run]
FLOAT8 = ("fp8", "fp8_e4m3")


PLANS: dict[tuple[int, str], AttentionMetadata] = {}
"""The plans of the point that is measured; whoever measures makes them the forward context's."""


class Unserved(Exception):
    """A side does not serve a point, because of the message."""


def through_op(name: str) -> Side:
    """The backend's op, planned by its builder as for a graph where that holds such batches."""

    def make(point: Point, inputs: Inputs, output: Tensor) -> Run:
        params = point.params
        _require(name, point)
        limits = BatchLimits(len(point.seq_lens), inputs.query.shape[0], inputs.common.max_seq_len)
        backend = resolve_backend(name)
        builder = backend.get_builder_cls()(params, spec_of(params), limits, inputs.query.device)
        plan_of = builder.build_for_cudagraph_capture if point.is_decode else _eager(builder)
        PLANS[0, name] = plan_of(inputs.common)
        op, batch, query = backend_op(name, ATTENTION), inputs.common, inputs.query
        assert op is not None
        rounds_queries = name == "FLASH_ATTN" and point.kv_cache_dtype in FLOAT8
        if rounds_queries:
            query = query.to(torch.float8_e4m3fn)  # As for the direct call.

        def run() -> None:
            op(
                query, inputs.key, inputs.value, inputs.kv_cache, output, batch.query_start_loc,
                batch.seq_lens, batch.block_table, scale=params.scale,
                kv_cache_dtype=point.kv_cache_dtype, group=0,
            )  # fmt: skip

        def permitted() -> None:
            with set_config(flash_attn_fp8=True):
                run()

        return permitted if rounds_queries else run

    return make


def _eager(builder: Any) -> Callable[[Any], Any]:
    return lambda common: builder.build(0, common)


def selector_config(point: Point) -> AttentionSelectorConfig:
    return AttentionSelectorConfig.dense(
        device_type="cuda", head_size=point.head_size, num_heads=point.num_heads,
        num_kv_heads=point.num_kv_heads, dtype=torch.bfloat16, block_size=point.block_size,
        kv_cache_dtype=point.kv_cache_dtype,
    )  # fmt: skip


def _require(name: str, point: Point) -> None:
    with set_config(flash_attn_fp8=name == "FLASH_ATTN"):
        reasons = backend_reasons(name, selector_config(point))
    if reasons:
        raise Unserved("; ".join(map(str, reasons)))


def in_float8(name: str) -> Side:
    """The backend's op, from the same query, where float8 caches may be multiplied with queries in float8."""

    def make(point: Point, inputs: Inputs, output: Tensor) -> Run:
        if point.kv_cache_dtype not in FLOAT8:
            raise Unserved("the cache is not in float8")
        others = dict(PLANS)
        with set_config(flash_attn_fp8=True):
            run = through_op(name)(point, inputs, output)
        own = dict(PLANS)
        PLANS.update(others)

        def permitted() -> None:
            kept = dict(PLANS)
            PLANS.update(own)
            with set_config(flash_attn_fp8=True):
                run()
            PLANS.update(kept)

        return permitted

    return make


def fa3_from_query(point: Point, inputs: Inputs, output: Tensor) -> Run:
    """`fa3_direct` from what our ops are given: over float8 caches the query is rounded in the time."""
    if point.kv_cache_dtype not in FLOAT8:
        raise Unserved("the query is not rounded: it is fa3_direct")
    query = inputs.query.to(torch.float8_e4m3fn)
    attend = fa3_direct(point, replace(inputs, query=query), output)

    def run() -> None:
        query.copy_(inputs.query)
        attend()

    return run


def fa3_direct(point: Point, inputs: Inputs, output: Tensor) -> Run:
    """FlashAttention 3 of vLLM's fork, with its own choice of splits and a schedule made ahead. Over float8
    caches the query is in float8 before."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata
    except ImportError as error:
        raise Unserved(f"ImportError: {error}") from None
    batch, quantized = inputs.common, point.kv_cache_dtype in FLOAT8
    query = inputs.query.to(torch.float8_e4m3fn) if quantized else inputs.query
    shape = (len(point.seq_lens), point.num_kv_heads)
    one = torch.ones(shape, device="cuda") if quantized else None
    schedule = get_scheduler_metadata(
        batch_size=shape[0], max_seqlen_q=batch.max_query_len, max_seqlen_k=batch.max_seq_len,
        num_heads_q=point.num_heads, num_heads_kv=point.num_kv_heads, headdim=point.head_size,
        cache_seqlens=batch.seq_lens, qkv_dtype=query.dtype, cu_seqlens_q=batch.query_start_loc,
        page_size=point.block_size, causal=True, num_splits=0,
    )  # fmt: skip
    key, value = inputs.kv_cache.unbind(1)

    def run() -> None:
        flash_attn_varlen_func(
            query, key, value, out=output, cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len, seqused_k=batch.seq_lens, max_seqlen_k=batch.max_seq_len,
            block_table=batch.block_table, softmax_scale=point.params.scale, causal=True,
            scheduler_metadata=schedule, num_splits=0, fa_version=3, k_descale=one, v_descale=one,
        )  # fmt: skip

    return run


def flashinfer_direct(point: Point, inputs: Inputs, output: Tensor) -> Run:
    """FlashInfer's wrapper for the phase: decode on tensor cores, or the best prefill for the device."""
    wrapper, plan = _flashinfer(point, inputs)
    plan()
    sides = tuple(inputs.kv_cache.unbind(1))
    return lambda: wrapper.run(inputs.query, sides, out=output)


def flashinfer_plan(point: Point, inputs: Inputs) -> Callable[[], None]:
    """The plan of the same wrapper."""
    return _flashinfer(point, inputs)[1]


def _flashinfer(point: Point, inputs: Inputs) -> tuple[Any, Callable[[], None]]:
    try:
        import flashinfer
    except ImportError as error:
        raise Unserved(f"ImportError: {error}") from None
    if point.head_size not in (64, 128, 256):
        raise Unserved(f"head_size={point.head_size}")
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
    indptr, indices, last = _page_lists(point, inputs)
    shape = (point.num_heads, point.num_kv_heads, point.head_size, point.block_size)
    types = {
        "q_data_type": torch.bfloat16,
        "kv_data_type": resolve_kv_cache_dtype(point.kv_cache_dtype, torch.bfloat16),
    }
    if point.is_decode:
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=indptr.cuda(),
            paged_kv_indices_buffer=indices, paged_kv_last_page_len_buffer=last.cuda(),
        )  # fmt: skip
        return decode, lambda: decode.plan(indptr, indices, last, *shape, **types)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
    starts = inputs.common.query_start_loc_cpu
    return prefill, lambda: prefill.plan(starts, indptr, indices, last, *shape, causal=True, **types)


def _page_lists(point: Point, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    counts = [-(-n // point.block_size) for n in point.seq_lens]
    indptr = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = zip(inputs.common.block_table, counts, strict=True)
    indices = torch.cat([row[:count] for row, count in rows])
    last = [n - (count - 1) * point.block_size for n, count in zip(point.seq_lens, counts, strict=True)]
    return indptr, indices, torch.tensor(last, dtype=torch.int32)


def vllm_triton(point: Point, inputs: Inputs, output: Tensor) -> Run:
    """vLLM's unified Triton kernel, with the buffers that its backend gives it for split decode."""
    try:
        from vllm.v1.attention.ops import triton_unified_attention as ops
    except ImportError as error:
        raise Unserved(f"ImportError: {error}") from None
    batch, quantized = inputs.common, point.kv_cache_dtype in FLOAT8
    key, value = inputs.kv_cache.unbind(1)
    rows, segments = 128 // point.num_kv_heads, 16
    shape = (rows, point.num_heads, segments)
    padded = 1 << (point.head_size - 1).bit_length()
    buffers = {
        "softmax_segm_output": torch.empty(*shape, padded, device="cuda"),
        "softmax_segm_max": torch.empty(shape, device="cuda"),
        "softmax_segm_expsum": torch.empty(shape, device="cuda"),
    }
    one = torch.ones(len(point.seq_lens), point.num_kv_heads, device="cuda") if quantized else None
    mode = {"kv_quant_mode": ops.KVQuantMode.FP8_PER_TENSOR} if quantized else {}

    def run() -> None:
        ops.unified_attention(
            q=inputs.query, k=key, v=value, out=output, cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len, seqused_k=batch.seq_lens, max_seqlen_k=batch.max_seq_len,
            softmax_scale=point.params.scale, causal=True, window_size=(-1, -1),
            block_table=batch.block_table, softcap=0.0, q_descale=None, k_descale=one, v_descale=one,
            seq_threshold_3D=rows, num_par_softmax_segments=segments, **buffers, **mode,
        )  # fmt: skip

    return run


OURS: dict[str, Side] = {
    name: through_op(name)
    for name in (
        "FLASH_ATTN+TRITON_ATTN", "FLASHINFER+TRITON_ATTN", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER",
        "FLEX_ATTENTION",
    )
} | {"FLASH_ATTN+TRITON_ATTN in float8": in_float8("FLASH_ATTN+TRITON_ATTN")}  # fmt: skip
DIRECT: dict[str, Side] = {
    "fa3_direct": fa3_direct,
    "fa3_from_query": fa3_from_query,
    "flashinfer_direct": flashinfer_direct,
    "vllm_triton": vllm_triton,
}


def contenders(point: Point) -> tuple[str, ...]:
    """What is chosen on Hopper, its part for decode, and the peers of which one was the fastest on an H200.

    FlashInfer gains nothing from float8 caches, and nothing on prompts over FlashAttention 3; vLLM's Triton
    kernel takes prompts several times as long. Over float8 caches FlashAttention 3 is given its query rounded
    beforehand, which is the harder peer; where that takes time at all it is also measured with it.
    """
    peers = ["fa3_direct"]
    if not point.is_decode and point.kv_cache_dtype in FLOAT8:
        peers.append("fa3_from_query")
    if point.is_decode:
        peers += ["vllm_triton"] if point.kv_cache_dtype in FLOAT8 else ["vllm_triton", "flashinfer_direct"]
    elif point.query_lens == point.seq_lens and point.kv_cache_dtype == "auto":
        peers.append("cudnn_sdpa")
    return "FLASH_ATTN+TRITON_ATTN", "TRITON_ATTN", *peers
