"""Attention that writes float8 itself where its output is only wanted so.

Shape legend: T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graph_lines import renumbered
from op_cases import DEVICE, require
from torch import Tensor

import attnbackend
from attnbackend import ops
from attnbackend.fx_passes import FuseOutputQuantization, GraphPass, PassReport, SelectBackend, graph_text

T, H, K, D = 5, 4, 2, 32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def attend(q: Tensor, cache: Tensor, out: Tensor | None = None, **options: Any) -> Tensor:
    """Two requests of three and one tokens, one token of padding; zeros there."""
    out = torch.empty_like(q) if out is None else out
    ints = {"dtype": torch.int32, "device": q.device}
    starts, lens = torch.tensor([0, 3, 4], **ints), torch.tensor([20, 9], **ints)
    table = torch.tensor([[1, 2], [3, 0]], **ints)
    ops.attention(q, None, None, cache, out, starts, lens, table, scale=0.2, **options)
    return out


def given(backend: str | None = None) -> list[Tensor]:
    """On a GPU for the backend that needs one where there is one."""
    torch.manual_seed(0)
    tensors = [torch.randn(T, H, D), torch.randn(4, 2, 16, K, D) * 3, torch.tensor([0.003])]
    return [x.to(DEVICE if backend == "TRITON_ATTN" else "cpu") for x in tensors]


Step = Callable[[Tensor, Tensor, Tensor], Any]


def run(step: Step, backend: str | None = "CPU_ATTN", **options: Any) -> tuple[Any, str, str]:
    """Compiled with the pass; its report and the graph after it."""
    options = options or {"in_kernel_only": False}
    seen: list[str] = []

    class Look(GraphPass):
        name = "look"

        def run(self, graph_module: torch.fx.GraphModule) -> PassReport:
            seen.append(graph_text(graph_module))
            return PassReport(self.name)

    passes: list[GraphPass] = [FuseOutputQuantization(**options), Look()]
    passes += [SelectBackend(backend)] if backend else []
    compiled: Any = attnbackend.compile(step, passes=passes, compiler="aot_eager", fullgraph=True)
    result = compiled(*given(backend))
    reports = compiled.attnbackend_compiler.reports
    return result, str(next(r for r in reports if r.pass_name == "fuse_output_quantization")), seen[0]


def plain(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    return (attend(q, cache).flatten(1).float() / scale).clamp(-448.0, 448.0).to(E4M3)


def reciprocal(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    out = attend(q, cache).view(1, T, H * D)
    return torch.clamp(scale.reciprocal() * out, min=-448.0, max=448.0).to(E4M3).squeeze(0)


def other_format(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    number = scale[0]
    return (attend(q, cache) / number).clamp(-57344.0, 57344.0).transpose(0, 1).to(E5M2)


@pytest.mark.parametrize(
    ("step", "backend"),
    [(step, name) for step in (plain, reciprocal, other_format) for name in ("CPU_ATTN", "TORCH_SDPA")]
    + [(plain, None), (plain, "TRITON_ATTN")],
)
def test_quantisation_that_the_op_does_itself(step: Step, backend: str | None) -> None:
    if backend:
        require(backend)
    with attnbackend.set_config(backend=backend or "CPU_ATTN"):
        expected = step(*given(backend))
        actual, report, text = run(step, backend, in_kernel_only=backend == "TRITON_ATTN")
    assert "1 changes" in report, report
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    same = (actual.view(torch.uint8) == expected.view(torch.uint8)).float().mean()
    assert same == 1.0 if step is not reciprocal else same > 0.98, (
        "a product rounds otherwise than a quotient"
    )
    # The few that differ do so by one step of the format: 1/8 of a value in e4m3.
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.14, atol=0.02)
    assert bool((expected.float().abs() == torch.finfo(expected.dtype).max).any()) == (expected.dtype == E4M3)
    assert "clamp" not in text


def test_the_graph_after() -> None:
    _, _, text = run(plain)
    assert_expected_inline(
        "\n".join(renumbered(text).splitlines()[-6:]),
        """\
