"""Attention over a shared prefix in two parts: against float64 attention of the whole, and its plans.

Legend: T tokens, R rows, W width of the block table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_cases import DEVICE, forward_op, require
from torch import Tensor

from attnbackend import AttentionType, CommonAttentionMetadata, resolve_backend
from attnbackend.backends import cascade
from attnbackend.backends.cascade import (
    CascadeParts,
    CascadePlanner,
    CascadeThresholds,
    attend_in_parts,
    cascade_reasons,
    takes_cascade,
    use_cascade,
)
from attnbackend.forward_context import ForwardContext, set_forward_context
from attnbackend.impl import AttentionParams, OptionalTensors
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import BatchLimits
from attnbackend.testing import (
    AttentionCase,
    PagedBatch,
    assert_within_rule,
    expected_attention,
    make_batch,
    op_kwargs,
    op_positional,
    yardstick_attention,
)

PREFIX = 48
"""Tokens that the batches below share: three blocks."""
SMALL = CascadeThresholds(min_prefix_len=16, min_num_reqs=1)
"""That the small batches of these tests pass."""

BATCHES: dict[str, dict[str, Any]] = {
    "decode": {"query_lens": (1, 1, 1), "context_lens": (48, 90, 51)},
    "mixed": {"query_lens": (5, 1, 9), "context_lens": (70, 48, 50)},
    "empty_rows": {"query_lens": (0, 1, 0, 2), "context_lens": (60, 49, 0, 80)},
    "first_row_is_padding": {"query_lens": (0, 1, 1), "context_lens": (0, 49, 64)},
    "padding_requests": {"query_lens": (1, 1, 1, 1), "context_lens": (60, 48, -1, -1)},
    "padded_rows_and_tokens": {
        "query_lens": (1, 0, 3), "context_lens": (48, 48, 64), "num_padded_rows": 2, "num_padded_tokens": 3,
    },
    "only_padding_brings_tokens": {"query_lens": (1, 1, 0), "context_lens": (-1, -1, 90)},
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks_and_cap": {"use_sinks": True, "logits_soft_cap": 6.0},
    "float8_cache": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": (0.5, 0.25)},
    "hnd_strided": {"layout": "HND", "strided_tensors": True},
    "no_lse": {"lse": False},
}


def shared_batch(case: AttentionCase, device: str = "cpu", prefix: int = PREFIX) -> PagedBatch:
    """The case's batch with one row's blocks of the prefix in every row that brings tokens and has keys."""
    batch = make_batch(case, device)
    table = batch.block_table.clone()
    lens = zip(case.query_lens, case.seq_lens, strict=True)
    rows = [row for row, (query, length) in enumerate(lens) if query and length]
    for row in rows[1:]:
        table[row, : prefix // case.block_size] = table[rows[0], : prefix // case.block_size]
    return dataclasses.replace(batch, block_table=table)


def metadata(batch: PagedBatch, *, on_host: bool = False) -> CommonAttentionMetadata:
    return CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        num_reqs=len(batch.case.query_lens),
        num_actual_tokens=sum(batch.case.query_lens),
        max_query_len=max(batch.case.query_lens),
        max_seq_len=max(batch.case.seq_lens),
        query_start_loc_cpu=batch.query_start_loc.cpu() if on_host else None,
        seq_lens_cpu=batch.seq_lens.cpu() if on_host else None,
    )


def params_of(case: AttentionCase, **changes: Any) -> AttentionParams:
    params = AttentionParams(
        num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_size=case.head_size,
        dtype=case.dtype, kv_cache_dtype=case.kv_cache_dtype, block_size=case.block_size,
        device_type=DEVICE, scale=case.softmax_scale, logits_soft_cap=case.logits_soft_cap,
    )  # fmt: skip
    return dataclasses.replace(params, **changes)


def judge(batch: PagedBatch) -> None:
    exact, plain = expected_attention(batch), yardstick_attention(batch)
    assert_within_rule(batch.output.cpu(), exact[0], plain[0], what="output")
    if batch.lse is not None:
        assert_within_rule(batch.lse.cpu(), exact[1], plain[1], what="lse")


# --- the parts, over kernels of any backend --------------------------------------------------


def cpu_part(batch: PagedBatch) -> cascade.PartAttention:
    """The C++ kernel as the attention of a part, which needs to know nothing of parts."""
    from attnbackend.kernels import cpu

    def attend(part: CommonAttentionMetadata, out: Tensor, tensors: OptionalTensors, causal: bool) -> None:
        keys, values = batch.kv_cache.unbind(1)
        cpu.paged_attention(
            batch.query, keys, values, out, part.query_start_loc, part.seq_lens, part.block_table,
            scale=batch.case.softmax_scale, causal=causal, logits_soft_cap=batch.case.logits_soft_cap,
            sinks=tensors.sinks, k_scale=tensors.k_scale, v_scale=tensors.v_scale, lse=tensors.lse,
        )  # fmt: skip

    return attend


def run_in_parts(batch: PagedBatch, parts: CascadeParts) -> None:
    tensors = OptionalTensors(
        lse=batch.lse, sinks=batch.sinks, k_scale=batch.k_scale, v_scale=batch.v_scale
    )  # fmt: skip
    attend_in_parts(cpu_part(batch), parts, batch.output, tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", BATCHES)
def test_parts_together_are_attention_over_the_whole(name: str, feature: str, dtype: torch.dtype) -> None:
    require("CPU_ATTN", device_type="cpu")
    batch = shared_batch(AttentionCase(dtype=dtype, **BATCHES[name], **FEATURES[feature]))
    run_in_parts(batch, CascadePlanner(16, None, torch.device("cpu")).split(PREFIX, metadata(batch)))
    judge(batch)


@pytest.mark.parametrize("prefix", [0, 15, 16, 47, 49])
def test_a_prefix_is_rounded_down_to_whole_blocks(prefix: int) -> None:
    require("CPU_ATTN", device_type="cpu")
    batch = shared_batch(AttentionCase(dtype=torch.float16, **BATCHES["mixed"]))
    parts = CascadePlanner(16, None, torch.device("cpu")).split(prefix, metadata(batch))
    assert parts.prefix.seq_lens.tolist() == [prefix // 16 * 16] == [parts.prefix.max_seq_len]
    run_in_parts(batch, parts)
    judge(batch)


def test_the_prefix_is_read_from_one_row_alone() -> None:
    """Every other row's blocks of the prefix are out of bounds, and nobody follows them."""
    require("CPU_ATTN", device_type="cpu")
    batch = shared_batch(AttentionCase(dtype=torch.float16, **BATCHES["mixed"]))
    parts = CascadePlanner(16, None, torch.device("cpu")).split(PREFIX, metadata(batch))
    batch.block_table[:, :3] = 2**30
    run_in_parts(batch, parts)
    batch.block_table[:, :3] = parts.prefix.block_table[:, :3]
    judge(batch)


