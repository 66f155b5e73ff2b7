"""The pass that puts rotation, head norms and cache write as one op into graphs.

Shape legend: T tokens, H query heads, K key-value heads, D head size, R rotated elements.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graph_lines import renumbered
from model_zoo import EagerReference, make_model
from program_steps import greedy, prompt_logits
from rope_steps import (
    DEVICE,
    D,
    H,
    Step,
    T,
    attend,
    attend_late,
    check,
    model_layout,
    norm_by_hand,
    norms,
    plain,
    rotate,
    rotated_late,
    run,
    step_arguments,
    turn,
    turn_chunks,
)
from torch import Tensor
from toy_backends import make_backend

import attnbackend
from attnbackend import ops
from attnbackend.fx_passes import (
    FuseRopeCacheWrite,
    GraphPass,
    PassManager,
    PassReport,
    RemoveNoOps,
    SelectBackend,
    UndoFunctionalization,
    cache_writes,
    graph_text,
    retarget,
)
from attnbackend.fx_passes.rope_forms import match_rotated_heads
from attnbackend.integrations.programs import ModelStep, export_model
from attnbackend.ops.rope_write import rope_problem
from attnbackend.testing import assert_within_rule

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(rope_problem(DEVICE) is not None, reason=str(rope_problem(DEVICE))),
]


CUTS: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda x: x.split(split_size=D // 2, dim=-1),
    "split_with_sizes": lambda x: x.split_with_sizes(split_sizes=[D // 2, D // 2], dim=-1),
    "narrow": lambda x: [x.narrow(dim=-1, start=i * D // 2, length=D // 2) for i in range(2)],
}


@pytest.mark.parametrize("cut", CUTS)
def test_rotations_whose_arguments_have_names(cut: str) -> None:
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = CUTS[cut](x)
        return (x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]).permute(dims=(0, 1, 2))

    class Match(GraphPass):
        name = "match"

        def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
            found = match_rotated_heads(graph_module.graph.output_node().args[0][0])  # type: ignore
            assert found.heads.source.op == "placeholder"
            return PassReport(self.name)

    compiled = attnbackend.compile(rotated, passes=[Match()], compiler="eager", fullgraph=True)
    compiled(torch.ones(T, H, D), torch.ones(T, D), torch.ones(T, D))


def reshaped(*given):  # type: ignore[no-untyped-def]
    """The output lies as the query did, and after the pass as the fused op gives it."""
    return model_layout(*given, like_query=True).transpose(0, 1).reshape(-1)


def spelt_by_name(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    def turn(x: Tensor) -> Tensor:
        low, high = torch.chunk(input=x, chunks=2, dim=-1)
        turned = torch.cat(tensors=[torch.neg(input=high), low], dim=-1)
        straight = torch.mul(input=x, other=cos.unsqueeze(dim=1))
        return torch.add(input=straight, other=torch.mul(turned, other=sin[:, None]))

    return attend(turn(q), turn(k), v, cache, batch)


def partial(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    q, k = (
        torch.cat([rotate(x[..., :16], cos[:, :16], sin[:, :16]), x[..., 16:]], -1).contiguous()
        for x in (q, k)
    )
    return attend(q, k, v, cache, batch)


@pytest.mark.parametrize("step", [plain, model_layout, reshaped, spelt_by_name, partial, norms, rotated_late])
def test_forms_that_are_fused(step: Step) -> None:
    report = check(step, fused=True)
    assert ("2 head norms" in report) == (step is norms)


def test_the_graph_before_and_after() -> None:
    seen: list[str] = []

    class Look(GraphPass):
        name = "look"

        def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
            seen.append(graph_text(graph_module))
            return PassReport("look")

    run(model_layout, [SelectBackend("TORCH_SDPA"), Look(), FuseRopeCacheWrite(), Look()])
    assert_expected_inline(
        renumbered(seen[0]),
        """\