%2 = tensor([20, 9], dtype=torch.int32, device=device(type='cpu'))
%3 = tensor([[1, 2], [3, 0]], dtype=torch.int32, device=device(type='cpu'))
%4 = aten::empty_like(%0, dtype=torch.float8_e4m3fn)
%5 = attnbackend::cpu_attn_forward(l_q_, None, None, l_cache_, !%4, %1, %2, %3, scale=0.2, output_scale=l_scale_)
%6 = flatten(%4, 1)
return [%6]""",
    )


def to_float8(x: Tensor, limit: float = 448.0) -> Tensor:
    return x.clamp(-limit, limit).to(E4M3)


def group_by_group(q: Tensor, cache: Tensor, scale: Tensor) -> Any:
    """Of 16 elements, with scales guarded before the division."""
    groups = attend(q, cache).view(T, -1, 16)
    scales = groups.abs().float().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    return to_float8(groups / scales).view(T, H * D), scales.squeeze(-1)


def head_by_head(q: Tensor, cache: Tensor, scale: Tensor) -> Any:
    """In float32, by the reciprocal, scales returned as they are without the guard; the shape of a batch."""
    heads = attend(q, cache).unflatten(-1, (1, -1)).float()
    scales = heads.abs().amax(dim=-1, keepdim=True) * (1 / 448.0)
    guarded = torch.where(scales == 0, 1.0, scales)
    return to_float8(guarded.reciprocal() * heads).view(1, T, H * D), scales


@pytest.mark.parametrize(
    ("step", "backend"),
    [(group_by_group, "CPU_ATTN"), (group_by_group, "TRITON_ATTN"), (head_by_head, "TRITON_ATTN")],
)
def test_quantisation_group_by_group(step: Step, backend: str) -> None:
    require(backend)
    with attnbackend.set_config(backend=backend):
        expected, expected_scales = step(*given(backend))
    (actual, scales), report, text = run(step, backend, in_kernel_only=backend == "TRITON_ATTN")
    assert "1 changes" in report, report
    assert (actual.dtype, actual.shape) == (E4M3, expected.shape)
    # Scales are of outputs summed in another order; a value may round to the format's next: 1/8 in e4m3.
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.14, atol=0.02)
    assert not {"clamp", "amax", "abs"} & {line.split(" = ")[-1].split("(")[0] for line in text.splitlines()}
    assert bool((scales == 0).any()), "no token of padding: a weak test"


def test_the_graph_after_groups() -> None:
    _, _, text = run(group_by_group)
    assert_expected_inline(
        "\n".join(renumbered(text).splitlines()[-9:]),
        """\
%5 = aten::reshape(%4, [-1, 8, 16])
%6 = aten::select.int(%5, 2, 0)
%7 = aten::empty_like(%6, dtype=torch.float32, memory_format=torch.contiguous_format)
%8 = attnbackend::cpu_attn_forward(l_q_, None, None, l_cache_, !%4, %1, %2, %3, scale=0.2, output_block_scale=!%7)
%9 = aten::reshape(%7, [5, 8, 1])
%10 = view(%4, 5, -1, 16)
%11 = view(%10, 5, 128)
%12 = squeeze(%9, -1)
return [%11, %12]""",
    )


def test_what_a_backend_does_after_its_kernel_is_left_to_the_graph() -> None:
    _, report, _ = run(plain, "CPU_ATTN", in_kernel_only=True)
    assert "0 changes" in report
    assert "CPU_ATTN quantises with one scale after its kernel" in report, report


def test_which_backends_quantise_in_their_kernel() -> None:
    triton, cpu = (attnbackend.resolve_backend(name) for name in ("TRITON_ATTN", "CPU_ATTN"))
    assert [triton.quantizes_in_kernel(128, group) for group in (None, 16, 128, 256)] == [
        True,
        True,
        True,
        False,
    ]
    assert not cpu.quantizes_in_kernel(128, None)
    both = attnbackend.resolve_backend("FLASH_ATTN+TRITON_ATTN")
    assert not both.quantizes_in_kernel(128, None), "a prompt's kernel does not"


def lse_is_asked_for(q: Tensor, cache: Tensor, scale: Tensor) -> Any:
    lse = torch.empty(T, H)
    out = attend(q, cache, lse=lse)
    return (out / scale).clamp(-448.0, 448.0).to(E4M3), lse


def read_elsewhere(q: Tensor, cache: Tensor, scale: Tensor) -> Any:
    out = attend(q, cache)
    return (out / scale).clamp(-448.0, 448.0).to(E4M3), out.sum()


def no_clamp(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    return (attend(q, cache) / (scale * 1000)).to(E4M3)


def other_limits(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    return (attend(q, cache) / scale).clamp(-240.0, 240.0).to(E4M3)


def no_scale(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    return attend(q, cache).clamp(-448.0, 448.0).to(E4M3)


def a_scale_a_head(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    return (attend(q, cache) / (scale * torch.ones(H, 1))).clamp(-448.0, 448.0).to(E4M3)


def scale_of_the_output(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    """Dynamic: it is known only after the attention."""
    out = attend(q, cache)
    return (out / (out.abs().max() / 448.0)).clamp(-448.0, 448.0).to(E4M3)


def something_between(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    return (attend(q, cache).sigmoid() / scale).clamp(-448.0, 448.0).to(E4M3)


def other_way_round(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    return (scale / (attend(q, cache) + 9)).clamp(-448.0, 448.0).to(E4M3)


def floor_under_the_scales(q: Tensor, cache: Tensor, scale: Tensor) -> Any:
    groups = attend(q, cache).view(T, -1, 16)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=0.5) / 448.0
    return to_float8(groups / scales), scales


def other_divisor(q: Tensor, cache: Tensor, scale: Tensor) -> Any:
    groups = attend(q, cache).view(T, -1, 16)
    return to_float8(groups / (groups.abs().amax(-1, keepdim=True) / 240.0))


def groups_across_heads(q: Tensor, cache: Tensor, scale: Tensor) -> Any:
    groups = attend(q, cache).transpose(1, 2)
    return to_float8(groups / (groups.abs().amax(-1, keepdim=True) / 448.0))


def groups_across_tokens(q: Tensor, cache: Tensor, scale: Tensor) -> Any:
    groups = attend(q, cache)[:4].reshape(-1, 2 * H * D)
    return to_float8(groups / (groups.abs().amax(-1, keepdim=True) / 448.0))


def magnitudes_read_elsewhere(q: Tensor, cache: Tensor, scale: Tensor) -> Any:
    groups = attend(q, cache).view(T, -1, 16)
    largest = groups.abs().amax(-1, keepdim=True)
    return to_float8(groups / (largest / 448.0)), largest


def another_dimension(q: Tensor, cache: Tensor, scale: Tensor) -> Any:
    groups = attend(q, cache).view(T, -1, 16)
    return to_float8(groups / (groups.abs().amax(1, keepdim=True) / 448.0))


def rounded(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    return to_float8(torch.div(attend(q, cache), scale, rounding_mode="floor"))


def whole_numbers(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    return (attend(q, cache) / scale).to(torch.int32).clamp(-448.0, 448.0).to(E4M3)


def scale_written(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    scale = scale + 0
    out = attend(q, cache)
    scale.mul_(2)
    return to_float8(out / scale)


def read_as_another_view(q: Tensor, cache: Tensor, scale: Tensor) -> Any:
    buffer = torch.zeros(T, H * D)
    attend(q, cache, out=buffer.view(T, H, D))
    return to_float8(buffer / scale), buffer.sum()


def read_behind_a_view(q: Tensor, cache: Tensor, scale: Tensor) -> Any:
    buffer = torch.zeros(T, H * D)
    out = attend(q, cache, out=buffer.view(T, H, D))
    return to_float8(out / scale), buffer.sum()


def written_to_the_caller_s(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    """An input's memory, which the caller still has."""
    return to_float8(attend(scale * torch.ones(T, H, D), cache, out=q) / scale)


