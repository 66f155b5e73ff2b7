"""Rotation, latent norm and cache write of latent attention as one op: kernel, op, and the pass.

Shape legend: T tokens, E hidden size, H heads, L kv_lora_rank, R qk_rope_head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graph_lines import renumbered
from latent_zoo import make_latent_model
from model_zoo import EagerReference
from program_steps import greedy, prompt_logits
from torch import Tensor

import attnbackend
from attnbackend import MLADims, ops
from attnbackend.fx_passes import (
    FuseLatentRopeCacheWrite,
    GraphPass,
    PassManager,
    PassReport,
    SelectBackend,
    UndoFunctionalization,
    graph_text,
)
from attnbackend.integrations.programs import ModelStep, export_model
from attnbackend.kernels.triton import unavailable_reason
from attnbackend.layers import BatchTensors, BoundLayer, DecodeTensors, MLAAttention
from attnbackend.layers.rotary import rotate
from attnbackend.ops.latent_rope_write import rope_mla_kv_cache_update
from attnbackend.testing import assert_within_rule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, H, SLOTS = 5, 3, [17, -1, 40, 2, 63]

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(
        unavailable_reason(DEVICE) is not None, reason=f"Triton: {unavailable_reason(DEVICE)}"
    ),
]


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float32
    interleaved: bool = True
    norm: bool = True
    cache: str = "auto"
    rank: int = 40
    rope: int = 16


CASES = {
    "plain": Case(),
    "halves, no norm": Case(interleaved=False, norm=False),
    "bfloat16": Case(torch.bfloat16),
    "float16, halves": Case(torch.float16, interleaved=False, rope=24),
    "fp8 cache": Case(torch.bfloat16, cache="fp8_e4m3"),
    "fp8 cache of the other kind, no norm": Case(norm=False, cache="fp8_e5m2"),
    "packed rows": Case(torch.bfloat16, cache="fp8_ds_mla", rank=512, rope=64),
}


def arguments(case: Case, device: str) -> dict[str, Any]:
    """Parts of projections where they lie, and cosines as parts of complex numbers."""
    torch.manual_seed(0)
    query = torch.randn(T, H, 24 + case.rope).to(case.dtype)
    row = (torch.randn(T, case.rank + case.rope) * 2).to(case.dtype)
    turns = torch.polar(torch.ones(T, case.rope // 2), torch.rand(T, case.rope // 2) * 6)
    packed, fp8 = case.cache == "fp8_ds_mla", case.cache.startswith("fp8")
    width = 656 if packed else case.rank + case.rope
    cache = torch.full((4, 16, width), 0x7F if fp8 else float("nan"))
    given = {
        "query_rope": query[..., 24:], "latent": row[:, : case.rank], "k_pe": row[:, case.rank :],
        "cos": turns.real, "sin": turns.imag, "kv_cache": cache.to(torch.uint8 if fp8 else case.dtype),
        "slot_mapping": torch.tensor(SLOTS),
    }  # fmt: skip
    if case.norm:
        given["weight"] = torch.rand(case.rank).to(case.dtype) + 0.5
    if fp8 and not packed:
        given["k_scale"] = torch.tensor([0.25 if case.cache == "fp8_e5m2" else 0.004])
    given = {name: x.to(device) for name, x in given.items()}
    options = {"interleaved": case.interleaved, "kv_cache_dtype": case.cache}
    return given | options | ({"eps": 1e-3} if case.norm else {})


def by_hand(given: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """The rotated query and key and the normalised latent by their definitions, in ``dtype``."""
    q, k, latent, cos, sin = (given[n].to(dtype) for n in ("query_rope", "k_pe", "latent", "cos", "sin"))

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, y = (x[..., ::2], x[..., 1::2]) if given["interleaved"] else x.chunk(2, -1)
        return torch.cat([x * cos - y * sin, y * cos + x * sin], -1)

    if "weight" in given:
        factor = torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + 1e-3)
        latent = latent * factor * given["weight"].to(dtype)
    return [turn(q, cos[:, None], sin[:, None]), turn(k, cos, sin), latent]


@pytest.mark.parametrize("name", CASES)
def test_the_op_rotates_normalises_and_writes(name: str, device: str) -> None:
    case, given = CASES[name], arguments(CASES[name], device)
    expected = given["kv_cache"].clone()
    q, k, kv_c = rope_mla_kv_cache_update(**given)
    assert kv_c.numel() == (T * case.rank if case.norm else 0)
    kv_c = kv_c if case.norm else given["latent"]
    exact, plain = by_hand(given, torch.float64), by_hand(given, case.dtype)
    for what, out, *wanted in zip(("query", "key", "latent"), (q, k, kv_c), exact, plain, strict=True):
        assert_within_rule(out, *wanted, what=what, by="row")
    assert q.is_contiguous()
    options = {k: given[k] for k in ("k_scale", "kv_cache_dtype") if k in given}
    with attnbackend.set_config(backend="TORCH_MLA" if device == "cpu" else "TRITON_MLA"):
        ops.mla_kv_cache_update(kv_c, k, expected, given["slot_mapping"], **options)
    assert torch.equal(given["kv_cache"].view(torch.uint8), expected.view(torch.uint8))


def test_opcheck() -> None:
    given = arguments(Case(), DEVICE)
    given["kv_cache"].zero_()
    torch.library.opcheck(rope_mla_kv_cache_update, (), given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cos": torch.ones(T, 16)}, r"shape of cos is \(5, 16\); expected \(5, 16 / 2\)"),
        ({"weight": torch.ones(3)}, r"shape of weight is \(3,\)"),
        ({"query_rope": torch.ones(T, H, 8)}, "shape of query_rope"),
        ({"slot_mapping": torch.ones(2, dtype=torch.int64)}, "slot_mapping"),
        ({"kv_cache": torch.ones(4, 16, 9)}, "shape of kv_cache"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_mla_kv_cache_update(**arguments(Case(), DEVICE) | {k: x.to(DEVICE) for k, x in change.items()})


# --- the pass ----------------------------------------------------------------------------

DIMS = MLADims(kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20)
Step = Callable[..., Any]


def make_layer(*, interleaved: bool = True) -> MLAAttention:
    torch.manual_seed(3)
    layer = MLAAttention(48, H, DIMS, q_lora_rank=None, interleaved=interleaved).requires_grad_(False).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer.to(DEVICE)


def step_arguments(decode: bool) -> tuple[Any, ...]:
    """Two requests of two and one new tokens, or of one each; the last token is padding."""
    torch.manual_seed(1)
    tokens, starts = (3, [0, 1, 2]) if decode else (4, [0, 2, 3])
    slots = [16 + 5, 48 + 7, -1] if decode else [16 + 4, 16 + 5, 48 + 7, -1]
    angles = torch.rand(tokens, 8) * 6
    ints = [torch.tensor(x, dtype=torch.int32) for x in (starts, [6, 8], [[1], [3]])]
    batch = [x.to(DEVICE) for x in (torch.tensor(slots), *ints)]
    cache = torch.randn(4, 16, 48).to(DEVICE)
    hidden = torch.randn(tokens, 48).to(DEVICE)
    tensors = DecodeTensors(*batch) if decode else BatchTensors(*batch)
    return hidden, angles.cos().to(DEVICE), angles.sin().to(DEVICE), tensors, BoundLayer(cache)


def run(step: Step, decode: bool, passes: list[GraphPass] | None) -> tuple[Any, Tensor, str]:
    """Result, cache and report, with passes or eagerly."""
    given = step_arguments(decode)
    if passes is None:
        return step(*given), given[-1].kv_cache, ""
    compiled: Any = attnbackend.compile(step, passes=passes, compiler="aot_eager", fullgraph=True)
    result = compiled(*given)
    reports = compiled.attnbackend_compiler.reports
    return result, given[-1].kv_cache, str(next(r for r in reports if r.pass_name.startswith("fuse")))


def check(step: Step, decode: bool, *, fused: bool) -> str:
    """With the pass and without: same results, same cache. Returns the pass's report."""
    expected, expected_cache, _ = run(step, decode, None)
    actual, cache, report = run(step, decode, [SelectBackend(), FuseLatentRopeCacheWrite()])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache, expected_cache, rtol=1e-4, atol=1e-5)
    assert ("1 changes" in report) == fused, report
    return report


