"""Prompts over float8 caches whose kernels read none: when a copy is made, and what is computed over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from library_fakes import FakeFlashBackend, FakeProvider
from model_zoo import make_model
from op_cases import DEVICE
from random_serving import logits_of_all_steps
from toy_backends import ToyBuilder, make_backend

from attnbackend import (
    AttentionCGSupport,
    AttentionSelectorConfig,
    AttentionType,
    CommonAttentionMetadata,
    register_backend,
    resolve_backend,
    set_config,
)
from attnbackend.backends import widened
from attnbackend.backends.flash_attn import backend as flash_backend
from attnbackend.backends.flash_attn import probe, resolution
from attnbackend.backends.torch_sdpa import TorchSDPABackend, TorchSDPAImpl
from attnbackend.backends.two_phase import compose
from attnbackend.backends.widened import PAGE, WidenedPlan
from attnbackend.impl import AttentionImpl, AttentionParams, OptionalTensors
from attnbackend.kernels.triton import paged_hopper_launch, unavailable_reason, widen
from attnbackend.kv_cache import spec_of
from attnbackend.native_calls import LibraryCall, amounts_to, lessons
from attnbackend.ops.generate import backend_op
from attnbackend.ops.library import ATTENTION
from attnbackend.registry import registry_scope
from attnbackend.runtime.engine_core import EngineCore
from attnbackend.runtime.model_runner import build_runner
from attnbackend.testing import (
    AttentionCase,
    make_batch,
    op_kwargs,
    op_positional,
)
from attnbackend.testing.conformance import check_backend
from attnbackend.testing.judgement import AttentionJudge

pytestmark = pytest.mark.skipif(
    unavailable_reason(DEVICE) is not None, reason=str(unavailable_reason(DEVICE))
)
NAME = "NO_FLOAT8+TORCH_SDPA"
ALWAYS = AttentionCGSupport.ALWAYS


class NoFloat8Impl(TorchSDPAImpl):
    def attend(
        self, query: Any, key: Any, value: Any, kv_cache: Any, plan: Any, output: Any, tensors: Any
    ) -> None:
        assert kv_cache.dtype is self.params.dtype
        assert tensors.k_scale is None or tensors.k_scale.numel() == 1
        super().attend(query, key, value, kv_cache, plan, output, tensors)
        amounts_to(lambda: LibraryCall(None, ()), query, output)


class NoFloat8(TorchSDPABackend):
    supported_kv_cache_dtypes = ("auto", "float32", "float16", "bfloat16")  # type: ignore[assignment]
    supports_per_head_quant_scales = False

    @staticmethod
    def get_name() -> str:
        return "NO_FLOAT8"

    @staticmethod
    def get_impl_cls() -> type[NoFloat8Impl]:
        return NoFloat8Impl


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with registry_scope():
        register_backend()(NoFloat8)
        yield


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans of all copies; they are made for any prompt."""
    made: list[Any] = []
    make = widened.widened_cache

    def counted(kv_cache: torch.Tensor, plan: WidenedPlan, *args: Any) -> torch.Tensor:
        made.append(plan)
        return make(kv_cache, plan, *args)

    monkeypatch.setattr(widened, "_WORTH", 0)
    if DEVICE == "cpu":  # An interpreted program takes as long for many elements as for few.
        monkeypatch.setattr(widen, "TILE_ELEMENTS", 1 << 16)
    monkeypatch.setattr(widened, "widened_cache", counted)
    return made


@pytest.mark.parametrize(
    "case",
    [
        "cache_fp8_e5m2_odd_scales-*i*d", "cache_fp8_per_head_scales-prefill",
        "dtype_float16_cache_fp8_e5m2-*prefill",
    ],
)  # fmt: skip
def test_copies_keep_the_claims(case: str, copies: list[Any]) -> None:
    check_backend(NAME, device=DEVICE, only=["numerics"], case=case).assert_ok()
    assert copies


