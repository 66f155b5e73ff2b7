"""FLASH_ATTN: which library serves, what a probe finds, plans, and on a GPU the library itself.

What runs without a GPU runs on a stand-in that has FlashAttention 3's habits.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from library_fakes import FakeFlashBackend, FakeProvider
from op_cases import BATCHES, FEATURES, case, forward_op

from attnbackend import (
    AttentionCGSupport,
    AttentionSelectorConfig,
    CommonAttentionMetadata,
    resolve_backend,
    set_config,
)
from attnbackend.backends.flash_attn import backend as flash_backend
from attnbackend.backends.flash_attn import planning, probe, resolution
from attnbackend.backends.flash_attn.call import Layer, window_of
from attnbackend.backends.flash_attn.planning import FlashAttentionMetadataBuilder, most_splits
from attnbackend.backends.flash_attn.providers import PROVIDERS, FlashAttn2, FlashAttn3, VllmFlash3
from attnbackend.backends.flash_attn.resolution import NoProviderError, provider_for
from attnbackend.impl import AttentionParams
from attnbackend.kernels import triton as kernels
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import BatchLimits
from attnbackend.selector import backend_reasons
from attnbackend.testing import assert_attention_within_rule, make_batch, op_kwargs, op_positional
from attnbackend.testing.conformance import check_backend

LAYER = Layer(dtype=torch.bfloat16, kv_dtype=torch.bfloat16, head_size=64, block_size=16, group=2)
HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)
KINDS = {
    "plain": {}, "windowed": {"windowed": True}, "soft_capped": {"soft_capped": True},
    "alibi": {"alibi": True}, "not_causal_window": {"causal": False, "windowed": True},
}  # fmt: skip


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> FakeProvider:
    """The only candidate, on the CPU, not tried before."""
    provider = FakeProvider()
    monkeypatch.setattr(probe, "DEVICE", "cpu")
    monkeypatch.setattr(probe, "_FOUND", {})
    monkeypatch.setattr(FakeProvider, "calls", [])
    for module in (resolution, flash_backend):
        monkeypatch.setattr(module, "candidates", lambda: (provider,))
    return provider


# --- which provider ---------------------------------------------------------------------------


def _all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    resolution._candidates.cache_clear()
    monkeypatch.setattr(resolution, "_installation", lambda provider, capability: None)


@pytest.mark.parametrize(
    ("capability", "versions"), [(HOPPER, [3, 3, 4, 4, 2, 2, 2]), (BLACKWELL, [4, 4, 2, 2, 2])]
)
def test_the_best_version_for_the_device_comes_first(monkeypatch, capability, versions):
    _all_installed(monkeypatch)
    found = [p.version for p in resolution._candidates(None, capability)]
    assert found[: len(versions)] == versions
    resolution._candidates.cache_clear()


@pytest.mark.parametrize(
    ("choice", "keys"),
    [("2", ["vllm_fa2", "flash_attn_2", "torch"]), ("FLASH_ATTN_3", ["flash_attn_3"]), ("torch", ["torch"])],
)
def test_a_forced_version_or_library_is_the_only_one(monkeypatch, choice, keys):
    _all_installed(monkeypatch)
    assert [p.key for p in resolution._candidates(choice, HOPPER)] == keys
    resolution._candidates.cache_clear()


def test_an_unknown_choice_is_refused_with_what_is_allowed():
    with pytest.raises(ValueError, match=r"flash_attn='5'.*ATTNBACKEND_FLASH_ATTN.*vllm_fa3.*2, 3, 4"):
        resolution._ordered("5", HOPPER)


def test_the_configuration_stands_above_the_environment(monkeypatch):
    from attnbackend.config import flash_attn_choice, library_choices

    monkeypatch.setenv("ATTNBACKEND_FLASH_ATTN", " 2 ")
    assert flash_attn_choice() == "2"
    with set_config(flash_attn="vllm_fa3", flash_attn_fp8=True):
        assert library_choices()[:2] == ("vllm_fa3", True)
    monkeypatch.setenv("ATTNBACKEND_FLASH_ATTN_FP8", "yes")
    with pytest.raises(ValueError, match="ATTNBACKEND_FLASH_ATTN_FP8='yes'; allowed: 0 or 1"):
        library_choices()


@pytest.mark.parametrize(
    ("provider", "capability", "reason"),
    [
        (FlashAttn3(), AMPERE, r"needs compute capability 9\.x, this is 8\.0"),
        (FlashAttn2(), HOPPER, "flash_attn is not installed"),
    ],
)
def test_what_cannot_run_here_says_why(provider, capability, reason):
    if reason.endswith("installed") and importlib.util.find_spec(provider.module) is not None:
        pytest.skip("it is installed here")
    assert re.search(reason, provider.problem_of_installation(capability))


def test_a_library_that_fails_to_import_is_unavailable_with_the_cause(monkeypatch):
    class Broken(FlashAttn2):
        module = "torch"

        def load(self) -> str | None:
            raise OSError("libcudart.so.11 is missing")

    assert Broken().problem_of_installation(HOPPER) == "OSError: libcudart.so.11 is missing"


def test_without_a_gpu_the_claims_are_what_the_libraries_do_elsewhere():
    cls = resolve_backend("FLASH_ATTN")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert (cls.supports_alibi, cls.supports_logits_soft_cap, cls.supports_sinks) == (True, True, True)
    assert cls.supported_kv_cache_dtypes == ("auto", "float16", "bfloat16")
    with set_config(flash_attn_fp8=True):
        assert cls.supports_kv_cache_dtype("fp8_e4m3")
        assert not cls.supports_kv_cache_dtype("fp8_e5m2")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 68}, "head_size=68"),
        ({"dtype": torch.float32}, "dtype=float32"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype=float16 .*query's"),
        ({"block_size": 24}, "block_size=24"),
        ({"compute_capability": (7, 5)}, r"compute_capability=\(7, 5\)"),
    ],
)
def test_what_no_version_does_is_refused_with_the_value(changes, reason):
    asked: dict[str, Any] = {
        "device_type": "cuda", "compute_capability": HOPPER, "head_size": 128, "num_heads": 8,
        "num_kv_heads": 2, "dtype": torch.bfloat16, "block_size": 16, **changes,
    }  # fmt: skip
    reasons = [str(r) for r in backend_reasons("FLASH_ATTN", AttentionSelectorConfig.dense(**asked))]
    assert any(re.search(reason, text) for text in reasons), reasons


# --- what a probe finds -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "alibi"])
def test_a_provider_that_is_right_is_taken(stand_in, kind):
    assert provider_for(replace(LAYER, **KINDS[kind])) is stand_in


@pytest.mark.parametrize(
    ("fault", "kind", "found"),
    [
        ("writes_nothing", "plain", "writes nothing"),
        ("ignores_windows", "windowed", "output off by"),
        ("refuses_empty_rows", "plain", "takes no requests without keys: RuntimeError: no keys"),
    ],
)
def test_a_provider_that_is_wrong_is_refused_with_what_it_did(monkeypatch, stand_in, fault, kind, found):
    monkeypatch.setattr(FakeProvider, "fault", fault)
    with pytest.raises(NoProviderError, match=found):
        provider_for(replace(LAYER, **KINDS[kind]))


@pytest.mark.parametrize("kind", ["plain", "windowed"])
@pytest.mark.parametrize("fault", ["multiplies_whole_pages", "multiplies_whole_pages_of_prompts"])
def test_clean_pages_are_enough_for_a_provider_that_multiplies_all_of_a_page(
    monkeypatch, stand_in, fault, kind
):
    monkeypatch.setattr(FakeProvider, "fault", fault)
    layer = replace(LAYER, **KINDS[kind])
    with pytest.raises(NoProviderError, match=r"writes nothing|output off by inf"):
        provider_for(layer)
    assert provider_for(replace(layer, clean_pages=True)) is stand_in


def test_what_an_interface_does_not_take_is_not_tried(stand_in):
    for layer, problem in (
        (replace(LAYER, alibi=True), "takes no alibi slopes"),
        (replace(LAYER, kv_dtype=torch.float8_e4m3fn), "takes keys of the query's type"),
    ):
        with pytest.raises(NoProviderError, match=problem):
            provider_for(layer)
    assert FakeProvider.calls == []


def test_a_provider_is_tried_once_for_a_kind_of_layer(stand_in):
    for _ in range(2):
        provider_for(LAYER)
    assert len(FakeProvider.calls) == 9, "alone, in splits, with a schedule; also prompts, and without keys"


def test_unwritten_rows_and_new_tokens_are_found_out(stand_in):
    assert not probe.empty_rows_are_written(stand_in, LAYER)
    assert probe.new_tokens_are_read(stand_in, LAYER)
    assert not probe.sinks_are_native(stand_in, LAYER), "it says so"


# --- plans ------------------------------------------------------------------------------------


def test_splits_are_bounded_by_tokens_and_by_memory():
    assert most_splits(64, 32, 128, max_seq_len=9000) == 32
    assert most_splits(513, 32, 128, max_seq_len=9000) == 1
    assert most_splits(512, 128, 256, max_seq_len=9000) == 8
    assert most_splits(1, 1 << 20, 256, max_seq_len=9000) == 1
    assert most_splits(64, 32, 128, programs=512, max_seq_len=9000) == 32
    assert most_splits(64, 32, 128, programs=512, max_seq_len=512) == 1, "short ones fill the device"
    assert most_splits(8, 32, 128, programs=64, max_seq_len=512) == 32
    assert most_splits(1, 8, 256, programs=1, max_seq_len=9000) == 128
    assert most_splits(512, 32, 128, rows=1, max_seq_len=9000) == 1, "128 tiles of prompts fill it, too"
    assert most_splits(512, 32, 128, rows=5, max_seq_len=9000) == 32
    assert most_splits(256, 32, 128, rows=1, max_seq_len=9000) == 32
    assert most_splits(544, 8, 256, rows=33, programs=33, max_seq_len=2048) == 32, "one head of keys"
    assert most_splits(1696, 8, 256, rows=33, programs=33, max_seq_len=2048) == 1
    assert most_splits(1024, 8, 256, rows=1, programs=1, max_seq_len=1024) == 1, "a prompt alone"


def test_a_window_counts_the_token_itself():
    assert window_of(None, True) == window_of(None, False) == (-1, -1)
    assert window_of(1, True) == (0, 0)
    assert window_of(7, False) == (6, -1)


def _params(**changes: Any) -> AttentionParams:
    fields: dict[str, Any] = {
        "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float16, "kv_cache_dtype": "auto",
        "block_size": 16, "device_type": "cpu", "scale": 0.125, **changes,
    }  # fmt: skip
    return AttentionParams(**fields)


def _builder(rows: int | None = 8, **changes: Any) -> FlashAttentionMetadataBuilder:
    limits = None if rows is None else BatchLimits(rows, 64, 256)
    params = _params(**changes)
    return FlashAttentionMetadataBuilder(params, spec_of(params), limits, torch.device("cpu"))


def _batch(query_lens: list[int], seq_lens: list[int], **changes: Any) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    fields: dict[str, Any] = {
        "query_start_loc": starts, "seq_lens": lens,
        "block_table": torch.zeros(len(lens), 16, dtype=torch.int32), "num_reqs": len(lens),
        "num_actual_tokens": sum(query_lens), "max_query_len": max(query_lens), "max_seq_len": max(seq_lens),
        "query_start_loc_cpu": starts, "seq_lens_cpu": lens, **changes,
    }  # fmt: skip
    return CommonAttentionMetadata(**fields)


def test_a_plan_knows_which_batches_have_rows_to_fill(stand_in):
    build = _builder().build
    whole = build(0, _batch([1, 3], [9, 3])).facts
    assert (whole.covered_tokens, whole.may_see_no_key) == (4, False)
    assert build(0, _batch([1, 3], [0, 3])).facts.may_see_no_key
    assert build(0, _batch([1, 3], [5, 2])).facts.may_see_no_key
    assert not build(0, _batch([0, 3], [0, 3])).facts.may_see_no_key
    unknown = build(0, _batch([1, 3], [9, 3], query_start_loc_cpu=None)).facts
    assert (unknown.covered_tokens, unknown.may_see_no_key) == (0, True)


NEW = {
    "one prompt": ([0, 5], [3, 5], True),
    "two prompts": ([4, 0, 5], [4, 0, 5], True),
    "a decode before a prompt": ([1, 5], [8, 5], False),
    "the rest of a prompt": ([4, 5], [4, 7], False),
    "a padded row": ([5, 1], [5, 0], False),
    "no token": ([0, 0], [3, 0], False),
}


@pytest.mark.parametrize("case", NEW)
def test_a_plan_knows_whether_the_new_tokens_are_all_there_are(stand_in, case):
    queries, lens, are_new = NEW[case]
    assert _builder().build(0, _batch(queries, lens)).facts.are_new_sequences is are_new


def test_a_batch_that_a_graph_serves_is_read_from_pages_as_in_the_graph(stand_in):
    builder, batch = _builder(), _batch([4, 5], [4, 5])
    builder.build_for_cudagraph_capture(batch)
    assert not builder.build(0, batch).facts.are_new_sequences
    assert builder.build(0, _batch([4, 6], [4, 6])).facts.are_new_sequences, "longer than the graph's"


def test_the_schedule_stays_where_it_is(stand_in):
    builder = _builder()
    first = builder.build(0, _batch([1] * 8, [5] * 8)).schedule
    assert first is not None
    again = builder.build(0, _batch([1] * 8, [9] * 8)).schedule
    assert again is not None
    assert (first.data_ptr(), first.shape) == (again.data_ptr(), again.shape)
    assert _builder(None).build(0, _batch([1], [5])).schedule is None, "an op that plans for itself"


def test_plans_keep_to_the_bounds_that_a_graph_was_captured_with(stand_in):
    builder = _builder()
    mixed = builder.build_for_cudagraph_capture(_batch([1, 17, 4], [5, 17, 9]))
    decode = builder.build_for_cudagraph_capture(_batch([1, 1, 1], [5, 7, 9]))
    assert mixed.bounds == (17, 256, 32)
    assert decode.bounds == (1, 256, 32)
    assert builder.build(0, _batch([1, 1, 1], [2, 2, 2])).bounds == decode.bounds
    assert builder.build(0, _batch([3, 1, 1], [3, 2, 2])).bounds == mixed.bounds
    assert builder.build(0, _batch([20, 1, 1], [20, 2, 2])).bounds.max_query_len == 20, "no graph of it"
    assert builder.build(0, _batch([9, 9, 9], [9, 9, 9])).bounds.max_query_len == 9, "nor of 27 tokens"
    assert builder.build(0, _batch([1, 1], [2, 2])).bounds.max_seq_len == 2, "no graph of two rows"
    assert builder.build(0, _batch([0, 0], [2, 2])).bounds.max_seq_len == 2


def test_small_mixed_batches_are_best_served_at_once(stand_in):
    batch = _batch([1, 1, 64], [9000, 9, 64])
    leads = _builder(num_heads=8).leads_on_mixed
    assert leads(batch)
    assert not leads(_batch([1, 1], [300_000, 9])), "many keys to read"
    assert not leads(_batch([1, 8000], [9000, 9000])), "much to multiply"
    assert not leads(batch.replace(seq_lens_cpu=None)), "lengths are not known"
    grid = _batch([1] * 64 + [2048], [4096] * 65)
    of_256 = {"num_heads": 8, "num_kv_heads": 1, "head_size": 256}
    assert _builder(**of_256).leads_on_mixed(grid)
    assert not _builder(**of_256 | {"head_size": 128}).leads_on_mixed(grid)
    assert not _builder(**of_256).leads_on_mixed(_batch([1] * 64 + [2048], [9000] * 65))
    assert not _builder().leads_on_mixed(batch), "groups of two"
    assert _builder(None, num_heads=8).leads_on_mixed(batch), "an op that plans for itself"


def test_a_graph_of_uniform_batches_has_no_padding_tokens(stand_in):
    capture = _builder().build_for_cudagraph_capture
    assert capture(_batch([1, 1], [5, 7])).facts.covered_tokens == 2
    assert capture(_batch([4, 4], [5, 7])).facts.covered_tokens == 8
    assert capture(_batch([4, 1], [5, 7])).facts.covered_tokens == 0


@pytest.mark.parametrize(
    ("version", "support"), [(3, AttentionCGSupport.ALWAYS), (2, AttentionCGSupport.UNIFORM_BATCH)]
)
def test_graph_support_follows_the_version(monkeypatch, stand_in, version, support):
    monkeypatch.setattr(FakeProvider, "version", version)
    assert FlashAttentionMetadataBuilder.get_cudagraph_support(spec_of(_params())) is support


def test_nothing_is_claimed_for_graphs_where_nothing_serves(monkeypatch, stand_in):
    monkeypatch.setattr(planning, "provider_for", _raise)
    assert FlashAttentionMetadataBuilder.get_cudagraph_support(spec_of(_params())) is AttentionCGSupport.NEVER


def _raise(layer: Layer) -> None:
    raise NoProviderError([])


@pytest.mark.skipif(
    torch.cuda.is_available() or kernels.unavailable_reason("cpu") is not None,
    reason="needs Triton's interpreter",
)
def test_the_backend_over_the_stand_in_keeps_its_claims(stand_in):
    report = check_backend(FakeFlashBackend, quick=True, only=["plan", "padding", "lse", "refusal"])
    report.assert_ok()


# --- the libraries themselves -----------------------------------------------------------------

GPU_FEATURES = [name for name in FEATURES if not name.startswith("fp8")]


def _require_here(attention_case: Any) -> None:
    from attnbackend.testing.conformance.cases import config_of

    reasons = backend_reasons("FLASH_ATTN", config_of(attention_case, "cuda"))
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feature", GPU_FEATURES)
def test_forward_equals_float64_for_each_feature(feature, dtype):
    asked = case(feature, dtype=dtype)
    _require_here(asked)
    batch = make_batch(asked, "cuda")
    forward_op("FLASH_ATTN")(*op_positional(batch), **op_kwargs(batch))
    assert_attention_within_rule(batch)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_name", BATCHES)
@pytest.mark.parametrize("feature", ["plain", "no_lse", "window_cap_and_sinks"])
def test_forward_equals_float64_for_each_batch(feature, batch_name):
    asked = case(feature, batch_name, dtype=torch.bfloat16)
    _require_here(asked)
    batch = make_batch(asked, "cuda")
    forward_op("FLASH_ATTN")(*op_positional(batch), **op_kwargs(batch))
    assert_attention_within_rule(batch)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_typical_layers_are_served_on_hopper(head_size):
    """A probe that refuses them all would let every other test be skipped."""
    if torch.cuda.get_device_capability() != HOPPER or not resolution.candidates():
        pytest.skip("needs a Hopper GPU with a FlashAttention library")
    layer = replace(LAYER, head_size=head_size, group=4)
    for kind in KINDS.values():
        if not kind.get("alibi"):
            provider_for(replace(layer, **kind))


@pytest.mark.gpu
@pytest.mark.parametrize("feature", ["plain", "no_lse", "window_cap_and_sinks"])
def test_opcheck_passes(feature):
    asked = case(feature, dtype=torch.bfloat16)
    _require_here(asked)
    batch = make_batch(asked, "cuda")
    for x in (batch.kv_cache, batch.query, batch.key, batch.value, batch.output, batch.lse):
        if x is not None:
            x.copy_(x.nan_to_num(0.5))
    torch.library.opcheck(forward_op("FLASH_ATTN"), op_positional(batch), op_kwargs(batch))


@pytest.mark.gpu
def test_float8_caches_are_served_when_asked_for_and_roughly_right():
    asked = case("fp8_e4m3", dtype=torch.bfloat16, head_size=128)
    with set_config(flash_attn_fp8=True):
        _require_here(asked)
        batch = make_batch(asked, "cuda")
        forward_op("FLASH_ATTN")(*op_positional(batch), **op_kwargs(batch))
        # Three bits of mantissa in queries and probabilities: 2**-4 each, over 2**-9 of bfloat16.
        assert_attention_within_rule(batch, factor=64.0)


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["graphs", "plan", "host_sync", "padding"])
def test_the_conformance_kit_agrees(check):
    if reason := resolve_backend("FLASH_ATTN").unavailable_reason("cuda"):
        pytest.skip(reason)
    check_backend("FLASH_ATTN", device="cuda", quick=True, only=[check]).assert_ok()


def test_every_provider_has_a_key_of_its_own():
    keys = [provider.key for provider in PROVIDERS]
    assert len(set(keys)) == len(keys)
    assert VllmFlash3.key in keys