def test_with_limits_every_split_lies_at_the_same_addresses() -> None:
    planner = CascadePlanner(16, BatchLimits(4, 32, 160), torch.device("cpu"))
    seen = set()
    for name in ("decode", "padding_requests", "mixed"):
        batch = shared_batch(AttentionCase(dtype=torch.float16, **BATCHES[name]))
        for prefix in (PREFIX, 16):
            for part in planner.split(prefix, metadata(batch)):
                tensors = part.query_start_loc, part.seq_lens, part.block_table
                seen |= {x.data_ptr() for x in tensors if x is not batch.query_start_loc}
    assert len(seen) == 5


def test_what_a_graph_holds_is_refilled_whole() -> None:
    """A long prefix after a short one leaves nothing of the last step's table behind."""
    planner = CascadePlanner(16, BatchLimits(4, 32, 160), torch.device("cpu"))
    batch = shared_batch(AttentionCase(dtype=torch.float16, **BATCHES["mixed"]))
    planner.split(16, metadata(batch))
    parts = planner.split(PREFIX, metadata(batch))
    width = batch.block_table.shape[1]
    assert torch.equal(parts.suffix.block_table[:, : width - 3], batch.block_table[:, 3:])
    assert not parts.suffix.block_table[:, width - 3 :].any()
    assert parts.suffix.seq_lens.tolist() == [75 - 48, 49 - 48, 59 - 48]


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prefix", "message"),
    [
        ("mixed", 64, "request 1 has 48 tokens of context; all of the prefix must be context"),
        ("mixed", 16 * 99, r"common_prefix_len is 99 blocks of 16; expected 0 to \d+"),
        ("mixed", -1, "common_prefix_len is -1 blocks"),
    ],
)
def test_a_prefix_that_is_not_context_is_refused(name: str, prefix: int, message: str) -> None:
    batch = shared_batch(AttentionCase(dtype=torch.float16, **BATCHES[name]))
    with pytest.raises(ValueError, match=message):
        CascadePlanner(16, None, torch.device("cpu")).split(prefix, metadata(batch, on_host=True))