l_q_: input
l_k_: input
l_v_: input
l_cos_: input
l_sin_: input
l_cache_: input
l_batch_slot_mapping: input
l_batch_query_start_loc: input
l_batch_seq_lens: input
l_batch_block_table: input
%0 = getitem(l_q_, None)
%1 = transpose(%0, 1, 2)
%2 = getitem(l_k_, None)
%3 = transpose(%2, 1, 2)
%4 = getitem(l_v_, None)
%5 = transpose(%4, 1, 2)
%6 = getitem(l_cos_, None)
%7 = unsqueeze(%6, 1)
%8 = getitem(l_sin_, None)
%9 = unsqueeze(%8, 1)
%10 = chunk(%1, 2, dim=-1)
%11 = getitem(%10, 0)
%12 = getitem(%10, 1)
%13 = neg(%12)
%14 = cat([%13, %11], dim=-1)
%15 = mul(%9, %14)
%16 = mul(%1, %7)
%17 = add(%15, %16)
%18 = chunk(%3, 2, dim=-1)
%19 = getitem(%18, 0)
%20 = getitem(%18, 1)
%21 = neg(%20)
%22 = cat([%21, %19], dim=-1)
%23 = mul(%9, %22)
%24 = mul(%3, %7)
%25 = add(%23, %24)
%26 = getitem(%17, 0)
%27 = transpose(%26, 0, 1)
%28 = getitem(%25, 0)
%29 = transpose(%28, 0, 1)
%30 = getitem(%5, 0)
%31 = transpose(%30, 0, 1)
%32 = attnbackend::kv_cache_update(%29, %31, !l_cache_, l_batch_slot_mapping)
%33 = new_empty(%27, [5, 4, 32])
%34 = attnbackend::torch_sdpa_forward(%27, %29, %31, l_cache_, !%33, l_batch_query_start_loc, l_batch_seq_lens, l_batch_block_table, scale=0.2)
return [%33]""",
    )
    assert_expected_inline(
        renumbered(seen[1]),
        """\
