"""FLASHINFER: page lists, plans, and on a GPU the library itself; without one, over a stand-in."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from library_fakes import FakeFlashInferBackend, fake_flashinfer
from op_cases import BATCHES, case, forward_op

from attnbackend import AttentionSelectorConfig, CommonAttentionMetadata, resolve_backend
from attnbackend.backends.flashinfer import planning
from attnbackend.backends.flashinfer.backend import FlashInferBackend
from attnbackend.backends.flashinfer.page_lists import PageLists, workspace_bytes
from attnbackend.backends.flashinfer.planning import FlashInferMetadataBuilder, prefill_kernel
from attnbackend.forward_context import ForwardContext, set_forward_context
from attnbackend.impl import AttentionParams
from attnbackend.kernels import triton as kernels
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import BatchLimits
from attnbackend.selector import backend_reasons
from attnbackend.testing import assert_attention_within_rule, make_batch, op_kwargs, op_positional
from attnbackend.testing.conformance import check_backend, open_subject

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available() or kernels.unavailable_reason("cpu") is not None,
    reason="needs Triton's interpreter",
)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The stand-in for the module, with a workspace that no kernel needs."""
    module = fake_flashinfer()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(planning, "shared_workspace", lambda *_: torch.zeros(16, dtype=torch.uint8))
    return module


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# --- page lists and memory --------------------------------------------------------------------


def test_pages_are_listed_row_after_row():
    pages = PageLists.of(ints(0, 1, 4, 5, 6), ints(16, 17, 0, 33), 16, table_width=4)
    assert pages.starts.tolist() == [0, 1, 3, 3, 6]
    assert pages.last_lens.tolist() == [16, 1, 0, 1]
    assert (pages.starts.dtype, pages.last_lens.dtype) == (torch.int32, torch.int32)


def test_rows_without_tokens_list_no_pages():
    pages = PageLists.of(ints(0, 0, 2), ints(40, 5), 16, table_width=4)
    assert (pages.starts.tolist(), pages.last_lens.tolist()) == ([0, 0, 1], [0, 5])


def test_a_request_longer_than_the_table_is_refused():
    with pytest.raises(ValueError, match=r"seq_lens\[1\] is 65; expected at most 64.*4 blocks of 16"):
        PageLists.of(ints(0, 1, 2), ints(3, 65), 16, table_width=4)


def test_no_rows_are_no_pages():
    assert PageLists.of(ints(0), ints(), 16, table_width=4).num_pages == 0


@pytest.mark.parametrize(
    ("heads", "size", "rows", "floor_mib"), [(32, 128, 64, 66), (64, 128, 256, 193), (32, 128, 4096, 1289)]
)
def test_the_workspace_holds_what_the_planner_may_ask_for(heads, size, rows, floor_mib):
    """Floors by hand: heads * 516 bytes * queries of all tiles: 33 * 128, 383 * 16 and 5119 * 16."""
    got = workspace_bytes(
        num_heads=heads, num_kv_heads=8, head_size=size, decode_rows=rows, processors=132
    )  # fmt: skip
    assert floor_mib << 20 <= got < (floor_mib + 4) << 20


@pytest.mark.parametrize(
    ("tokens", "requests", "changes", "kernel"),
    [
        (64, 64, {}, "fa2"),
        (256, 64, {}, "fa2"),
        (8192, 1, {}, "auto"),
        (8192, 1, {"is_quantized": True}, "fa2"),
        (8192, 1, {"windowed": True}, "auto"),
        (8192, 1, {"windowed": True, "causal": False}, "fa2"),
    ],
)
def test_short_queries_pack_their_group(tokens, requests, changes, kernel):
    options = {"is_quantized": False, "causal": True, "windowed": False, **changes}
    assert prefill_kernel(tokens, requests, **options) == kernel


# --- plans ------------------------------------------------------------------------------------


LIMITS = BatchLimits(8, 64, 256)


def _builder(limits: BatchLimits | None = LIMITS) -> FlashInferMetadataBuilder:
    params = AttentionParams(
        num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.float16, kv_cache_dtype="auto", block_size=16,
        device_type="cpu", scale=0.125,
    )  # fmt: skip
    return FlashInferMetadataBuilder(params, spec_of(params), limits, torch.device("cpu"))