def quantised_before(q: Tensor, cache: Tensor, scale: Tensor) -> Tensor:
    """What the output's memory holds before the attention."""
    out = torch.ones_like(q)
    result = to_float8(out / scale)
    attend(q, cache, out=out)
    return result


LEFT: dict[Step, str] = {
    quantised_before: "comes before the attention",
    rounded: "is div, no step of a quantisation",
    whole_numbers: "converts to torch.int32",
    scale_written: "mul_ changes the scale",
    read_as_another_view: "is read by nobody",
    read_behind_a_view: "reads its output too",
    written_to_the_caller_s: "which outlives the graph",
    floor_under_the_scales: "puts 0.5 under the scales",
    other_divisor: "scales are magnitudes by 240, not by 448",
    groups_across_heads: "do not follow each other in a token",
    groups_across_tokens: "is getitem, no step of a quantisation",
    magnitudes_read_elsewhere: "is read by output too",
    another_dimension: "is no largest magnitude of each group of the last dimension",
    lse_is_asked_for: "its LSE is asked for",
    read_elsewhere: "not by one quantisation",
    no_clamp: "limited to None",
    other_limits: "limited to (-240.0, 240.0)",
    no_scale: "without a scale",
    a_scale_a_head: "where one float32 number is wanted",
    scale_of_the_output: "is max, no step from magnitudes to a scale",
    something_between: "is sigmoid, no step of a quantisation",
    other_way_round: "is add, no step",
}


@pytest.mark.parametrize("step", LEFT)
def test_what_is_left_alone_with_the_reason(step: Step) -> None:
    with attnbackend.set_config(backend="CPU_ATTN"):
        expected = step(*given())
    actual, report, _ = run(step)
    assert "0 changes" in report
    assert LEFT[step] in report, report
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (actual, expected)), strict=True):
        assert torch.equal(a.float().nan_to_num(7), b.float().nan_to_num(7)) or torch.allclose(
            a.float(), b.float()
        )


def test_a_backend_that_does_not_claim_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnbackend.backends.torch_sdpa import TorchSDPABackend

    monkeypatch.setattr(TorchSDPABackend, "supports_output_scale", False)
    with attnbackend.registry_scope():
        passes: list[GraphPass] = [SelectBackend("TORCH_SDPA"), FuseOutputQuantization()]
        compiled: Any = attnbackend.compile(plain, passes=passes, compiler="aot_eager", fullgraph=True)
        compiled(*given())
    assert "TORCH_SDPA: has_output_scale=True (allowed: False" in str(compiled.attnbackend_compiler)