l_q_: input
l_k_: input
l_v_: input
l_cos_: input
l_sin_: input
l_cache_: input
l_batch_slot_mapping: input
l_batch_query_start_loc: input
l_batch_seq_lens: input
l_batch_block_table: input
%0 = getitem(l_q_, None)
%1 = transpose(%0, 1, 2)
%2 = getitem(l_k_, None)
%3 = transpose(%2, 1, 2)
%4 = getitem(l_v_, None)
%5 = transpose(%4, 1, 2)
%6 = getitem(l_cos_, None)
%7 = getitem(l_sin_, None)
%8 = getitem(%5, 0)
%9 = transpose(%8, 0, 1)
%10 = aten::permute(%1, [0, 2, 1, 3])
%11 = aten::select.int(%10, 0, 0)
%12 = aten::permute(%3, [0, 2, 1, 3])
%13 = aten::select.int(%12, 0, 0)
%14 = aten::select.int(%6, 0, 0)
%15 = aten::select.int(%7, 0, 0)
%16 = attnbackend::rope_kv_cache_update(%11, %13, %9, %14, %15, !l_cache_, l_batch_slot_mapping)
%17 = getitem(%16, 0)
%18 = getitem(%16, 1)
%19 = new_empty(%17, [5, 4, 32])
%20 = attnbackend::torch_sdpa_forward(%17, %18, %9, l_cache_, !%19, l_batch_query_start_loc, l_batch_seq_lens, l_batch_block_table, scale=0.2)
return [%19]""",
    )


def other_angles(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    return attend(rotate(q, cos, sin), rotate(k, cos + 1, sin), v, cache, batch)


def angles_of_heads(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    cos_TKD = torch.stack([cos, cos * 2], 1)
    k = k * cos_TKD + turn(k) * sin[:, None]
    return attend(rotate(q, cos, sin), k, v, cache, batch)


def turned_the_other_way(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    def other(x: Tensor) -> Tensor:
        return x * cos[:, None] + torch.cat([x[..., D // 2 :], -x[..., : D // 2]], -1) * sin[:, None]

    return attend(other(q), other(k), v, cache, batch)


def interleaved(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    def other(x: Tensor) -> Tensor:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * cos[:, None] + turned * sin[:, None]

    return attend(other(q), other(k), v, cache, batch)


def other_halves(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    """Turned somewhere else than in the middle."""

    def other(x: Tensor) -> Tensor:
        return x * cos[:, None] + torch.cat([-x[..., 12:], x[..., :12]], -1) * sin[:, None]

    return attend(other(q), other(k), v, cache, batch)


def keys_needed_elsewhere(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    k = rotate(k, cos, sin)
    return attend(rotate(q, cos, sin), k, v, cache, batch), k * 2


def scaled_after(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    return attend(rotate(q, cos, sin) * 1.5, rotate(k, cos, sin), v, cache, batch)


def subtracted(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    k = k * cos[:, None] - turn(k) * sin[:, None]
    return attend(rotate(q, cos, sin), k, v, cache, batch)


def written_between(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    turned_q, turned_k = rotate(q, cos, sin), rotate(k, cos, sin)
    cos.add_(1)
    return attend(turned_q, turned_k, v, cache, batch)


def query_written_late(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    return attend_late(q, k, v, cos, sin, cache, batch, lambda: q[:2].mul_(2))


def angles_written_late(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    return attend_late(q, k, v, cos, sin, cache, batch, lambda: sin.mul_(2))


def no_reader(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    k = rotate(k, cos, sin)
    ops.kv_cache_update(k, v, cache, batch.slot_mapping)
    return rotate(q, cos, sin)


def one_angle(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    cos, sin = cos[:1], sin[:1]
    return attend(rotate(q, cos, sin), rotate(k, cos, sin), v, cache, batch)


def in_another_type(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    q, k = (rotate(x.double(), cos.double(), sin.double()).float() for x in (q, k))
    return attend(q, k, v, cache, batch)


def no_rotation(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
    return attend(q * 2, k * 2, v, cache, batch)


def returned_as_it_lay(*given):  # type: ignore[no-untyped-def]
    return model_layout(*given, like_query=True)


def viewed_as_it_lay(*given):  # type: ignore[no-untyped-def]
    return model_layout(*given, like_query=True).transpose(0, 1).view(-1) * 1


REFUSED: dict[Step, str] = {
    other_angles: "rotated by different angles",
    angles_of_heads: "differs between heads",
    turned_the_other_way: "neg is looked for",
    interleaved: "no factor that turns halves",
    other_halves: "does not turn the halves",
    keys_needed_elsewhere: "is used by",
    scaled_after: "where add is looked for",
    subtracted: "sub is looked for|is sub where add",
    written_between: "may write memory between|is used by",
    query_written_late: "mul_ may write memory between",
    angles_written_late: "mul_ may write memory between",
    no_reader: "no attention reads the cache",
    one_angle: "one row for all tokens|differs between heads or requests",
    in_another_type: "where add is looked for",
    no_rotation: "where add is looked for",
    returned_as_it_lay: "is returned, and would have other strides",
    viewed_as_it_lay: "does not take other strides",
}


@pytest.mark.parametrize("step", REFUSED)
def test_forms_that_are_left_alone_with_the_reason(step: Step) -> None:
    import re

    report = check(step, fused=False)
    assert re.search(REFUSED[step], report), report


def test_a_norm_that_is_none_is_not_taken_for_one() -> None:
    """Mean over all heads instead of each: the rotation alone is fused."""

    def step(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
        weight = cos[0].abs() + 0.5
        q, k = (weight * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 1e-6)) for x in (q, k))
        return attend(rotate(q, cos, sin), rotate(k, cos, sin), v, cache, batch)

    assert "head norms" not in check(step, fused=True)


def test_a_backend_with_a_cache_of_its_own_kind_keeps_its_writer() -> None:
    class OwnCache(attnbackend.AttentionBackend, abstract=True):
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_writes, "StandardCacheBackend", OwnCache)
        _, _, report = run(plain, [SelectBackend("TRITON_ATTN"), FuseRopeCacheWrite()])
    assert "TRITON_ATTN has a cache of its own kind" in report


def test_fused_writes_are_not_left_to_a_backend_with_a_cache_of_its_own_kind() -> None:
    with attnbackend.registry_scope():
        toy = make_backend("TOY_OF_ITS_OWN_KIND", supported_head_sizes=(D,))
        attnbackend.register_backend("TOY_OF_ITS_OWN_KIND")(toy)
        compiled: Any = attnbackend.compile(
            plain, passes=[SelectBackend("TORCH_SDPA"), FuseRopeCacheWrite()], compiler="aot_eager"
        )
        compiled(*step_arguments())
        with pytest.raises(ValueError, match="1 writes are attnbackend::rope_kv_cache_update"):
            retarget(compiled, "TOY_OF_ITS_OWN_KIND")
        if DEVICE == "cpu":
            assert retarget(compiled, "CPU_ATTN")


def test_two_backends_over_one_standard_cache_are_fused() -> None:
    expected, expected_cache, _ = run(plain)
    passes: list[GraphPass] = [SelectBackend("TORCH_SDPA+TRITON_ATTN"), FuseRopeCacheWrite()]
    actual, cache, report = run(plain, passes)
    assert "1 changes" in report, report
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cache, expected_cache, rtol=1e-5, atol=1e-6)


def test_the_functionalised_form_is_left_alone_with_advice() -> None:
    program = torch.export.export(Module(), step_arguments()).run_decompositions()
    (report,) = PassManager([FuseRopeCacheWrite()]).run_on(program)
    assert "run UndoFunctionalization first" in str(report)
    reports = PassManager([FuseRopeCacheWrite(), UndoFunctionalization()]).run_on(program)
    assert [len(report.changes) for report in reports] == [2, 1], "undone first, whatever the list's order"
    given, expected = step_arguments(), step_arguments()
    torch.testing.assert_close(program.module()(*given), plain(*expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(given[5], expected[5], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "undone"), [("post_grad_custom_pre_pass", 2), ("pre_grad_custom_pass", 0)], ids=["post", "pre"]
)
def test_inductor_s_hooks_run_it(hook: str, undone: int) -> None:
    """After AOTAutograd calls are functionalised and norms spelt out; before it they are as in the model."""
    import torch._inductor.config as inductor_config

    expected, expected_cache, _ = run(norms)
    given = step_arguments()
    passes = [UndoFunctionalization(), SelectBackend("TORCH_SDPA"), FuseRopeCacheWrite(), RemoveNoOps()]
    manager = PassManager(passes)
    with inductor_config.patch({hook: manager.as_inductor_pass()}):
        actual = torch.compile(norms, fullgraph=True)(*given)
    assert [len(report.changes) for report in manager.reports[:3]] == [undone, 1, 1], str(manager)
    assert "2 head norms" in str(manager.reports[2])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(given[5], expected_cache, rtol=1e-5, atol=1e-6)


class Module(torch.nn.Module):
    def forward(self, *args: Any) -> Any:
        return plain(*args)


def random_step(seed: int) -> tuple[Step, bool]:
    """A step in some of the spellings, with or without a fault that forbids the fusion."""
    rng = random.Random(seed)
    turned = rng.choice([turn, turn_chunks])
    layout, sin_first, swap, normed = (rng.random() < 0.5 for _ in range(4))
    fault = rng.choice([None, None, "scale", "angle", "use", "rest"])
    rotated = rng.choice([D, 16])

    def spell(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = (x * cos, sin * turned(x)) if swap else (cos * x, turned(x) * sin)
        return parts[1] + parts[0] if sin_first else parts[0] + parts[1]

    def whole(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
        x = norm_by_hand(x, weight) if normed else x
        axis = 1
        if layout:
            x, axis = x[None].transpose(1, 2), 0
        cos, sin = cos[:, :rotated].unsqueeze(axis), sin[:, :rotated].unsqueeze(axis)
        if rotated < D:
            rest = x[..., rotated:] * 2 if fault == "rest" else x[..., rotated:]
            x = torch.cat([spell(x[..., :rotated], cos, sin), rest], -1)
        else:
            x = spell(x, cos, sin)
        return x[0].transpose(0, 1) if layout else x

    def step(q, k, v, cos, sin, cache, batch):  # type: ignore[no-untyped-def]
        weight = sin[0].abs() + 0.5
        turned_q = whole(q, cos, sin + 1 if fault == "angle" else sin, weight)
        turned_k = whole(k, cos, sin, weight)
        out = attend(turned_q * 2 if fault == "scale" else turned_q, turned_k, v, cache, batch)
        return (out, turned_k.sum()) if fault == "use" else out

    return step, fault is None or (fault == "rest" and rotated == D)


@pytest.mark.parametrize("seed", range(10))
def test_random_spellings_keep_their_meaning(seed: int) -> None:
    step, fused = random_step(seed)
    check(step, fused=fused)


@pytest.mark.skipif(DEVICE == "cuda", reason="models run on the CPU, where Triton must be interpreted")
@pytest.mark.parametrize(
    ("name", "norms", "fused"),
    [
        ("qwen3", 2, 2),
        ("smollm3", 0, 1),
        pytest.param("phi3", 0, 2, marks=pytest.mark.slow),
        pytest.param("glm", 0, 0, marks=pytest.mark.slow),
    ],
)
def test_every_layer_of_a_model_that_should_match_does(name: str, norms: int, fused: int) -> None:
    """glm rotates pairs that lie side by side; smollm3's second layer has no positions at all.

    Others are in `test_passes_on_models.py`.
    """
    model, prompt = make_model(name), list(range(3, 12))
    reference = EagerReference(model).logits(prompt)
    program = export_model(model, passes=[])
    reports = PassManager([SelectBackend("CPU_ATTN"), FuseRopeCacheWrite()]).run_on(program)
    assert len(reports[-1].changes) == fused, str(reports[-1])
    assert sum(f"{norms} head norms" in change.before for change in reports[-1].changes) == (
        2 if norms else 0
    )
    assert len(reports[-1].near_misses) == 2 - fused
    caches = ModelStep(model).new_caches(9)
    logits = prompt_logits(program.module(), prompt, caches)
    assert_within_rule(logits, *reference, what=name)
    unfused = ModelStep(model).new_caches(9)
    with torch.no_grad():
        expected = greedy(ModelStep(model), prompt, 3, unfused)
    assert greedy(program.module(), prompt, 3, caches) == expected
    for a, b in zip(caches, unfused, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
