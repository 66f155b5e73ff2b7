"""Latent backends over libraries, tested without a GPU on stand-ins for the libraries."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from mla_library_fakes import FakeLatents, FakePrefill, fake_flash_mla, fake_flashinfer, fake_vllm_ops
from recorded_calls import recorded

from attnbackend.backends.mla import flash_attn_mla, flashinfer_mla, flashmla, library, prefill_flash_attn
from attnbackend.backends.mla.cutlass_mla import CutlassMLABackend
from attnbackend.backends.mla.flash_attn_mla import FlashAttentionMLABackend
from attnbackend.backends.mla.flashinfer_mla import FlashInferMLABackend, FlashInferMLAMetadataBuilder
from attnbackend.backends.mla.flashmla import FlashMLABackend, each_token_alone, row_of_tokens
from attnbackend.backends.mla.flashmla_sparse import FlashMLASparseBackend, slots_of_positions
from attnbackend.backends.mla.library import LibraryMLABackend, problem_of
from attnbackend.backends.mla.prefill import MLAPrefillConfig
from attnbackend.backends.mla.prefill_flash_attn import FlashAttentionPrefill
from attnbackend.backends.mla.prefill_flashinfer import FlashInferPrefill
from attnbackend.impl import AttentionParams, MLADims, MLATensors
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import BatchLimits, CommonAttentionMetadata
from attnbackend.mla_metadata import MLAPrefillMetadata
from attnbackend.testing import assert_within_rule
from attnbackend.testing.conformance import Status, check_backend
from attnbackend.testing.conformance.latent import steps
from attnbackend.testing.reference_mla import plain_torch_mla, reference_mla
from attnbackend.types import AttentionCGSupport, LSEBase

CPU = torch.device("cpu")
BACKENDS = [
    FlashAttentionMLABackend, FlashInferMLABackend, FlashMLABackend, FlashMLASparseBackend, CutlassMLABackend,
]  # fmt: skip
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins run on a CPU")


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-ins, and no memory of what was found about others."""
    pytest.importorskip("triton")
    flashinfer = fake_flashinfer()
    for name, module in (
        ("flashinfer", flashinfer),
        ("flashinfer.mla", flashinfer),
        ("flash_mla", fake_flash_mla()),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", fake_vllm_ops())
    monkeypatch.setattr(flash_attn_mla, "installed", lambda: [FakeLatents()])
    monkeypatch.setattr(library, "_FOUND", {})
    monkeypatch.setattr(library, "_WRITES_ZEROS", set())
    monkeypatch.setattr(library, "_MANY", 2)
    flashmla.flash_mla.cache_clear()
    monkeypatch.setattr(flashinfer_mla.LatentPlanner, "_note_copy", lambda *_: None)
    return flashinfer


@pytest.mark.parametrize("heads", [16, 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_backend_does_beside_the_library_is_right(
    backend: type[LibraryMLABackend], heads: int
) -> None:
    """The trial batch has requests of several tokens, without tokens, and with fewer keys than tokens."""
    block_size = backend.supported_block_sizes[-1]
    block_size = block_size if isinstance(block_size, int) else 64
    assert problem_of(backend, torch.bfloat16, block_size, heads, device="cpu") is None


@pytest.mark.parametrize("backend", BACKENDS[:4])
def test_graphs_replay_on_longer_and_padded_batches(
    backend: type[LibraryMLABackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the conformance kit does it on a GPU; every plan of a batch that a graph may hold fits the graph."""
    body = {
        "get_name": staticmethod(lambda: f"STAND_IN_{backend.get_name()}"),
        "supported_device_types": ("cpu",),
        "unavailable_reason": classmethod(lambda cls, device: None),
    }  # fmt: skip
    stand_in = types.new_class("StandIn", (backend,), {}, lambda ns: ns.update(body))
    monkeypatch.setattr(steps, "recorder", lambda device: recorded)
    report = check_backend(stand_in, only=["graphs"], case="plain-captured")
    report.assert_ok()
    assert report.count(Status.SKIPPED) == 0


def test_flashinfer_of_hopper_leaves_only_padding_to_do(
    libraries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries.BatchMLAPagedAttentionWrapper, "kernels", "fa3")
    monkeypatch.setattr(FlashInferMLABackend.get_impl_cls(), "finish", None)
    assert problem_of(FlashInferMLABackend, torch.bfloat16, 64, 16, device="cpu") is None


def test_flashmla_of_an_older_version_returns_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = sys.modules["flash_mla"].flash_mla_with_kvcache

    def older(*args: Any, softmax_scale: float, causal: bool) -> Any:
        return attend(*args, softmax_scale=softmax_scale, causal=causal)

    monkeypatch.setattr(sys.modules["flash_mla"], "flash_mla_with_kvcache", older)
    assert problem_of(FlashMLABackend, torch.bfloat16, 64, 16, device="cpu") is None


@pytest.mark.parametrize(
    ("fault", "words"), [("writes_nothing", "NaN in places"), ("wrong_lse", "LSE is off")]
)
def test_a_library_that_is_wrong_is_found_out(
    fault: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLatents, "fault", fault)
    assert words in str(problem_of(FlashAttentionMLABackend, torch.bfloat16, 64, 16, device="cpu"))


def test_a_wrong_base_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashInferMLABackend, "lse_base", LSEBase.E)
    assert "LSE is off" in str(problem_of(FlashInferMLABackend, torch.bfloat16, 64, 16, device="cpu"))


def test_a_library_that_refuses_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("page size 16 is not supported\nand more")

    monkeypatch.setattr(FakeLatents, "attend", refuse)
    found = problem_of(FlashAttentionMLABackend, torch.bfloat16, 16, 16, device="cpu")
    assert found == "RuntimeError: page size 16 is not supported"


def params(block_size: int = 64) -> AttentionParams:
    return AttentionParams(
        num_heads=16, num_kv_heads=1, head_size=576, scale=0.05, dtype=torch.bfloat16, kv_cache_dtype="auto",
        block_size=block_size, device_type="cpu", mla=MLADims(kv_lora_rank=512, qk_rope_head_dim=64),
    )  # fmt: skip


def batch(queries: list[int], lens: list[int], width: int = 4) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    table = torch.arange(1, len(lens) * width + 1, dtype=torch.int32).view(len(lens), width)
    return CommonAttentionMetadata.from_tensors(
        starts, torch.tensor(lens, dtype=torch.int32), table, num_tokens=int(starts[-1]), block_size=64
    )


def test_a_flashinfer_graph_keeps_its_memory(libraries: Any) -> None:
    p = params()
    limits = BatchLimits(max_num_seqs=8, max_num_tokens=64, max_model_len=256)
    builder = FlashInferMLAMetadataBuilder(p, spec_of(p), limits, CPU)
    captured = builder.build_for_cudagraph_capture(batch([1, 1, 1], [5, 70, 256])).decode
    replayed = builder.build(0, batch([1, 1, 1], [6, 71, 100])).decode
    assert captured.planner is replayed.planner
    assert len(libraries.made) == 1
    assert libraries.made[0].plans == 2
    other = builder.build(0, batch([1, 1], [6, 71])).decode
    assert other.planner is not captured.planner


def test_a_flashinfer_graph_needs_limits() -> None:
    p = params()
    builder = FlashInferMLAMetadataBuilder(p, spec_of(p), None, CPU)
    with pytest.raises(ValueError, match="limits=None"):
        builder.build_for_cudagraph_capture(batch([1], [5]))


def test_flash_attention_captures_with_the_longest_bound() -> None:
    p = params()
    limits = BatchLimits(max_num_seqs=8, max_num_tokens=64, max_model_len=1000)
    builder = FlashAttentionMLABackend.get_builder_cls()(p, spec_of(p), limits, CPU)
    plan = builder.build_for_cudagraph_capture(batch([1, 1], [5, 6])).decode
    assert (plan.max_query_len, plan.max_seq_len) == (1, 1000)


@pytest.mark.parametrize("writes_zeros", [False, True])
def test_nothing_is_launched_where_nothing_is_left_to_do(
    writes_zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of single tokens may be padded with requests without keys, whatever it was captured on."""
    monkeypatch.setattr(FakeLatents, "writes_zeros", writes_zeros)
    assert problem_of(FlashAttentionMLABackend, torch.bfloat16, 64, 16, device="cpu") is None
    launched: list[int] = []
    monkeypatch.setattr(
        "attnbackend.kernels.triton.finish_attention", lambda out, *_, **__: launched.append(len(out))
    )
    p, limits = params(), BatchLimits(max_num_seqs=8, max_num_tokens=64, max_model_len=1000)
    builder = FlashAttentionMLABackend.get_builder_cls()(p, spec_of(p), limits, CPU)
    impl = FlashAttentionMLABackend.get_impl_cls()(p)
    query, cache = torch.randn(3, 16, 576).bfloat16(), torch.randn(9, 64, 576).bfloat16()
    full, empty, unknown = batch([1, 1], [5, 130]), batch([1, 1], [5, 0]), batch([1, 1], [5, 130])
    unknown = unknown.replace(query_start_loc_cpu=None, seq_lens_cpu=None)
    plans = [builder.build(0, full), builder.build(0, empty), builder.build_for_cudagraph_capture(full)]
    decodes = [*(plan.decode for plan in plans), builder.build_decode(unknown)]
    for plan, tokens, lse in (
        (decodes[0], 2, None), (decodes[1], 2, None), (decodes[2], 2, None), (decodes[3], 2, None),
        (decodes[0], 3, None), (decodes[0], 2, torch.empty(2, 16)),
    ):  # fmt: skip
        launched.append(0)
        q, output = query[:tokens], torch.empty(tokens, 16, 512).bfloat16()
        impl.forward_mqa(q[..., :512], q[..., 512:], cache, plan, output, MLATensors(lse=lse))
    unseen = [] if writes_zeros else [2]
    assert launched == [0, 0, *unseen, 0, *unseen, 0, 2, 0, 3, 0, 2]


def test_flashmla_takes_uniform_batches_as_they_are() -> None:
    """A batch of two tokens each, in one call of two tokens a request, and token by token."""
    p = params()
    builder = FlashMLABackend.get_builder_cls()(p, spec_of(p), None, CPU)
    plans = builder.build_decode(batch([2, 2], [5, 130])), builder.build(0, batch([2, 2], [5, 130])).decode
    assert [plan.tokens_each for plan in plans] == [0, 2]
    query, cache = torch.randn(4, 16, 576).bfloat16(), torch.randn(9, 64, 576).bfloat16()
    outputs = [torch.full((4, 16, 512), torch.nan).bfloat16() for _ in plans]
    for plan, output in zip(plans, outputs, strict=True):
        impl = FlashMLABackend.get_impl_cls()(p)
        impl.forward_mqa(query[..., :512], query[..., 512:], cache, plan, output, MLATensors())
    torch.testing.assert_close(*outputs)


def test_flashmla_of_another_shape_of_out_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = sys.modules["flash_mla"].flash_mla_with_kvcache

    def other(q: torch.Tensor, *args: Any, out: torch.Tensor | None = None, **options: Any) -> Any:
        if out is not None and out.shape != (*q.shape[:3], 512):
            raise RuntimeError("out must have shape (batch_size, seqlen_q, num_heads, head_size_v)")
        return attend(q, *args, out=out, **options)

    monkeypatch.setattr(sys.modules["flash_mla"], "flash_mla_with_kvcache", other)
    test_flashmla_takes_uniform_batches_as_they_are()


def test_tokens_as_requests_of_their_own() -> None:
    made = batch([2, 0, 1, 3], [5, 9, 0, 2])
    assert row_of_tokens(made.query_start_loc, 8).tolist() == [0, 0, 2, 3, 3, 3, 3, 3]
    lens, table = each_token_alone(made, 8)
    assert lens.tolist() == [4, 5, 0, 0, 1, 2, 0, 0]
    assert table[:, 0].tolist() == [1, 1, 9, 13, 13, 13, 13, 13]


def test_positions_as_slots() -> None:
    made = batch([1, 2], [70, 3])
    topk = torch.tensor([[0, 65, -1, 70], [1, 2, 0, -1], [2, -1, 1, 3], [0, 1, 2, 3]], dtype=torch.int32)
    slots = slots_of_positions(topk, made, 64, 64).tolist()
    assert slots == [[64, 129, -1, -1], [321, -1, 320, -1], [322, -1, 321, -1], [-1, -1, -1, -1]]
    apart = slots_of_positions(topk, made, 64, 192).tolist()
    assert apart == [[192, 385, -1, -1], [961, -1, 960, -1], [962, -1, 961, -1], [-1, -1, -1, -1]]


def test_blocks_of_layers_that_take_turns_in_memory() -> None:
    p, made = params(), batch([1, 2], [70, 3])
    plan = FlashMLASparseBackend.get_builder_cls()(p, spec_of(p), None, CPU).build_decode(made)
    query, cache = torch.randn(3, 16, 576).bfloat16(), torch.randn(9, 64, 576).bfloat16()
    among = torch.full((9, 3, 64, 576), torch.nan).bfloat16()
    among[:, 1] = cache
    tensors = MLATensors(topk_indices=torch.tensor([[0, 69, 3], [0, 1, -1], [2, 1, 0]], dtype=torch.int32))
    outputs = [torch.full((3, 16, 512), torch.nan).bfloat16() for _ in range(2)]
    for kv_cache, output in zip((cache, among[:, 1]), outputs, strict=True):
        impl = FlashMLASparseBackend.get_impl_cls()(p)
        impl.forward_mqa(query[..., :512], query[..., 512:], kv_cache, plan, output, tensors)
    assert torch.equal(*outputs)


def test_packed_rows_of_selected_tokens() -> None:
    from mla_cases import expected, make_batch

    made = make_batch(
        [(1, 70), (2, 40)], heads=16, rank=512, rope=64, block_size=64, dtype=torch.bfloat16,
        cache_dtype=torch.uint8, topk=24,
    )  # fmt: skip
    common = CommonAttentionMetadata.from_tensors(
        made.query_start_loc, made.seq_lens, made.block_table, num_tokens=3, block_size=64
    )
    p = params()
    plan = FlashMLASparseBackend.get_builder_cls()(p, spec_of(p), None, CPU).build_decode(common)
    output, lse = made.empty_results()
    impl = FlashMLASparseBackend.get_impl_cls()(AttentionParams(**vars(p) | {"scale": made.scale}))
    impl.forward_mqa(
        *made.queries, made.kv_cache, plan, output, MLATensors(lse=lse, topk_indices=made.topk_indices)
    )
    exact, plain = expected(made, torch.float64), expected(made, torch.bfloat16)
    assert_within_rule(output, exact[0], plain[0])
    assert_within_rule(lse, exact[1], plain[1], what="lse")


def prefills() -> list[Any]:
    return [FlashAttentionPrefill, FlashInferPrefill]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cls", prefills())
def test_prompts(cls: Any, causal: bool, on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences without queries, without keys, with fewer keys than queries, and padding behind the last."""
    monkeypatch.setattr(prefill_flash_attn, "provider_for", lambda config: FakePrefill())
    rng = torch.Generator().manual_seed(0)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 8, 12], [0, 7, 9, 9, 11]))
    query, key = (torch.randn(n, 4, 48, generator=rng).bfloat16() for n in (14, 11))
    value = torch.randn(11, 4, 56, generator=rng).bfloat16()[..., 32:]
    output, lse = torch.full((14, 4, 24), torch.nan).bfloat16(), torch.full((14, 4), torch.nan)
    prefill = cls(MLAPrefillConfig.of(query, value), 0.2, CPU)
    metadata = MLAPrefillMetadata(
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=7, causal=causal,
        cu_seqlens_q_cpu=cu_q if on_host else None, cu_seqlens_k_cpu=cu_k if on_host else None,
    )  # fmt: skip
    prefill(query, key, value, prefill.planned(metadata), output, lse)
    plain, exact = (
        attend.mha(query, key, value, cu_q, cu_k, scale=0.2, causal=causal)
        for attend in (plain_torch_mla, reference_mla)
    )
    for what, got, e, p in zip(("output", "lse"), (output, lse), exact, plain, strict=True):
        assert_within_rule(got, e, p, what=what)


def test_the_trial_of_prompts_finds_a_library_out(monkeypatch: pytest.MonkeyPatch) -> None:
    query, value = torch.zeros(1, 4, 48).bfloat16(), torch.zeros(1, 4, 24)
    config = MLAPrefillConfig.of(query, value)
    assert prefill_flash_attn._problem(FakePrefill(), config) is None
    silent = FakePrefill()
    monkeypatch.setattr(silent, "attend", lambda q, *_: torch.zeros(q.shape[:2]))
    assert "off by inf" in str(prefill_flash_attn._problem(silent, config))


@pytest.mark.parametrize("backend", BACKENDS)
def test_claims(backend: type[LibraryMLABackend]) -> None:
    assert backend.get_builder_cls().cudagraph_support >= AttentionCGSupport.UNIFORM_BATCH
    assert "GPU" in str(backend.unavailable_reason("cpu"))
    assert backend.get_kv_cache_shape(3, 64, 1, 576) == (3, 64, 576)
