"""Two backends over one cache: what is composed, what is refused, and where a batch is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_backends import make_backend

from attnbackend import (
    AttentionCGSupport,
    AttentionSelectorConfig,
    CommonAttentionMetadata,
    KVCacheLayout,
    MultipleOf,
    resolve_backend,
    select_backend,
)
from attnbackend.backends import two_phase
from attnbackend.backends.two_phase import TwoPhaseBackend, compose
from attnbackend.impl import AttentionParams, OptionalTensors
from attnbackend.kv_cache import spec_of
from attnbackend.registry import any_case_name, is_implemented
from attnbackend.testing.conformance import check_backend

NAME = "TORCH_SDPA+CPU_ATTN"


def _config(**changes: Any) -> AttentionSelectorConfig:
    fields: dict[str, Any] = {
        "device_type": "cpu", "head_size": 64, "num_heads": 4, "num_kv_heads": 2, "dtype": torch.float32,
        "block_size": 16, **changes,
    }  # fmt: skip
    return AttentionSelectorConfig.dense(**fields)


def test_a_composition_is_asked_for_by_two_names():
    assert is_implemented(NAME)
    cls = resolve_backend(NAME)
    assert issubclass(cls, TwoPhaseBackend)
    assert [part.get_name() for part in cls.parts] == ["TORCH_SDPA", "CPU_ATTN"]
    assert resolve_backend(NAME) is cls


def test_the_environment_may_name_it_in_any_case(monkeypatch):
    assert any_case_name("torch_sdpa + Cpu_Attn") == NAME
    monkeypatch.setenv("ATTNBACKEND", "torch_sdpa+torch_sdpa")
    assert select_backend(_config()).name == "TORCH_SDPA+TORCH_SDPA"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("TORCH_SDPA+NOBODY", "unknown attention backend 'NOBODY'"),
        ("TORCH_SDPA+", "a composition is two names"),
        ("A+B+C", "a composition is two names"),
        ("TORCH_SDPA+FLASH_ATTN_DIFFKV", "'FLASH_ATTN_DIFFKV' is not implemented"),
    ],
)
def test_what_is_no_composition_is_refused(name, reason):
    with pytest.raises(ValueError, match=reason):
        select_backend(_config(), backend=name)


def test_it_claims_what_both_claim():
    prefill = make_backend("A_PREFILL", supports_alibi=True, supported_head_sizes=(MultipleOf(8, 32, 256),))
    decode = make_backend("A_DECODE", supports_sinks=True, supported_head_sizes=(64, 72, 512))
    both = compose(prefill=prefill, decode=decode)
    assert (both.supports_alibi, both.supports_sinks) == (False, False)
    assert both.supported_head_sizes == (64, 72)
    assert not both.supports_head_size(128)


def test_ranges_of_sizes_are_intersected():
    prefill = make_backend("B_PREFILL", supported_block_sizes=(MultipleOf(16, 16, 128),))
    decode = make_backend("B_DECODE", supported_block_sizes=(MultipleOf(24), MultipleOf(64, 256)))
    assert compose(prefill=prefill, decode=decode).supported_block_sizes == (MultipleOf(48, 16, 128),)


def test_caches_that_differ_are_refused():
    def shape(blocks: int, size: int, heads: int, head_size: int, dtype: str = "auto") -> tuple[int, ...]:
        return (2, blocks, size, heads, head_size)

    def order(cls: Any, layout: KVCacheLayout) -> tuple[int, ...]:
        return (1, 0, 2, 3, 4)

    plain = make_backend("C_PLAIN")
    with pytest.raises(ValueError, match=r"C_PLAIN\+C_SHAPE cannot be composed: the cache of .* is \(7, 2"):
        compose(prefill=plain, decode=make_backend("C_SHAPE", get_kv_cache_shape=staticmethod(shape)))
    with pytest.raises(ValueError, match=r"order \(0, 1, 2, 3, 4\) and \(1, 0, 2, 3, 4\) for layout NHD"):
        compose(prefill=plain, decode=make_backend("C_ORDER", get_kv_cache_stride_order=classmethod(order)))
    with pytest.raises(ValueError, match="is composed already"):
        compose(prefill=compose(prefill=plain, decode=plain), decode=plain)


def _builder(backend: Any) -> Any:
    params = AttentionParams(
        num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.float32, kv_cache_dtype="auto", block_size=16,
        device_type="cpu", scale=0.125,
    )  # fmt: skip
    return backend.get_builder_cls()(params, spec_of(params), None, torch.device("cpu"))


def _batch(query_lens: list[int], **changes: Any) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lens = torch.tensor(query_lens, dtype=torch.int32) + 3
    fields: dict[str, Any] = {
        "query_start_loc": starts, "seq_lens": lens, "num_reqs": len(lens),
        "block_table": torch.zeros(len(lens), 4, dtype=torch.int32), "num_actual_tokens": sum(query_lens),
        "max_query_len": max(query_lens), "max_seq_len": 20, "query_start_loc_cpu": starts,
        "seq_lens_cpu": lens, **changes,
    }  # fmt: skip
    return CommonAttentionMetadata(**fields)


def _phases(backend: Any, query_lens: list[int]) -> Any:
    return _builder(backend).build(0, _batch(query_lens)).phases


def _plan(query_lens: list[int]) -> Any:
    return _phases(resolve_backend(NAME), query_lens)


@pytest.mark.parametrize(
    ("query_lens", "split", "decode_rows", "prefill_rows"),
    [
        ([1, 1, 1], None, 3, None),
        ([0, 1, 0], None, 3, None),
        ([5, 1], None, None, 2),
        ([1, 1, 5, 1], 2, 2, 2),
        ([0, 1, 4], 1, 2, 1),
    ],
)
def test_a_batch_is_split_at_its_first_longer_query(query_lens, split, decode_rows, prefill_rows):
    phases = _plan(query_lens)
    assert phases.token == split
    for plan, rows in ((phases.decode, decode_rows), (phases.prefill, prefill_rows)):
        assert (None if plan is None else len(plan.common.seq_lens)) == rows


def test_a_bound_above_the_lengths_that_the_host_knows_changes_no_plan():
    phases = _builder(resolve_backend(NAME)).build(0, _batch([1, 1], max_query_len=8)).phases
    assert (phases.prefill, phases.decode.common.max_query_len) == (None, 1)


class _Leads(resolve_backend("TORCH_SDPA").get_builder_cls()):
    def leads_on_prompts(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        return common_attn_metadata.max_query_len < 9


@pytest.mark.parametrize(
    ("query_lens", "decode_rows", "prefill_rows"), [([8, 5], 2, None), ([9, 5], None, 2), ([1, 8], 1, 1)]
)
def test_prompts_on_which_the_decode_backend_leads_are_its(query_lens, decode_rows, prefill_rows):
    parts = make_backend("F_PROMPTS"), make_backend("F_LEADS", builder=_Leads)
    phases = _phases(compose(prefill=parts[0], decode=parts[1]), query_lens)
    for plan, rows in ((phases.decode, decode_rows), (phases.prefill, prefill_rows)):
        assert (None if plan is None else len(plan.common.seq_lens)) == rows


class _LeadsOnMixed(resolve_backend("TORCH_SDPA").get_builder_cls()):
    def leads_on_mixed(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        return common_attn_metadata.max_query_len < 9


@pytest.mark.parametrize(
    ("query_lens", "decode_rows", "prefill_rows"), [([1, 8], None, 2), ([1, 9], 1, 1), ([1, 1], 2, None)]
)
def test_mixed_batches_on_which_the_prompt_backend_leads_are_its(query_lens, decode_rows, prefill_rows):
    parts = make_backend("H_LEADS", builder=_LeadsOnMixed), make_backend("H_DECODE")
    phases = _phases(compose(prefill=parts[0], decode=parts[1]), query_lens)
    assert phases.row is None or prefill_rows == decode_rows == 1
    for plan, rows in ((phases.decode, decode_rows), (phases.prefill, prefill_rows)):
        assert (None if plan is None else len(plan.common.seq_lens)) == rows


def test_prompts_of_a_graph_are_planned_by_the_backend_in_it():
    class Graphs(_Leads):
        cudagraph_support = AttentionCGSupport.ALWAYS

    both = compose(prefill=make_backend("G_A", builder=Graphs), decode=make_backend("G_B", builder=Graphs))
    builder = _builder(both)
    captured = builder.build_for_cudagraph_capture(_batch([8, 8]))
    assert captured.phases.decode is None
    for in_graph in (_batch([5, 5]), _batch([1, 8]), _batch([1, 1], max_query_len=8)):
        phases = builder.build(0, in_graph).phases
        assert phases.decode is phases.row is None
    assert builder.build(0, _batch([5, 5, 5])).phases.prefill is None, "no graph has three rows"
    assert builder.build(0, _batch([1, 9])).phases.row == 1, "no graph is for so long a query"
    builder.build_for_cudagraph_capture(_batch([1, 12]))
    assert builder.build(0, _batch([8, 9])).phases.decode is None, "no graph is for so many tokens"
    assert builder.build(0, _batch([1, 17])).phases.row == 1


def test_decode_of_many_keys_is_worth_a_stream(monkeypatch):
    # Two requests of 4 keys: keys and values of 2 heads of 64 in float32.
    size = 2 * 2 * 4 * 2 * 64 * 4
    for threshold, worth in ((size, True), (size + 1, False)):
        monkeypatch.setattr(two_phase, "_BESIDE_BYTES", threshold)
        assert _plan([1, 1, 5]).beside is worth
        assert not _plan([1, 1, 1]).beside
    impls = [resolve_backend(name).get_impl_cls() for name in ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")]
    assert [impl.keeps_to_its_stream for impl in impls] == [True, True, False], "FlashInfer has a workspace"


def test_graphs_hold_what_the_decode_part_can():
    class Never(resolve_backend("TORCH_SDPA").get_builder_cls()):
        cudagraph_support = AttentionCGSupport.NEVER

    class Always(Never):
        cudagraph_support = AttentionCGSupport.ALWAYS

    class Uniform(Never):
        cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    params = AttentionParams(
        num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.float32, kv_cache_dtype="auto", block_size=16,
        device_type="cpu", scale=0.125,
    )  # fmt: skip
    never, always, uniform = (
        make_backend(f"D_{builder.__name__.upper()}", builder=builder) for builder in (Never, Always, Uniform)
    )
    for prefill, decode, support in (
        (always, always, AttentionCGSupport.ALWAYS),
        (uniform, always, AttentionCGSupport.UNIFORM_BATCH),
        (always, uniform, AttentionCGSupport.ALWAYS),
        (never, always, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        (always, never, AttentionCGSupport.NEVER),
    ):
        builder = compose(prefill=prefill, decode=decode).get_builder_cls()
        assert builder.get_cudagraph_support(spec_of(params)) is support


def test_a_composition_keeps_its_claims():
    name = NAME if resolve_backend("CPU_ATTN").unavailable_reason("cpu") is None else "TORCH_SDPA+TORCH_SDPA"
    only = ["numerics", "plan", "padding", "lse", "refusal", "opcheck"]
    check_backend(name, quick=True, only=only).assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["graphs", "plan", "padding"])
def test_the_libraries_together_keep_their_claims(check):
    name = "FLASH_ATTN+FLASHINFER"
    if reason := resolve_backend(name).unavailable_reason("cuda"):
        pytest.skip(reason)
    check_backend(name, device="cuda", quick=True, only=[check], case="plain*").assert_ok()


@pytest.mark.gpu
def test_both_phases_at_once_give_what_one_after_the_other_gives(monkeypatch):
    """Inputs come from, and outputs go to, work of the current stream right before and behind."""
    backend = resolve_backend("FLASH_ATTN+TRITON_ATTN")
    if reason := backend.unavailable_reason("cuda"):
        pytest.skip(reason)
    params = AttentionParams(
        num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto",
        block_size=16, device_type="cuda", scale=0.1,
    )  # fmt: skip
    queries, lens = [1] * 5 + [200, 70], [900, 33, 1, 1500, 64, 1000, 70]
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    fresh = torch.randn(sum(queries), 8, 128, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(7 * 94 + 1, 2, 16, 2, 128, device="cuda", dtype=torch.bfloat16)
    common = CommonAttentionMetadata(
        query_start_loc=starts.cuda(), seq_lens=torch.tensor(lens, dtype=torch.int32, device="cuda"),
        block_table=torch.arange(1, 7 * 94 + 1, dtype=torch.int32, device="cuda").view(7, 94),
        num_reqs=7, num_actual_tokens=sum(queries), max_query_len=200, max_seq_len=1500,
        query_start_loc_cpu=starts, seq_lens_cpu=torch.tensor(lens, dtype=torch.int32),
    )  # fmt: skip
    impl, found = backend.get_impl_cls()(params), []
    monkeypatch.setattr("attnbackend.backends.flash_attn.planning._MIXED_US", 0.0)
    for threshold in (1 << 60, 0):
        monkeypatch.setattr(two_phase, "_BESIDE_BYTES", threshold)
        builder = backend.get_builder_cls()(params, spec_of(params), None, torch.device("cuda"))
        plan = builder.build(0, common)
        assert plan.phases.beside == (threshold == 0)
        for _ in range(3):
            query, output = torch.full_like(fresh, torch.nan), torch.full_like(fresh, torch.nan)
            torch.cuda._sleep(2_000_000)
            query.copy_(fresh)
            impl.forward(query, None, None, cache, plan, output, OptionalTensors())
            found.append(output.clone())
    assert found[0].isfinite().all()
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.gpu
def test_many_short_prompts_are_the_triton_part_s_on_hopper():
    backends = [resolve_backend(name) for name in ("FLASH_ATTN+TRITON_ATTN", "TRITON_ATTN", "FLASH_ATTN")]
    if backends[0].unavailable_reason("cuda") or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU with a FlashAttention library")
    params = AttentionParams(
        num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto",
        block_size=16, device_type="cuda", scale=0.1,
    )  # fmt: skip
    rows, length, pages = 6, 700, 44
    query = torch.randn(rows * length, 8, 128, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, rows * length, 2, 128, device="cuda", dtype=torch.bfloat16)
    cache = torch.full((rows * pages + 1, 2, 16, 2, 128), torch.nan, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(length, device="cuda")
    for side, tokens in enumerate((key, value)):
        for row, own in enumerate(tokens.split(length)):
            cache[1 + row * pages + slots // 16, side, slots % 16] = own
    lens = torch.full((rows,), length, dtype=torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32) * length
    common = CommonAttentionMetadata(
        query_start_loc=starts.cuda(), seq_lens=lens.cuda(), num_reqs=rows, num_actual_tokens=rows * length,
        block_table=torch.arange(1, rows * pages + 1, dtype=torch.int32, device="cuda").view(rows, pages),
        max_query_len=length, max_seq_len=length, query_start_loc_cpu=starts, seq_lens_cpu=lens,
    )  # fmt: skip
    found = []
    for backend in backends:
        plan = backend.get_builder_cls()(params, spec_of(params), None, torch.device("cuda")).build(0, common)
        assert backend is not backends[0] or plan.phases.prefill is None
        found.append(torch.full_like(query, torch.nan))
        backend.get_impl_cls()(params).forward(query, key, value, cache, plan, found[-1], OptionalTensors())
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=0.02, atol=0.02)
