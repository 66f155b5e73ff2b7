"""All passes over whole models, decomposed as compilers get them: each matches in every layer or in none."""

from __future__ import annotations

import pytest
import torch
from latent_zoo import make_latent_model
from model_zoo import EagerReference, make_model
from program_steps import prompt_logits

from attnbackend.fx_passes import (
    FuseLatentRopeCacheWrite,
    FuseOutputQuantization,
    FuseRopeCacheWrite,
    GraphPass,
    PassManager,
    QuantizeQueries,
    RecogniseAttention,
    RemoveNoOps,
    SelectBackend,
    UndoFunctionalization,
)
from attnbackend.integrations.programs import ModelStep, export_model
from attnbackend.kernels.triton import unavailable_reason
from attnbackend.testing import assert_within_rule

LAYERS, PROMPT = 2, list(range(3, 12))
DENSE = {
    "undo_functionalization": 2 * LAYERS, "select_backend": 2 * LAYERS, "fuse_rope_cache_write": LAYERS,
}  # fmt: skip
LATENT = {
    "undo_functionalization": 2 * LAYERS, "select_backend": LAYERS, "fuse_latent_rope_cache_write": LAYERS,
}  # fmt: skip
"""Changes by pass; of all others none. `TORCH_MLA` has no writer of its own to select."""


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(
    unavailable_reason("cpu") is not None, reason="models run on the CPU, where Triton must be interpreted"
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "deepseek_v3"])
def test_every_pass_matches_in_each_layer_or_in_none(name: str) -> None:
    is_latent = name.startswith("deepseek")
    model = (make_latent_model if is_latent else make_model)(name)
    program = export_model(model, passes=[]).run_decompositions()
    backend = "TORCH_MLA" if is_latent else "CPU_ATTN"
    passes: list[GraphPass] = [
        UndoFunctionalization(), RecogniseAttention(), SelectBackend(backend),
        FuseRopeCacheWrite(), FuseLatentRopeCacheWrite(), FuseOutputQuantization(), QuantizeQueries(),
        RemoveNoOps(),
    ]  # fmt: skip
    reports = PassManager(passes).run_on(program)
    counts = {report.pass_name: len(report.changes) for report in reports}
    expected = LATENT if is_latent else DENSE
    assert counts == dict.fromkeys(counts, 0) | expected, "\n".join(map(str, reports))
    caches, plain = ModelStep(model).new_caches(9), ModelStep(model).new_caches(9)
    logits = prompt_logits(program.module(), PROMPT, caches)
    assert_within_rule(logits, *EagerReference(model).logits(PROMPT), what=name)
    with torch.no_grad():
        prompt_logits(ModelStep(model), PROMPT, plain)
    for a, b in zip(caches, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert bool(a.any())