def test_padding_between_requests_is_refused() -> None:
    case = AttentionCase(dtype=torch.float16, query_lens=(1, 1, 1), context_lens=(48, -1, 50))
    with pytest.raises(ValueError, match="request 2 comes after a padding request"):
        CascadePlanner(16, None, torch.device("cpu")).split(
            48, metadata(shared_batch(case), on_host=True)
        )  # fmt: skip


def test_a_batch_beyond_the_limits_is_refused() -> None:
    batch = shared_batch(AttentionCase(dtype=torch.float16, **BATCHES["mixed"]))
    planner = CascadePlanner(16, BatchLimits(2, 32, 160), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"limits allow \(2, 10\)"):
        planner.split(16, metadata(batch))


# --- when to cut ----------------------------------------------------------------------------

CASE = AttentionCase(dtype=torch.float16, **BATCHES["decode"])
LARGE: dict[str, Any] = {"common_prefix_len": 1 << 20, "num_reqs": 256, "max_query_len": 1}


@pytest.mark.parametrize(
    ("params", "step", "field"),
    [
        ({"sliding_window": 9}, {}, "sliding_window"),
        ({"attention_chunk_size": 9}, {}, "attention_chunk_size"),
        ({"causal": False}, {}, "causal"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, {}, "attn_type"),
        ({"dtype": torch.float32}, {}, "dtype"),
        ({}, {"common_prefix_len": 15}, "common_prefix_len"),
        ({}, {"num_reqs": 1}, "num_reqs"),
        ({}, {"max_query_len": 4096}, "max_query_len"),
    ],
)
def test_each_reason_against_a_cascade_is_named(
    params: dict[str, Any], step: dict[str, Any], field: str
) -> None:
    reasons = cascade_reasons(params_of(CASE, **params), **{**LARGE, **step})
    assert [reason.field for reason in reasons] == [field]
    assert not use_cascade(params_of(CASE, **params), **{**LARGE, **step})


def test_a_long_prefix_of_many_requests_is_cut() -> None:
    assert cascade_reasons(params_of(CASE), **LARGE) == []
    assert use_cascade(params_of(CASE), **LARGE)


def test_thresholds_count_whole_blocks() -> None:
    step: dict[str, Any] = {"num_reqs": 2, "max_query_len": 1}
    thresholds = CascadeThresholds(min_prefix_len=33, min_num_reqs=2)
    assert not use_cascade(params_of(CASE), 47, **step, thresholds=thresholds)
    assert use_cascade(params_of(CASE), 48, **step, thresholds=thresholds)


def test_tensors_that_count_positions_keep_a_call_whole() -> None:
    some = torch.zeros(1)
    assert takes_cascade(OptionalTensors(sinks=some, k_scale=some))
    assert not takes_cascade(OptionalTensors(alibi_slopes=some))
    assert not takes_cascade(OptionalTensors(bidirectional_ranges=some))


# --- TRITON_ATTN -----------------------------------------------------------------------------


def triton_builder(case: AttentionCase, limits: BatchLimits | None, **changes: Any) -> Any:
    params = params_of(case, **changes)
    cls = resolve_backend("TRITON_ATTN").get_builder_cls()
    builder: Any = cls(params, spec_of(params), limits, torch.device(DEVICE))
    builder.cascade_thresholds = SMALL
    return builder


def call_op(batch: PagedBatch, plan: Any) -> None:
    with set_forward_context(ForwardContext({(0, "TRITON_ATTN"): plan})):
        forward_op("TRITON_ATTN")(*op_positional(batch), **op_kwargs(batch), group=0)