def _batch(query_lens: list[int], seq_lens: list[int], **changes: Any) -> CommonAttentionMetadata:
    starts = ints(0, *query_lens).cumsum(0, dtype=torch.int32)
    lens = ints(*seq_lens)
    fields: dict[str, Any] = {
        "query_start_loc": starts, "seq_lens": lens,
        "block_table": torch.arange(len(lens) * 16, dtype=torch.int32).view(-1, 16), "num_reqs": len(lens),
        "num_actual_tokens": sum(query_lens), "max_query_len": max(query_lens), "max_seq_len": max(seq_lens),
        "query_start_loc_cpu": starts, "seq_lens_cpu": lens, **changes,
    }  # fmt: skip
    return CommonAttentionMetadata(**fields)


@needs_interpreter
def test_a_graph_is_planned_in_full_once_and_then_fast_in_the_same_memory(library):
    builder = _builder()
    captured = builder.build_for_cudagraph_capture(_batch([1, 1, 1], [5, 40, 16])).planner
    again = builder.build(0, _batch([1, 1, 1], [0, 2, 100])).planner
    assert captured is again
    (wrapper,) = library.made
    assert wrapper.plans == 2
    assert wrapper.options["paged_kv_indptr_buffer"].tolist() == [0, 0, 1, 8]
    assert wrapper.options["paged_kv_indices_buffer"][:8].tolist() == [16, *range(32, 39)]


@needs_interpreter
def test_batches_that_no_graph_was_captured_for_are_planned_apart(library):
    builder = _builder()
    graph = builder.build_for_cudagraph_capture(_batch([1, 1, 1], [5, 40, 16])).planner
    for other in (_batch([1, 1], [5, 6]), _batch([1, 2, 1], [5, 6, 7]), _batch([1, 1, 0], [5, 6, 0])):
        assert builder.build(0, other).planner not in (graph, None)
    assert builder.build(0, _batch([0, 0], [5, 6], max_query_len=1)).planner is None, "nothing to do"


@needs_interpreter
def test_only_single_tokens_are_captured(library):
    with pytest.raises(ValueError, match=r"one token a row.*query lengths are \[1, 2\]"):
        _builder().build_for_cudagraph_capture(_batch([1, 2], [5, 6]))
    with pytest.raises(ValueError, match="limits=None"):
        _builder(None).build_for_cudagraph_capture(_batch([1, 1], [5, 6]))


@needs_interpreter
def test_the_backend_over_the_stand_in_keeps_its_claims(library):
    report = check_backend(FakeFlashInferBackend, quick=True, only=["plan", "padding", "lse", "refusal"])
    report.assert_ok()


@needs_interpreter
@pytest.mark.parametrize("feature", ["fp8_e5m2", "fp8_per_head_scales", "sinks", "window", "no_lse"])
def test_scales_and_sinks_that_the_kernels_lack_are_applied(library, feature):
    asked = case(feature, dtype=torch.float16)
    with open_subject(FakeFlashInferBackend) as subject:
        batch = subject.batch(asked)
        subject.run_forward(batch)
    assert_attention_within_rule(batch)


def test_a_window_with_a_soft_cap_is_refused():
    asked = AttentionSelectorConfig.dense(
        device_type="cuda", compute_capability=(9, 0), head_size=128, num_heads=8, num_kv_heads=2,
        dtype=torch.bfloat16, sliding_window=128, logits_soft_cap=30.0,
    )  # fmt: skip
    (reason,) = FlashInferBackend.validate_configuration(asked)
    assert str(reason).startswith("logits_soft_cap=30.0 (allowed: 0.0 with a window")


def test_unclaimed_layers_are_refused_with_the_value():
    asked = AttentionSelectorConfig.dense(
        device_type="cuda", compute_capability=(9, 0), head_size=96, num_heads=8, num_kv_heads=2,
        dtype=torch.bfloat16, block_size=16, has_alibi=True, kv_cache_dtype="float16",
    )  # fmt: skip
    text = "\n".join(map(str, backend_reasons("FLASHINFER", asked)))
    for part in ("head_size=96 (allowed: 64, 128, 256)", "has_alibi=True", "kv_cache_dtype=float16"):
        assert part in text


# --- the library itself -----------------------------------------------------------------------


def _require_here() -> None:
    if reason := resolve_backend("FLASHINFER").unavailable_reason("cuda"):
        pytest.skip(reason)