@pytest.mark.skipif(DEVICE == "cuda", reason="the stand-in for the library is on the CPU")
def test_flash_attn_may_multiply_what_is_behind_the_last_key(
    copies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As version 3 does with pages that it reads whole: the cache holds NaN there, the copy zeros."""
    register_backend()(FakeFlashBackend)
    monkeypatch.setattr(probe, "DEVICE", "cpu")
    monkeypatch.setattr(probe, "_FOUND", {})
    monkeypatch.setattr(FakeProvider, "fault", "multiplies_whole_pages")
    for module in (resolution, flash_backend):
        monkeypatch.setattr(module, "candidates", lambda: (FakeProvider(),))
    case = "cache_fp8_per_head_scales-chunked_prefill"
    check_backend("FAKE_FLASH+TORCH_SDPA", only=["numerics"], case=case).assert_ok()
    assert copies


def test_an_engine_serves_over_copies_what_it_serves_without(copies: list[Any]) -> None:
    """Bit for bit: both parts are one library."""
    found = []
    for backend in (NAME, "TORCH_SDPA"):
        runner = build_runner(
            make_model("llama").to(DEVICE), backend=backend, block_size=16, num_blocks=200, max_num_seqs=8,
            max_num_batched_tokens=64, compile=False, kv_cache_dtype="fp8_e4m3",
        )  # fmt: skip
        engine = EngineCore(runner, max_num_seqs=8, max_num_batched_tokens=64, eos_token_ids=())
        found.append(logits_of_all_steps(engine, seed=7, steps=60))
    assert len(copies) > 10
    assert [rows for rows, _ in found[0]] == [rows for rows, _ in found[1]]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(*found, strict=True))


def params_of(**changes: Any) -> AttentionParams:
    fields: dict[str, Any] = {
        "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8",
        "block_size": 16, "device_type": DEVICE, "scale": 0.125, **changes,
    }  # fmt: skip
    return AttentionParams(**fields)


def builder_of(**changes: Any) -> Any:
    params = params_of(**changes)
    return resolve_backend(NAME).get_builder_cls()(params, spec_of(params), None, torch.device(DEVICE))


def batch_of(queries: list[int], lens: list[int], **changes: Any) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = torch.arange(len(lens) * 4096, dtype=torch.int32).view(len(lens), 4096) % 1024
    fields: dict[str, Any] = {
        "query_start_loc": starts.to(DEVICE), "block_table": table.to(DEVICE),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        "num_reqs": len(lens), "num_actual_tokens": sum(queries),
        "max_query_len": max(queries), "max_seq_len": max(lens), "query_start_loc_cpu": starts,
        "seq_lens_cpu": torch.tensor(lens, dtype=torch.int32), **changes,
    }  # fmt: skip
    return CommonAttentionMetadata(**fields)


def copied_pages(builder: Any, common: CommonAttentionMetadata) -> int:
    """Of the copy; 0 where there is none, and the decode backend serves every request."""
    phases = builder.build(0, common).phases
    if isinstance(phases.prefill, WidenedPlan):
        return len(phases.prefill.page_rows)
    assert phases.prefill is phases.row is None
    assert phases.decode.common is common
    return 0


@pytest.mark.parametrize(
    ("queries", "lens", "changes", "pages"),
    [
        ([2000], [2000], {}, 16),
        ([1000], [60_000], {}, 469),
        ([300], [300], {}, 0),
        ([40], [60_000], {}, 0),
        ([4] * 64, [4096] * 64, {}, 0),
        ([1, 1, 2000, 1], [8000, 8000, 2000, 129], {}, 18),
        ([2000, 0], [2000, 9000], {}, 16),
        ([400], [60_000], {"sliding_window": 512}, 0),
        ([400], [2000], {"sliding_window": 512}, 16),
        ([2000], [2000], {"attn_type": AttentionType.ENCODER_ONLY}, 0),
    ],
)  # fmt: skip
def test_a_copy_is_made_where_it_pays(
    queries: list[int], lens: list[int], changes: dict[str, Any], pages: int
) -> None:
    assert copied_pages(builder_of(**changes), batch_of(queries, lens)) == pages


class Rounds(TorchSDPABackend):
    """Reads float8 caches itself, with rounded queries, as FlashAttention 3 may be allowed to."""

    @staticmethod
    def get_name() -> str:
        return "ROUNDS"

    @classmethod
    def query_dtype(cls, kv_cache_dtype: str) -> torch.dtype | None:
        return torch.float8_e4m3fn if kv_cache_dtype.startswith("fp8") else None


@pytest.mark.parametrize(
    ("queries", "lens", "head_size", "kind"),
    [
        ([2000], [2000], 64, "copy"),
        ([16_384], [16_384], 64, "copy"),
        ([16_385], [16_385], 64, "rounded"),
        ([16_385], [16_385], 128, "copy"),
        ([40], [60_000], 64, "decode"),
        ([1, 20_000], [60_000, 20_000], 64, "rounded"),
    ],
)
def test_a_prompt_backend_that_may_round_its_queries_does_so_where_that_leads(
    queries: list[int], lens: list[int], head_size: int, kind: str
) -> None:
    register_backend()(Rounds)
    params = params_of(head_size=head_size)
    cls = resolve_backend("ROUNDS+TORCH_SDPA")
    assert len(set(cls.supported_kv_cache_dtypes)) == len(cls.supported_kv_cache_dtypes)
    builder = cls.get_builder_cls()(params, spec_of(params), None, torch.device(DEVICE))
    phases = builder.build(0, batch_of(queries, lens)).phases
    is_copy = isinstance(phases.prefill, WidenedPlan)
    assert kind == ("decode" if phases.prefill is None else "copy" if is_copy else "rounded")
    if kind == "rounded":
        assert phases.prefill.common.seq_lens.tolist() == lens[-1:]
    if kind == "copy":
        with set_config(widened_bytes=0):
            assert not isinstance(
                builder.build(0, batch_of(queries, lens)).phases.prefill, WidenedPlan | None
            )


def test_a_copy_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is a power of two."""
    batch, size = batch_of([2000], [2000]), 16 * PAGE * 2 * 2 * 64 * 2
    for length, limit, pages in (
        (2000, size, 16),
        (2000, size - 1, 0),
        (2000, 0, 0),
        (2049, 2 * size - 1, 0),
    ):
        with set_config(widened_bytes=limit):
            assert copied_pages(builder_of(), batch_of([length], [length])) == pages
    monkeypatch.setenv("ATTNBACKEND_WIDENED_BYTES", str(size - 1))
    assert copied_pages(builder_of(), batch) == 0
    with (
        set_config(widened_bytes=-1),
        pytest.raises(ValueError, match=r"widened_bytes=-1 .*a number from 0 on"),
    ):
        builder_of().build(0, batch)


def test_graphs_hold_no_copy() -> None:
    builder, batch = builder_of(), batch_of([2000], [2000])
    phases = builder.build_for_cudagraph_capture(batch).phases
    assert phases.prefill is None
    assert copied_pages(builder, batch) == 0, "the plan of a replay is of the kernels that are in the graph"
    assert copied_pages(builder, batch_of([2001], [2001])) == 16
    assert copied_pages(builder, batch_of([2000, 1], [2000, 1])) == 17
    support = type(builder).get_cudagraph_support
    always = make_backend("ALWAYS", builder=type("B", (ToyBuilder,), {"cudagraph_support": ALWAYS}))
    cls = compose(prefill=NoFloat8, decode=always).get_builder_cls()
    assert cls.get_cudagraph_support(spec_of(params_of())) is ALWAYS
    assert support(spec_of(params_of())) is resolve_backend("TORCH_SDPA").get_builder_cls().cudagraph_support
    assert builder.plans_each_replay(9) is builder.plans_each_replay(1)


def test_without_lengths_on_the_host_there_is_no_copy() -> None:
    assert builder_of()._prefill.build(0, batch_of([2000], [2000], seq_lens_cpu=None), False) is None


def test_copies_on_which_the_decode_backend_leads_are_its(copies: list[Any]) -> None:
    read: list[torch.dtype] = []

    class LeadsImpl(TorchSDPAImpl):
        def attend(self, query: Any, key: Any, value: Any, kv_cache: Any, *others: Any) -> None:
            read.append(kv_cache.dtype)
            super().attend(query, key, value, kv_cache, *others)

    class LeadsBuilder(TorchSDPABackend.get_builder_cls()):  # type: ignore[misc]
        def leads_on_prompts(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
            return self.params.kv_cache_dtype == "auto" and common_attn_metadata.num_reqs > 1

    leads = make_backend("LEADS", impl=LeadsImpl, builder=LeadsBuilder)
    params = params_of(dtype=torch.float32)
    cache = torch.randn(1024, 2, 16, 2, 64, device=DEVICE).to(torch.float8_e4m3fn)
    for queries in ([40], [40, 3]):
        batch, query = batch_of(queries, queries), torch.randn(sum(queries), 4, 64, device=DEVICE)
        found = []
        for backend in (compose(prefill=NoFloat8, decode=leads), resolve_backend(NAME)):
            plan = backend.get_builder_cls()(params, spec_of(params), None, torch.device(DEVICE)).build(
                0, batch
            )
            found.append(torch.full_like(query, torch.nan))
            backend.get_impl_cls()(params).forward(
                query, None, None, cache, plan, found[-1], OptionalTensors()
            )
        assert torch.equal(*found)
    assert [plan.part for plan in copies] == [0, 0, 1, 0]
    assert read == [torch.float32]


def test_a_row_without_pages_has_pages_of_the_copy(copies: list[Any]) -> None:
    """No row of the copy's table points outside of it."""
    plan = builder_of().build(0, batch_of([1, 200, 0, 7, 0], [77, 300, 5, 7, 0])).phases.prefill
    table = plan.plan.common.block_table
    assert plan.page_rows.tolist() == [0, 0, 0, 2]
    assert plan.page_keys.tolist() == [0, PAGE, 2 * PAGE, 0]
    assert table.tolist() == [[0, 1, 2], [3, 3, 3], [3, 3, 3], [3, 3, 3]]


def test_nothing_is_learned_from_a_call_over_a_copy(copies: list[Any]) -> None:
    """Its kernel was given another cache than the op."""
    impl, queries = resolve_backend(NAME).get_impl_cls()(params_of(dtype=torch.float32)), [40, 3]
    assert isinstance(impl, AttentionImpl)
    cache = torch.zeros(1024, 2, 16, 2, 64, device=DEVICE).to(torch.float8_e4m3fn)
    query, output = (torch.zeros(sum(queries), 4, 64, device=DEVICE) for _ in range(2))
    plan = builder_of(dtype=torch.float32).build(0, batch_of(queries, queries))
    with lessons(query, output) as heard:
        impl.forward(query, None, None, cache, plan, output, OptionalTensors())
    assert copies
    assert not heard


def config_of(**changes: Any) -> AttentionSelectorConfig:
    fields: dict[str, Any] = {
        "device_type": DEVICE, "head_size": 64, "num_heads": 4, "num_kv_heads": 2, "dtype": torch.bfloat16,
        "block_size": 16, "kv_cache_dtype": "fp8", **changes,
    }  # fmt: skip
    return AttentionSelectorConfig.dense(**fields)


def test_it_claims_the_float8_caches_of_its_decode_part(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = resolve_backend(NAME)
    assert cls.supported_kv_cache_dtypes == (
        *NoFloat8.supported_kv_cache_dtypes,
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
    )
    assert not cls.validate_configuration(config_of(per_head_quant_scales=True))
    found = cls.validate_configuration(config_of(per_head_quant_scales=True, kv_cache_dtype="auto"))
    assert [str(reason) for reason in found] == [
        "per_head_quant_scales=True (allowed: False, or a float8 cache)"
    ]
    monkeypatch.setattr("attnbackend.kernels.triton.unavailable_reason", lambda device: "no kernel")
    assert "nothing can be widened here: no kernel" in str(cls.validate_configuration(config_of())[0])
    assert not cls.validate_configuration(config_of(kv_cache_dtype="auto"))


@pytest.mark.parametrize(
    "claims", [{"supported_kv_cache_dtypes": ("bfloat16",)}, {"supported_block_sizes": (16, 32)}]
)
def test_what_a_prompt_backend_must_take_for_copies(claims: dict[str, Any]) -> None:
    claims = {"supported_kv_cache_dtypes": ("auto",), **claims}
    cls = compose(prefill=make_backend("E_PREFILL", **claims), decode=resolve_backend("TORCH_SDPA"))
    assert "fp8" not in cls.supported_kv_cache_dtypes
    assert not cls.supports_per_head_quant_scales


MIXED = (1,) * 20 + (700, 0, 130, 261), (40, 3000) * 10 + (0, 50, 1500, 129)
SEVERAL = (700, 701, 698, 700, 640, 703), (0,) * 6
ONE = (4200,), (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [MIXED, SEVERAL, ONE], ids=["mixed", "several", "one"])
@pytest.mark.parametrize("shape", [(8, 2, 128, 16), (4, 4, 64, 64), (8, 1, 256, 16)], ids=str)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_prompts_are_served_over_copies(
    name: str, shape: tuple[int, ...], lens: Any, copies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens and keys than a tile holds, and decodes beside them on a second stream. On Hopper the
    decode backend reads the copies of several new prompts, and of one of heads of 64.
    """
    monkeypatch.setattr("attnbackend.backends.two_phase._BESIDE_BYTES", 0)
    pair = "FLASH_ATTN+TRITON_ATTN"
    if reason := resolve_backend(pair).unavailable_reason("cuda"):
        pytest.skip(reason)
    heads, kv_heads, size, block_size = shape
    case = AttentionCase(
        query_lens=lens[0], context_lens=lens[1], dtype=torch.bfloat16, kv_cache_dtype=name,
        num_heads=heads, num_kv_heads=kv_heads, head_size=size, block_size=block_size,
        k_scale=(0.3,) * kv_heads, v_scale=tuple(0.7 + i for i in range(kv_heads)), num_padded_tokens=3,
    )  # fmt: skip
    batch = make_batch(case, "cuda")
    op = backend_op(pair, ATTENTION)
    assert op is not None
    op(*op_positional(batch), **op_kwargs(batch))
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    leads = lens is SEVERAL or (lens is ONE and size == 64)
    assert [plan.part for plan in copies] == [int(is_hopper and leads)]
    judge = AttentionJudge(batch)
    judge.hold(batch.output, batch.lse)
    judge.hold(batch.output, None, by="row")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are planned as there; on a CPU the kernel of other devices reads them."""
    monkeypatch.setattr("attnbackend.kernels.triton.mla_hopper_launch.device_problem", lambda device: None)


def test_triton_attn_computes_over_copies_of_its_own(
    on_hopper: None, copies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_hopper_launch, "MIN_TOKENS", 1)
    case = "dtype_float16_cache_fp8_e5m2-*prefill"
    check_backend("TRITON_ATTN", device=DEVICE, only=["numerics"], case=case).assert_ok()
    assert copies


@pytest.mark.parametrize(
    ("queries", "lens", "changes", "pages"),
    [
        ([2000], [2000], {}, 16),
        ([2000], [2000], {"kv_cache_dtype": "auto"}, 0),
        ([2000], [2000], {"sliding_window": 512}, 0),
        ([2000], [2000], {"logits_soft_cap": 9.0}, 0),
        ([2000], [2000], {"head_size": 96}, 0),
        ([2000], [2000], {"dtype": torch.float32}, 0),
        ([300], [300], {}, 0),
        ([2000, *[1] * 14], [2000, *[500] * 14], {}, 16 + 14 * 4),
        ([2000, *[1] * 15], [2000, *[500] * 15], {}, 0),
    ],
)  # fmt: skip
def test_triton_attn_copies_where_its_kernel_for_hopper_serves(
    queries: list[int], lens: list[int], changes: dict[str, Any], pages: int, on_hopper: None
) -> None:
    params = params_of(**changes)
    builder: Any = resolve_backend("TRITON_ATTN").get_builder_cls()(
        params, spec_of(params), None, torch.device(DEVICE)
    )
    batch = batch_of(queries, lens)
    plan = builder.build(0, batch).widened
    assert (0 if plan is None else len(plan.page_rows)) == pages
    assert builder.build_for_cudagraph_capture(batch).widened is None
