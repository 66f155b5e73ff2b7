"""Served models whose layers are fused, as Dynamo traces them: where eps is a number that may change."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from latent_zoo import make_latent_model
from model_zoo import make_model

from attnbackend import Engine, SamplingParams
from attnbackend.compiler import make_compiler
from attnbackend.fx_passes import FuseLatentRopeCacheWrite, FuseRopeCacheWrite, GraphPass, MergeLinears
from attnbackend.integrations import transformers as transformers_models
from attnbackend.integrations.transformers import TransformersModel
from attnbackend.kernels.triton import unavailable_reason

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [list(range(3, 12)), [7]]

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(
        unavailable_reason(DEVICE) is not None, reason=f"Triton: {unavailable_reason(DEVICE)}"
    ),
]


@pytest.fixture(autouse=True)
def _no_code_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_models, "make_compiler", partial(make_compiler, compiler="aot_eager"))
    monkeypatch.setattr(transformers_models, "take_linears", lambda *_: None)  # as on a GPU


def generate(served: TransformersModel, compile: bool) -> list[list[int]]:
    engine = Engine(
        served,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        num_blocks=20,
        compile=compile,
        cudagraph_mode="NONE",
    )
    results = engine.generate(PROMPTS, SamplingParams(max_tokens=5, ignore_eos=True))
    return [list(result.token_ids) for result in results]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("qwen3", "2 head norms, rotation"),
        ("deepseek_v3", "norm of latents, rotation"),
    ],
)
def test_every_graph_of_a_layer_is_fused_and_tokens_stay(name: str, what: str) -> None:
    """Each kind of layer is a graph, of several tokens, of one, and of decodes: each writes a cache once.

    On a CPU the queries of one, which is of picked tokens, are others than its keys.
    """
    is_latent = name.startswith("deepseek")
    model = (make_latent_model if is_latent else make_model)(name).to(DEVICE)
    expected = generate(TransformersModel(model), compile=False)
    passes: list[GraphPass] = [FuseRopeCacheWrite(), FuseLatentRopeCacheWrite()]
    own, other = reversed(passes) if is_latent else passes
    served = TransformersModel(model, passes=[own, other, MergeLinears()], merges_linears=False)
    assert generate(served, compile=True) == expected
    by_pass = [[r for r in served.compiler.reports if r.pass_name == p.name] for p in (own, other)]
    fused = [report for report in by_pass[0] if report.changes]
    assert len(fused) >= 2
    for report in fused:
        assert [change.before.split(", attnbackend")[0] for change in report.changes] == [what], str(report)
        assert not report.near_misses, str(report)
    picked = [str(report) for report in by_pass[0] if report not in fused]
    assert len(picked) == (DEVICE == "cpu" and not is_latent)
    assert all("rotated by different angles" in report for report in picked)
    assert not any(report.changes or report.near_misses for report in by_pass[1])
    for report in (r for r in served.compiler.reports if r.pass_name == MergeLinears.name):
        assert len(report.changes) == 2, str(report)
        assert not report.near_misses, str(report)
