"""Every backend in every mode that it supports, on a GPU.

200 random steps, each held against the step without graphs bit for bit, and the same without checks.
"""

from __future__ import annotations

import copy
import gc
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from latent_zoo import LIBRARY_SIZES, make_latent_model
from model_zoo import VOCAB_SIZE
from random_serving import logits_of_all_steps
from sparse_latent_model import SparseLatentModel

from attnbackend import AttentionCGSupport, CUDAGraphMode, Engine, SamplingParams, set_config
from attnbackend.backends import widened
from attnbackend.cudagraph import GraphSupport, resolve_cudagraph_mode
from attnbackend.runtime.engine_core import EngineCore
from attnbackend.runtime.model_runner import build_runner
from attnbackend.runtime.step_graphs import GraphOptions

pytestmark = pytest.mark.gpu


class Subject(NamedTuple):
    backend: str
    block_size: int = 16
    kind: str = "dense"
    kv_cache_dtype: str = "auto"

    def __str__(self) -> str:
        others = (self.block_size, 16), (self.kv_cache_dtype, "auto")
        return "-".join([self.backend, *(str(value) for value, usual in others if value != usual)])


DENSE = [
    Subject(name)
    for name in (
        "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "TORCH_SDPA", "FLEX_ATTENTION", "FLASH_ATTN+FLASHINFER",
        "FLASH_ATTN+TRITON_ATTN",
    )
]  # fmt: skip
LATENT = [
    Subject(name, block_size, "sparse" if name.endswith("SPARSE") else "latent")
    for name, block_size in (
        ("TRITON_MLA", 16), ("TRITON_MLA", 64), ("FLASHINFER_MLA", 16), ("FLASH_ATTN_MLA", 16),
        ("FLASHMLA", 64), ("TORCH_MLA", 16), ("TRITON_MLA_SPARSE", 64), ("FLASHMLA_SPARSE", 64),
        ("TORCH_MLA_SPARSE", 16),
    )
]  # fmt: skip
FLOAT8 = [
    Subject(name, kv_cache_dtype="fp8") for name in ("FLASH_ATTN", "TRITON_ATTN", "FLASH_ATTN+TRITON_ATTN")
]
MODES = [mode for mode in CUDAGraphMode if mode is not CUDAGraphMode.NONE]
KINDS = {
    CUDAGraphMode.PIECEWISE: {"pieces"},
    CUDAGraphMode.FULL: {"decode", "mixed"},
    CUDAGraphMode.FULL_DECODE_ONLY: {"decode"},
    CUDAGraphMode.FULL_AND_PIECEWISE: {"decode", "pieces"},
}


@cache
def model_of(kind: str) -> Any:
    if kind == "sparse":
        return SparseLatentModel("cuda", torch.bfloat16)
    if kind == "latent":
        return make_latent_model("deepseek_v2_lite", **LIBRARY_SIZES).to("cuda", torch.bfloat16)
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=128, max_position_embeddings=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.requires_grad_(False)


def serve(
    subject: Subject, mode: CUDAGraphMode, debug: bool = False, compile: bool = False, drafts: int = 0
) -> EngineCore:
    sizes = None if drafts or mode is CUDAGraphMode.NONE else [1, 2, 3, 4, 6, 8, 16, 32, 64]
    runner = build_runner(
        model_of(subject.kind), backend=subject.backend, block_size=subject.block_size, num_blocks=200,
        kv_cache_dtype=subject.kv_cache_dtype, max_num_seqs=8, max_num_batched_tokens=64, compile=compile,
        num_drafts=drafts, graphs=GraphOptions(mode=mode, sizes=sizes, debug=debug),
    )  # fmt: skip
    speculation = {"speculative": "ngram", "num_speculative_tokens": drafts} if drafts else {}
    return EngineCore(
        runner, max_num_seqs=8, max_num_batched_tokens=64, eos_token_ids=(), async_scheduling=False,
        **speculation,  # type: ignore[arg-type]
    )  # fmt: skip


def lowest_support_of(subject: Subject) -> GraphSupport:
    try:
        (group,) = serve(subject, CUDAGraphMode.NONE).runner.groups  # type: ignore[attr-defined]
    except ValueError as error:
        if "cannot serve" not in str(error):
            raise
        pytest.skip(f"{subject} does not serve here: {error}")
    return GraphSupport(group.backend.get_builder_cls().get_cudagraph_support(group.spec), subject.backend)