@pytest.mark.parametrize("decode", [False, True], ids=["mixed", "decode"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
def test_both_forms_of_the_layer_are_fused(interleaved: bool, decode: bool) -> None:
    report = check(make_layer(interleaved=interleaved).attend, decode, fused=True)
    assert "norm of latents, rotation" in report


def test_the_graph_after() -> None:
    seen: list[str] = []

    class Look(GraphPass):
        name = "look"

        def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
            seen.append(graph_text(graph_module))
            return PassReport(self.name)

    backend = "TORCH_MLA" if DEVICE == "cpu" else None
    passes = [SelectBackend(backend), FuseLatentRopeCacheWrite(), Look()]
    run(make_layer().attend, True, passes)
    lines = renumbered(seen[0]).splitlines()
    start = next(i for i, line in enumerate(lines) if "kv_a_proj" in line and "linear" in line)
    if DEVICE == "cpu":
        assert_expected_inline(
            "\n".join(lines[start : start + 8]),
            """\
%5 = linear(l_hidden_states_, l_self_modules_kv_a_proj_with_mqa_parameters_weight_, None)
%6 = split(%5, [32, 16], dim=-1)
%7 = getitem(%6, 0)
%8 = getitem(%6, 1)
%9 = attnbackend::rope_mla_kv_cache_update(%4, %7, %8, l_cos_, l_sin_, !l_layer_kv_cache, l_batch_slot_mapping, interleaved=True, weight=l_self_modules_kv_a_layernorm_parameters_weight_, eps=1e-06, k_scale=None, kv_cache_dtype='auto', group=-1)
%10 = getitem(%9, 0)
%11 = getitem(%9, 1)
%12 = getitem(%9, 2)""",
        )


def attend(q: Tensor, row: Tensor, k: Tensor, layer: BoundLayer, batch: BatchTensors) -> Tensor:
    """Queries [T, H, 16] in the latent space, beside rows without norm."""
    ops.mla_kv_cache_update(row, k, layer.kv_cache, batch.slot_mapping)
    out = q.new_empty(len(q), H, 32)
    ops.mla_attention(
        row[:, None].expand(-1, H, -1).contiguous(), q, layer.kv_cache, out, batch.query_start_loc,
        batch.seq_lens, batch.block_table, scale=0.2,
    )  # fmt: skip
    return out


def heads_and_row(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query [T, H, 16], key [T, 16] and latent [T, 32] made of hidden states."""
    q = (x[:, None, :16] * torch.arange(1.0, H + 1, device=x.device)[:, None]).contiguous()
    return q, x[:, 16:32], torch.cat([x[:, 32:], x[:, :16]], -1)


def no_norm(x, cos, sin, batch, layer):  # type: ignore[no-untyped-def]
    q, k, row = heads_and_row(x)
    q, k = rotate(q, cos[:, None], sin[:, None], interleaved=True), rotate(k, cos, sin, interleaved=True)
    return attend(q, row, k, layer, batch)


def other_order(x, cos, sin, batch, layer):  # type: ignore[no-untyped-def]
    """Sums and products the other way round."""
    q, k, row = heads_and_row(x)

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x[..., :8], x[..., 8:]
        return torch.cat((cos * a - sin * b, sin * a + cos * b), dim=-1)

    return attend(turn(q, cos.unsqueeze(1), sin.unsqueeze(1)), row, turn(k, cos, sin), layer, batch)


@pytest.mark.parametrize("step", [no_norm, other_order])
def test_spellings_that_are_fused(step: Step) -> None:
    assert "norm of latents" not in check(step, True, fused=True)


def other_angles(x, cos, sin, batch, layer):  # type: ignore[no-untyped-def]
    q, k, row = heads_and_row(x)
    q = rotate(q, cos[:, None] + 1, sin[:, None], interleaved=True)
    return attend(q, row, rotate(k, cos, sin, interleaved=True), layer, batch)


def other_pairs(x, cos, sin, batch, layer):  # type: ignore[no-untyped-def]
    q, k, row = heads_and_row(x)
    q = rotate(q, cos[:, None], sin[:, None], interleaved=False)
    return attend(q, row, rotate(k, cos, sin, interleaved=True), layer, batch)


def turned_back(x, cos, sin, batch, layer):  # type: ignore[no-untyped-def]
    q, k, row = heads_and_row(x)

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)

    return attend(turn(q, cos[:, None], sin[:, None]), row, turn(k, cos, sin), layer, batch)


def read_before_the_write(x, cos, sin, batch, layer):  # type: ignore[no-untyped-def]
    q, k, row = heads_and_row(x)
    q, k = rotate(q, cos[:, None], sin[:, None], interleaved=True), rotate(k, cos, sin, interleaved=True)
    total = k.sum()
    return attend(q, row, k, layer, batch), total


def written_between(x, cos, sin, batch, layer):  # type: ignore[no-untyped-def]
    q, k, row = heads_and_row(x)
    q, k = rotate(q, cos[:, None], sin[:, None], interleaved=True), rotate(k, cos, sin, interleaved=True)
    x.add_(1)
    return attend(q, row, k, layer, batch)


def angles_written_late(x, cos, sin, batch, layer):  # type: ignore[no-untyped-def]
    q, k, row = heads_and_row(x)
    ops.mla_kv_cache_update(row, rotate(k, cos, sin, interleaved=True), layer.kv_cache, batch.slot_mapping)
    sin.mul_(2)
    out = x.new_empty(len(x), H, 32)
    ops.mla_attention(
        row[:, None].expand(-1, H, -1).contiguous(), rotate(q, cos[:, None], sin[:, None], interleaved=True),
        layer.kv_cache, out, *batch[1:], scale=0.2,
    )  # fmt: skip
    return out


def no_rotation(x, cos, sin, batch, layer):  # type: ignore[no-untyped-def]
    q, k, row = heads_and_row(x)
    return attend(q, row, k, layer, batch)


def no_reader(x, cos, sin, batch, layer):  # type: ignore[no-untyped-def]
    _, k, row = heads_and_row(x)
    k = rotate(k, cos, sin, interleaved=True)
    ops.mla_kv_cache_update(row, k, layer.kv_cache, batch.slot_mapping)
    return x + 1


REFUSED: dict[Step, str] = {
    other_angles: "different angles",
    other_pairs: "other pairs",
    turned_back: "is add where sub is looked for",
    read_before_the_write: "is used by",
    written_between: "may write memory",
    angles_written_late: "may write memory",
    no_rotation: "where cat is looked for",
    no_reader: "no attention reads the cache",
}


@pytest.mark.parametrize("step", REFUSED)
def test_forms_that_are_left_alone_with_the_reason(step: Step) -> None:
    import re

    report = check(step, True, fused=False)
    assert re.search(REFUSED[step], report), report


def test_the_functionalised_form_is_undone_first() -> None:
    class Module(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return no_norm(*args[:4], BoundLayer(args[4]))

    def tensors_of(decode: bool) -> tuple[Any, ...]:
        *given, layer = step_arguments(decode)
        return (*given, layer.kv_cache)

    program = torch.export.export(Module(), tensors_of(True)).run_decompositions()
    (report,) = PassManager([FuseLatentRopeCacheWrite()]).run_on(program)
    assert "run UndoFunctionalization first" in str(report)
    reports = PassManager([UndoFunctionalization(), FuseLatentRopeCacheWrite()]).run_on(program)
    assert [len(report.changes) for report in reports] == [2, 1], reports
    given, expected = tensors_of(True), tensors_of(True)
    torch.testing.assert_close(program.module()(*given), Module()(*expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given[-1], expected[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cuda", reason="models run on the CPU, where Triton must be interpreted")
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3_halves"])
def test_every_layer_of_a_model_matches(name: str) -> None:
    model, prompt = make_latent_model(name), list(range(3, 12))
    program = export_model(model, passes=[])
    reports = PassManager([SelectBackend("TORCH_MLA"), FuseLatentRopeCacheWrite()]).run_on(program)
    assert [change.before.startswith("norm of latents") for change in reports[-1].changes] == [True] * 2
    assert not reports[-1].near_misses
    caches, unfused = ModelStep(model).new_caches(9), ModelStep(model).new_caches(9)
    logits = prompt_logits(program.module(), prompt, caches)
    assert_within_rule(logits, *EagerReference(model).logits(prompt), what=name)
    with torch.no_grad():
        expected = greedy(ModelStep(model), prompt, 3, unfused)
    assert greedy(program.module(), prompt, 3, caches) == expected
    for a, b in zip(caches, unfused, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
