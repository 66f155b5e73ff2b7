"""Every latent backend that runs on this GPU, at DeepSeek's sizes: right, also in graphs on other batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mla_cases import MLABatch, expected, make_batch

from attnbackend import AttentionSelectorConfig, CommonAttentionMetadata, resolve_backend, set_config
from attnbackend.forward_context import ForwardContext, set_forward_context
from attnbackend.impl import AttentionParams, MLADims
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import BatchLimits
from attnbackend.ops.generate import backend_op
from attnbackend.ops.library import MLA_ATTENTION
from attnbackend.selector import backend_reasons
from attnbackend.testing import assert_within_rule, assert_within_spread
from attnbackend.testing.reference_mla import LatentRequest, plain_torch_mla, reference_mla
from attnbackend.testing.rounding import float32_latent_spread

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DENSE = ["TRITON_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA"]
SPARSE = ["TRITON_MLA_SPARSE", "FLASHMLA_SPARSE"]
BF16 = torch.bfloat16
PAGES = {"FLASH_ATTN_MLA": 32}
"""Sizes of blocks where they are not 64."""
SIZES = {"rank": 512, "rope": 64, "block_size": 64, "dtype": BF16, "device": "cuda"}
DECODE = [(1, 1), (1, 64), (1, 65), (1, 1000), (1, 0), (1, 511)]
MIXED = [(3, 300), (1, 129), (0, 0), (5, 70), (2, 1), (1, 2000)]


def require(name: str, heads: int, **changes: Any) -> None:
    fields = {
        "device_type": "cuda", "head_size": 576, "kv_lora_rank": 512, "num_heads": heads, "num_kv_heads": 1,
        "dtype": BF16, "block_size": PAGES.get(name, 64), "use_mla": True, "use_sparse": name in SPARSE,
    } | changes  # fmt: skip
    if reasons := backend_reasons(name, AttentionSelectorConfig.dense(**fields)):
        pytest.skip(f"{name}: {'; '.join(map(str, reasons))}")


def sizes_of(name: str) -> dict[str, Any]:
    return SIZES | {"block_size": PAGES.get(name, 64)}


def judge(batch: MLABatch, output: torch.Tensor, lse: torch.Tensor | None) -> None:
    exact = expected(batch, torch.float64)
    if batch.query.dtype is torch.float32:
        known, hold = spread(batch), assert_within_spread
    else:
        known, hold = expected(batch, batch.query.dtype), assert_within_rule
    hold(output, exact[0], known[0])
    if lse is not None:
        hold(lse, exact[1], known[1], what="lse")


def spread(batch: MLABatch) -> tuple[torch.Tensor, torch.Tensor]:
    """How far float32 may stray: the largest errors of few rows are luck."""
    starts = batch.query_start_loc.tolist()
    requests = [
        LatentRequest(slice(*starts[i : i + 2]), rows[:, : batch.rank].cpu(), rows[:, batch.rank :].cpu())
        for i, rows in enumerate(batch.rows)
        if len(rows) and starts[i] < starts[i + 1]
    ]
    latent, rope = (q.cpu() for q in batch.queries)
    return float32_latent_spread.mqa(latent, rope, requests, scale=batch.scale)


def run(name: str, batch: MLABatch, output: torch.Tensor, lse: torch.Tensor | None, **extra: Any) -> None:
    op = backend_op(name, MLA_ATTENTION)
    assert op is not None
    op(
        *batch.queries, batch.kv_cache, output, batch.query_start_loc, batch.seq_lens, batch.block_table,
        scale=batch.scale, lse=lse, topk_indices=batch.topk_indices, k_scale=batch.k_scale, **extra,
    )  # fmt: skip


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("requests", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", DENSE + SPARSE)
def test_queries_on_latents_are_right(name: str, requests: list[tuple[int, int]], heads: int) -> None:
    require(name, heads)
    topk = {"topk": 128} if name in SPARSE else {}
    batch = make_batch(requests, heads=heads, tail=2, **sizes_of(name), **topk)
    output, lse = batch.empty_results()
    run(name, batch, output, lse)
    judge(batch, output, lse)


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("TRITON_MLA", "fp8", {"cache_dtype": torch.float8_e4m3fn, "k_scale": 0.5}),
        ("TRITON_MLA", "fp8_ds_mla", {"cache_dtype": torch.uint8}),
        ("TRITON_MLA", "auto", {"block_size": 16}),
        ("TRITON_MLA", "auto", {"dtype": torch.float32, "rank": 64, "rope": 16}),
        ("TRITON_MLA_SPARSE", "fp8_ds_mla", {"cache_dtype": torch.uint8, "topk": 128}),
        ("FLASHMLA_SPARSE", "fp8_ds_mla", {"cache_dtype": torch.uint8, "topk": 128}),
    ],
)
def test_other_caches(name: str, kind: str, changes: dict[str, Any]) -> None:
    batch = make_batch(MIXED, heads=16, **SIZES | changes)
    rank = batch.rank
    require(
        name, 16, kv_cache_dtype=kind, dtype=batch.query.dtype, block_size=batch.kv_cache.shape[1],
        kv_lora_rank=rank, head_size=batch.query.shape[-1],
    )  # fmt: skip
    output, lse = batch.empty_results()
    run(name, batch, output, lse, kv_cache_dtype=kind)
    judge(batch, output, lse)


def common_of(batch: MLABatch) -> CommonAttentionMetadata:
    starts, lens = batch.query_start_loc.cpu(), batch.seq_lens.cpu()
    return CommonAttentionMetadata.from_tensors(
        batch.query_start_loc, batch.seq_lens, batch.block_table, num_tokens=len(batch.query),
        block_size=batch.kv_cache.shape[1],
    ).replace(
        query_start_loc_cpu=starts, seq_lens_cpu=lens, max_query_len=int(starts.diff().max()),
        max_seq_len=int(lens.max()),
    )  # fmt: skip


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("name", DENSE)
def test_graphs_replay_on_other_batches(name: str, each: int) -> None:
    """Captured with a plan of one batch, replayed with that of another, in the same memory, over NaN; with
    an LSE and without, where less may be launched."""
    require(name, 128)
    made, other = (
        make_batch([(each, n) for n in lens], heads=128, seed=seed, **sizes_of(name))
        for seed, lens in enumerate([(200, 70, 513, 0), (0, 1000, 5, 6)])
    )
    page = PAGES.get(name, 64)
    table = torch.zeros(4, 1024 // page, dtype=torch.int32, device="cuda")
    cache = torch.full((2048 // page, page, 576), torch.nan, dtype=BF16, device="cuda")
    held = MLABatch(made.query.clone(), cache, made.query_start_loc, made.seq_lens.clone(), table, [], 512)
    params = AttentionParams(
        num_heads=128, num_kv_heads=1, head_size=576, scale=made.scale, dtype=BF16, kv_cache_dtype="auto",
        block_size=page, device_type="cuda", mla=MLADims(kv_lora_rank=512, qk_rope_head_dim=64),
    )  # fmt: skip
    builder = resolve_backend(name).get_builder_cls()(
        params, spec_of(params), BatchLimits(4, 4 * each, 1024), torch.device("cuda")
    )
    output, lse = held.empty_results()
    bare = torch.empty_like(output)

    def fill(batch: MLABatch) -> None:
        cache.fill_(torch.nan)
        cache[: len(batch.kv_cache)] = batch.kv_cache
        table.zero_()
        table[:, : batch.block_table.shape[1]] = batch.block_table
        held.query.copy_(batch.query)
        held.seq_lens.copy_(batch.seq_lens)
        output.fill_(torch.nan)
        bare.fill_(torch.nan)
        lse.fill_(torch.nan)

    fill(made)
    plans = {(0, name): builder.build_for_cudagraph_capture(common_of(held))}
    with set_forward_context(ForwardContext(plans=plans)):
        run(name, held, output, lse, group=0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(name, held, output, lse, group=0)
            run(name, held, bare, None, group=0)
    for batch in (other, made):
        fill(batch)
        builder.build(0, common_of(held))
        graph.replay()
        judge(batch, output, lse)
        judge(batch, bare, None)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("library", ["FLASH_ATTN", "FLASHINFER", "TRITON", "TORCH"])
def test_prompts_are_right(library: str, causal: bool) -> None:
    """Sequences without queries, without keys, with fewer keys than queries, and padding behind the last."""
    from attnbackend.backends.mla.prefill import MLAPrefillConfig, mla_prefill_reasons

    rng = torch.Generator().manual_seed(0)
    starts = [0, 150, 150, 155, 157, 160], [0, 300, 310, 310, 311, 500]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in starts)
    query, key, wide = (torch.randn(n, 16, 192, generator=rng).to("cuda", BF16) for n in (163, 500, 500))
    value = wide[..., 64:]
    if reasons := mla_prefill_reasons(library, MLAPrefillConfig.of(query, value)):
        pytest.skip(f"{library}: {'; '.join(map(str, reasons))}")
    output = torch.full((163, 16, 128), torch.nan, dtype=BF16, device="cuda")
    lse = torch.full((163, 16), torch.nan, device="cuda")
    resolve_backend("TRITON_MLA")
    with set_config(mla_prefill=library):
        torch.ops.attnbackend.triton_mla_forward_mha(
            query, key, value, output, cu_q.cuda(), cu_k.cuda(), scale=0.07, lse=lse, causal=causal
        )
    plain, exact = (
        attend.mha(query.cpu(), key.cpu(), value.cpu(), cu_q, cu_k, scale=0.07, causal=causal)
        for attend in (plain_torch_mla, reference_mla)
    )
    for what, got, e, p in zip(("output", "lse"), (output, lse), exact, plain, strict=True):
        assert_within_rule(got, e, p, what=what)