def check(subject: Subject, mode: CUDAGraphMode, **options: Any) -> None:
    with set_config(mla_context_tokens=16):  # The context of prompts in several chunks.
        checked = serve(subject, mode, debug=True, **options)
        wanted = logits_of_all_steps(checked, seed=7, steps=360, vocab_size=VOCAB_SIZE)
        got = logits_of_all_steps(serve(subject, mode, **options), 7, 360, VOCAB_SIZE)
    assert len(wanted) > 200
    stats = checked.runner.graphs.stats()  # type: ignore[attr-defined]
    assert stats.keys() == KINDS[mode]
    assert min(stats.values()) > 20
    assert [rows for rows, _ in got] == [rows for rows, _ in wanted]
    for (_, a), (_, b) in zip(got, wanted, strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def check_or_refused(subject: Subject, mode: CUDAGraphMode) -> None:
    support = lowest_support_of(subject)
    try:
        resolve_cudagraph_mode(mode, support, splits_attention=True)
    except ValueError:
        with pytest.raises(ValueError, match=f"cudagraph_mode={mode.name} cannot run here"):
            serve(subject, mode)
        return
    check(subject, mode)


@pytest.mark.parametrize("subject", [*DENSE, *LATENT], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_steps_from_graphs_are_those_without_or_the_mode_is_refused(
    subject: Subject, mode: CUDAGraphMode
) -> None:
    check_or_refused(subject, mode)


@pytest.mark.parametrize("subject", FLOAT8, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_float8_caches_too(subject: Subject, mode: CUDAGraphMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair widens every prompt that is in no whole graph, however short."""
    copies, make = [], widened.widened_cache

    def counted(*given: Any) -> torch.Tensor:
        copies.append(given)
        return make(*given)

    monkeypatch.setattr(widened, "_WORTH", 0)
    monkeypatch.setattr(widened, "widened_cache", counted)
    # FLASH_ATTN alone rounds queries to float8, which it does where it was allowed to.
    with set_config(flash_attn_fp8=subject.backend == "FLASH_ATTN"):
        check_or_refused(subject, mode)
    assert bool(copies) == (mode is not CUDAGraphMode.FULL and "+" in subject.backend)


@pytest.mark.parametrize("subject", [*DENSE, *LATENT], ids=str)
def test_decodes_with_drafts_run_from_graphs_too(subject: Subject) -> None:
    if lowest_support_of(subject).level < AttentionCGSupport.UNIFORM_BATCH:
        pytest.skip("decodes of several tokens are in no graph of this backend")
    check(subject, CUDAGraphMode.FULL_AND_PIECEWISE, drafts=3)


@pytest.mark.parametrize(
    ("subject", "mode"),
    [
        (Subject("TRITON_ATTN"), CUDAGraphMode.FULL_AND_PIECEWISE),
        (Subject("FLASH_ATTN"), CUDAGraphMode.FULL),
        (Subject("FLASH_ATTN+TRITON_ATTN"), CUDAGraphMode.FULL_AND_PIECEWISE),
        (Subject("FLASHINFER_MLA", kind="latent"), CUDAGraphMode.FULL_AND_PIECEWISE),
    ],
    ids=str,
)
def test_compiled_models_too(subject: Subject, mode: CUDAGraphMode, fresh_compiler: None) -> None:
    lowest_support_of(subject)
    check(subject, mode, compile=True)


@pytest.mark.parametrize("mode", [None, CUDAGraphMode.PIECEWISE])
def test_memory_comes_back_with_the_engine(mode: CUDAGraphMode | None) -> None:
    model = model_of("dense")
    gc.collect()
    before, blocks = torch.cuda.memory_allocated(), 20_000
    engine = Engine(
        model, backend="TRITON_ATTN", num_blocks=blocks, max_num_seqs=4, compile=False, cudagraph_mode=mode
    )
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=5))
    caches = engine.runner.kv_caches.values()  # type: ignore[attr-defined]
    num_bytes = sum(cache.nbytes for cache in caches)
    del engine, caches
    assert torch.cuda.memory_allocated() - before < num_bytes / 4, "cuBLAS keeps 64 MiB"


def test_a_gpu_that_is_not_the_current_one_serves() -> None:
    """Events and libraries go by the current device's stream: the wrong one waits for nothing."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = copy.deepcopy(model_of("dense")).to("cuda:1")
    prompts = [[5 + i, 6, 7] * (i + 1) for i in range(6)]
    params, tokens = SamplingParams(max_tokens=40, ignore_eos=True), []
    for current in (1, 0):
        with torch.cuda.device(current):
            engine = Engine(model, backend="TRITON_ATTN", num_blocks=200, max_num_seqs=4, compile=False)
            tokens.append([output.token_ids for output in engine.generate(prompts, params)])
            assert torch.cuda.current_device() == current
        assert engine.is_async
    assert tokens[0] == tokens[1]