def kernel_batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(kernel, rows) of each call of a Triton attention kernel from now on."""
    from attnbackend.kernels import triton

    called: list[tuple[str, int]] = []

    def spy(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            called.append((name, len(args[5])))
            kernel(*args, **kwargs)

        return run

    for name in ("paged_attention", "paged_decode_attention"):
        monkeypatch.setattr(triton, name, spy(name, getattr(triton, name)))
    return called


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", BATCHES)
def test_triton_serves_a_plan_in_parts(name: str, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require("TRITON_ATTN", torch.float16)
    case = AttentionCase(dtype=torch.float16, **BATCHES[name], **FEATURES[feature])
    batch = shared_batch(case, DEVICE)
    called = kernel_batches(monkeypatch)
    call_op(batch, triton_builder(case, None).build(PREFIX, metadata(batch)))
    judge(batch)
    one_a_row = max(case.query_lens) == 1 and batch.query.shape[0] <= case.num_rows
    suffix = "paged_decode_attention" if one_a_row else "paged_attention"
    assert called == [("paged_attention", 1), (suffix, case.num_rows)]


def test_alibi_keeps_a_call_whole_whatever_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    require("TRITON_ATTN", torch.float16)
    case = AttentionCase(dtype=torch.float16, use_alibi=True, **BATCHES["mixed"])
    batch = shared_batch(case, DEVICE)
    called = kernel_batches(monkeypatch)
    call_op(batch, triton_builder(case, None).build(PREFIX, metadata(batch)))
    judge(batch)
    assert called == [("paged_attention", 3)]


def test_only_a_full_build_for_a_shared_prefix_cuts() -> None:
    case = AttentionCase(dtype=torch.float16, **BATCHES["decode"])
    common = metadata(shared_batch(case, DEVICE))
    builder = triton_builder(case, None)
    assert builder.build(PREFIX, common).cascade is not None
    assert builder.build(0, common).cascade is None
    assert builder.build(PREFIX, common, fast_build=True).cascade is None
    assert builder.build_for_cudagraph_capture(common).cascade is None
    assert triton_builder(case, None, sliding_window=4).build(PREFIX, common).cascade is None
    builder.cascade_thresholds = cascade.DEFAULT_THRESHOLDS
    assert builder.build(PREFIX, common).cascade is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_graph_over_parts_replays_other_batches_and_prefixes(dtype: torch.dtype) -> None:
    rows, width = 4, 24
    case = AttentionCase(dtype=dtype, use_sinks=True, query_lens=(1,) * rows, context_lens=(300,) * rows)
    held = shared_batch(case, DEVICE, 256)
    table = torch.zeros(rows, width, dtype=torch.int32, device=DEVICE)
    cache = held.kv_cache.new_full((256, *held.kv_cache.shape[1:]), torch.nan)
    builder = triton_builder(case, BatchLimits(rows, rows, width * 16))

    def fill(batch: PagedBatch) -> PagedBatch:
        table.zero_()[:, : batch.block_table.shape[1]].copy_(batch.block_table)
        cache[: len(batch.kv_cache)].copy_(batch.kv_cache)
        held.query.copy_(batch.query)
        held.query_start_loc.copy_(batch.query_start_loc)
        held.seq_lens.copy_(batch.seq_lens)
        assert held.sinks is not None
        assert batch.sinks is not None
        held.sinks.copy_(batch.sinks)
        written = {"key": batch.key, "value": batch.value, "slot_mapping": batch.slot_mapping}
        return dataclasses.replace(held, kv_cache=cache, block_table=table, case=batch.case, **written)

    def build(batch: PagedBatch, prefix: int) -> Any:
        return builder.build(prefix, metadata(batch).replace(max_query_len=1, max_seq_len=width * 16))

    now = fill(held)
    plan = build(now, 256)
    call_op(now, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call_op(now, plan)
    for seed, (prefix, contexts) in enumerate(
        [(48, (48, 60, 300, 49)), (256, (300, 256, -1, -1)), (16, (16, 16, 17, 300))]
    ):
        other = AttentionCase(
            dtype=dtype, use_sinks=True, query_lens=(1,) * rows, context_lens=contexts, seed=seed
        )
        now = fill(shared_batch(other, DEVICE, prefix))
        assert build(now, prefix).cascade is not None
        now.poison_outputs()
        graph.replay()
        judge(now)