READY = {"dtype": torch.bfloat16, "head_size": 128}
"""What the kernels that packages hold ready are for; others take a minute of nvcc each."""


@pytest.mark.gpu
@pytest.mark.parametrize("batch_name", BATCHES)
@pytest.mark.parametrize("feature", ["plain", "sinks", "no_lse", "not_causal", "hnd", "strided_tensors"])
def test_forward_equals_float64(feature, batch_name):
    _require_here()
    batch = make_batch(case(feature, batch_name, **READY), "cuda")
    forward_op("FLASHINFER")(*op_positional(batch), **op_kwargs(batch))
    assert_attention_within_rule(batch)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("feature", ["window", "soft_cap", "fp8_e4m3", "fp8_e5m2", "fp8_per_head_scales"])
def test_forward_equals_float64_with_kernels_compiled_here(feature):
    _require_here()
    batch = make_batch(case(feature, **READY), "cuda")
    forward_op("FLASHINFER")(*op_positional(batch), **op_kwargs(batch))
    assert_attention_within_rule(batch)


@pytest.mark.gpu
def test_opcheck_passes():
    _require_here()
    batch = make_batch(case("plain", **READY), "cuda")
    for x in (batch.kv_cache, batch.query, batch.key, batch.value, batch.output, batch.lse):
        if x is not None:
            x.copy_(x.nan_to_num(0.5))
    torch.library.opcheck(forward_op("FLASHINFER"), op_positional(batch), op_kwargs(batch))


@pytest.mark.gpu
def test_an_op_without_a_plan_refuses_inside_a_capture():
    _require_here()
    batch = make_batch(case("plain", "decode", **READY), "cuda")
    forward_op("FLASHINFER")(*op_positional(batch), **op_kwargs(batch))
    with (
        pytest.raises(RuntimeError, match="inside a CUDA graph capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        forward_op("FLASHINFER")(*op_positional(batch), **op_kwargs(batch))
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_captured_decode_replays_on_other_lengths():
    _require_here()
    rows, width, size = 6, 40, 128
    params = AttentionParams(
        num_heads=8, num_kv_heads=2, head_size=size, dtype=torch.bfloat16, kv_cache_dtype="auto",
        block_size=16, device_type="cuda", scale=size**-0.5,
    )  # fmt: skip
    device, rng = torch.device("cuda"), torch.Generator("cuda").manual_seed(3)
    builder = FlashInferMetadataBuilder(params, spec_of(params), BatchLimits(rows, rows, width * 16), device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=device, dtype=torch.float32).bfloat16()

    cache, query = normal(1 + rows * width, 2, 16, 2, size), normal(rows, 8, size)
    table = (torch.randperm(rows * width, device=device, generator=rng) + 1).int().view(rows, width)
    starts, lens = torch.arange(rows + 1, device=device).int(), torch.zeros(rows, device=device).int()
    outputs = [torch.full_like(query, float("nan")) for _ in range(2)]

    def common(values: list[int]) -> CommonAttentionMetadata:
        lens.copy_(ints(*values))
        return CommonAttentionMetadata(
            query_start_loc=starts, seq_lens=lens, block_table=table, num_reqs=rows, num_actual_tokens=rows,
            max_query_len=1, max_seq_len=max(values), query_start_loc_cpu=starts.cpu(),
            seq_lens_cpu=lens.cpu(),
        )  # fmt: skip

    def call(name: str, output: torch.Tensor, group: int = -1) -> None:
        forward_op(name)(
            query, None, None, cache, output, starts, lens, table, scale=params.scale, group=group
        )

    plan = builder.build_for_cudagraph_capture(common([600, 3, 77, 200, 16, 17]))
    graph = torch.cuda.CUDAGraph()
    with set_forward_context(ForwardContext(plans={(0, "FLASHINFER"): plan})):
        call("FLASHINFER", outputs[0], group=0)
        with torch.cuda.graph(graph):
            call("FLASHINFER", outputs[0], group=0)
    for values in ([5, 640, 0, 1, 33, 0], [640] * 6, [1] * 6):
        builder.build(0, common(values))
        outputs[0].fill_(float("nan"))
        graph.replay()
        call("TRITON_ATTN", outputs[1])
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("check", ["graphs", "plan", "host_sync"])
def test_the_conformance_kit_agrees(check):
    _require_here()
    check_backend("FLASHINFER", device="cuda", quick=True, only=[check], case="plain*").assert_ok()
