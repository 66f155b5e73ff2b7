"""Every backend in every mode that it supports, on a GPU.

200 random steps, each held against the step without graphs bit for bit, and the same without checks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_serving import logits_of_all_steps

from attnbackend import CUDAGraphMode
from attnbackend.cudagraph import GraphSupport, resolve_cudagraph_mode
from attnbackend.runtime.engine_core import EngineCore
from attnbackend.runtime.model_runner import build_runner
from attnbackend.runtime.step_graphs import GraphOptions

pytestmark = pytest.mark.gpu

BACKENDS = (
    "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "TORCH_SDPA", "FLEX_ATTENTION", "FLASH_ATTN+FLASHINFER",
    "FLASH_ATTN+TRITON_ATTN",
)  # fmt: skip
MODES = [mode for mode in CUDAGraphMode if mode is not CUDAGraphMode.NONE]
KINDS = {
    CUDAGraphMode.PIECEWISE: {"pieces"},
    CUDAGraphMode.FULL: {"decode", "mixed"},
    CUDAGraphMode.FULL_DECODE_ONLY: {"decode"},
    CUDAGraphMode.FULL_AND_PIECEWISE: {"decode", "pieces"},
}


@pytest.fixture(scope="module")
def model() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.requires_grad_(False)


def serve(model: Any, backend: str, mode: CUDAGraphMode, debug: bool, compile: bool = False) -> EngineCore:
    sizes = [1, 2, 3, 4, 6, 8, 16, 32, 64]
    runner = build_runner(
        model, backend=backend, num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64, compile=compile,
        graphs=GraphOptions(mode=mode, sizes=sizes, debug=debug),
    )  # fmt: skip
    return EngineCore(
        runner, max_num_seqs=8, max_num_batched_tokens=64, eos_token_ids=(), async_scheduling=False
    )


def lowest_support_of(model: Any, backend: str) -> GraphSupport:
    try:
        runner = build_runner(
            model, backend=backend, num_blocks=20, compile=False, graphs=GraphOptions(mode=CUDAGraphMode.NONE)
        )
    except ValueError as error:
        pytest.skip(f"{backend} does not serve here: {error}")
    (group,) = runner.groups
    return GraphSupport(group.backend.get_builder_cls().get_cudagraph_support(group.spec), backend)


def check(model: Any, backend: str, mode: CUDAGraphMode, compile: bool) -> None:
    checked = serve(model, backend, mode, debug=True, compile=compile)
    wanted = logits_of_all_steps(checked, seed=7, steps=360, vocab_size=256)
    assert len(wanted) > 200
    stats = checked.runner.graphs.stats()  # type: ignore[attr-defined]
    assert stats.keys() == KINDS[mode]
    assert min(stats.values()) > 20
    got = logits_of_all_steps(serve(model, backend, mode, debug=False, compile=compile), 7, 360, 256)
    assert [rows for rows, _ in got] == [rows for rows, _ in wanted]
    for (_, a), (_, b) in zip(got, wanted, strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_steps_from_graphs_are_those_without_or_the_mode_is_refused(
    model: Any, backend: str, mode: CUDAGraphMode
) -> None:
    support = lowest_support_of(model, backend)
    try:
        resolve_cudagraph_mode(mode, support, splits_attention=True)
    except ValueError:
        with pytest.raises(ValueError, match=f"cudagraph_mode={mode.name} cannot run here"):
            serve(model, backend, mode, debug=False)
        return
    check(model, backend, mode, compile=False)


@pytest.mark.parametrize(
    ("backend", "mode"),
    [("TRITON_ATTN", CUDAGraphMode.FULL_AND_PIECEWISE), ("FLASH_ATTN", CUDAGraphMode.FULL)],
)
def test_compiled_models_too(model: Any, backend: str, mode: CUDAGraphMode, fresh_compiler: None) -> None:
    lowest_support_of(model, backend)
    check(model, backend, mode, compile=True)
