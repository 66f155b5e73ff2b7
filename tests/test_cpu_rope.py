"""Rotation and cache write as one kernel in C++, which rounds once: bit for bit, but for norms of heads.

Shape legend: T tokens, H query heads, K key-value heads, D head size, R rotated elements, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cpu_kernel_batches import FP8, NAN, pytestmark, thread_count  # noqa: F401
from rope_steps import check, plain
from test_cpu_cache_write import assert_same_bits, stored_by_torch
from torch import Tensor

from attnbackend.fx_passes import fuse_rope
from attnbackend.kernels import cpu
from attnbackend.kernels.cpu import rope_cache_write
from attnbackend.ops import native, rope_write
from attnbackend.ops.rope_write import rope_kv_cache_update
from attnbackend.testing import assert_within_rule

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    """None: the model's."""
    tokens: int = 7
    heads: tuple[int, int] = (9, 3)
    size: int = 64
    rotated: int = 64
    norms: bool = False
    hnd: bool = True
    joint: bool = False
    """Query, key and value are views of one tensor."""
    scales: int = 0
    """0: none, 1: one for all heads, 2: one a head."""


def inputs(case: Case) -> tuple[dict[str, Any], Tensor]:
    """What is read, and a cache full of NaN; every third token is not to be cached."""
    torch.manual_seed(case.tokens)
    (H, K), D, R, T = case.heads, case.size, case.rotated, case.tokens
    joint = torch.randn(T, (H + 2 * K) * D).to(case.dtype).split([H * D, K * D, K * D], -1)
    heads = (x.unflatten(-1, (-1, D)) for x in joint)
    query, key, value = heads if case.joint else (x.contiguous() for x in heads)
    angles = torch.rand(T, 2 * R)[:, :R] * 6
    slots = torch.randperm(256)[:T]
    slots[::3] = -1
    given = {
        "query": query, "key": key, "value": value, "cos": angles.cos().to(case.dtype),
        "sin": angles.sin().to(case.dtype), "slot_mapping": slots,
    }  # fmt: skip
    if case.scales:
        given |= {name: torch.rand(1 if case.scales == 1 else K) + 0.5 for name in ("k_scale", "v_scale")}
    weights = {f"{x}_weight": (torch.rand(D) + 0.5).to(case.dtype) for x in "qk" if case.norms}
    numbers = {"q_eps": 1e-3, "k_eps": 1e-2} if case.norms else {}
    shape = (16, K, 2, 16, D) if case.hnd else (16, 2, 16, K, D)
    cache = torch.full(shape, NAN).to(case.cache_dtype or case.dtype)
    return given | weights | numbers, cache.permute(0, 2, 3, 1, 4) if case.hnd else cache


def arguments(case: Case) -> dict[str, Any]:
    """Of `rope_cache_write`, all that it writes filled with NaN."""
    given, cache = inputs(case)
    outputs = {
        f"{x[0]}_out": torch.full_like(given[x], NAN, memory_format=torch.contiguous_format)
        for x in ("query", "key")
    }
    return given | outputs | {"key_cache": cache[:, 0], "value_cache": cache[:, 1]}


def op_arguments(case: Case) -> dict[str, Any]:
    given, cache = inputs(case)
    return given | {"kv_cache": cache, "kv_cache_dtype": "fp8_e4m3" if case.cache_dtype in FP8 else "auto"}


def turned(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """The definition, in the arguments' type, each product rounded before it is added."""
    R = cos_TR.shape[-1]
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    low, high = x_THD[..., : R // 2], x_THD[..., R // 2 : R]
    return torch.cat([x_THD[..., :R] * cos + torch.cat([-high, low], -1) * sin, x_THD[..., R:]], -1)


def check_cache(given: dict[str, Any], name: str, written: Tensor) -> None:
    """Slots of tokens hold what torch would store, all others the NaN that was there."""
    cache_BSKD, scale = given[f"{name}_cache"], given.get(f"{name[0]}_scale")
    expected_SKD = torch.full(cache_BSKD.shape, NAN).to(cache_BSKD.dtype).flatten(0, 1)
    scale = scale if scale is None else scale.view(-1, 1)
    for token, slot in enumerate(given["slot_mapping"].tolist()):
        if slot >= 0:
            expected_SKD[slot] = stored_by_torch(written[token], scale, cache_BSKD.dtype)
    assert_same_bits(cache_BSKD.flatten(0, 1), expected_SKD)


SHAPES = {
    "one token": Case(tokens=1),
    "none": Case(tokens=0),
    "few": Case(hnd=False),
    "two threads": Case(tokens=200, joint=True),
    "partial": Case(size=128, rotated=64, joint=True),
    "not in vectors": Case(size=72, rotated=20, heads=(2, 1), tokens=3),
    "largest": Case(size=1024, rotated=1024, heads=(1, 1), tokens=2),
    "smallest": Case(size=2, rotated=2, heads=(4, 2)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_rotations_and_what_is_cached(name: str, dtype: torch.dtype) -> None:
    given = arguments(replace(SHAPES[name], dtype=dtype))
    with thread_count(2):
        rope_cache_write(**given)
    for x, out in (("query", "q_out"), ("key", "k_out")):
        expected = turned(given[x].float(), given["cos"].float(), given["sin"].float()).to(dtype)
        assert_same_bits(given[out], expected)
    check_cache(given, "key", given["k_out"])
    check_cache(given, "value", given["value"])


@pytest.mark.parametrize("scales", [0, 1, 2])
@pytest.mark.parametrize("cache_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_caches_in_float8_get_the_rounded_key(
    dtype: torch.dtype, cache_dtype: torch.dtype, scales: int
) -> None:
    given = arguments(Case(dtype, cache_dtype, scales=scales))
    rope_cache_write(**given)
    check_cache(given, "key", given["k_out"])
    check_cache(given, "value", given["value"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotated", [64, 48, 20])
def test_norms_of_heads(dtype: torch.dtype, rotated: int) -> None:
    given = arguments(Case(dtype, rotated=rotated, norms=True, joint=True))
    rope_cache_write(**given)
    for x, out, eps in (("query", "q_out", 1e-3), ("key", "k_out", 1e-2)):
        names = (x, f"{x[0]}_weight", "cos", "sin")
        exact, plain = (
            by_hand(*(given[name].to(t) for name in names), eps=eps) for t in (torch.float64, dtype)
        )
        assert_within_rule(given[out], exact, plain, what=x, by="row")
    check_cache(given, "key", given["k_out"])


def by_hand(x_THD: Tensor, weight_D: Tensor, cos_TR: Tensor, sin_TR: Tensor, eps: float) -> Tensor:
    normed = x_THD * torch.rsqrt(x_THD.pow(2).mean(-1, keepdim=True) + eps) * weight_D
    return turned(normed, cos_TR, sin_TR)


def test_angles_and_weights_of_another_type_than_the_heads() -> None:
    given = arguments(Case(torch.bfloat16))
    angles = {name: given[name].float() + 1e-4 for name in ("cos", "sin")}
    rope_cache_write(**(given | angles))
    expected = turned(given["query"].float(), angles["cos"], angles["sin"])
    assert_same_bits(given["q_out"], expected.bfloat16())
    weight, other = (torch.rand(64) + 0.5).half(), torch.empty_like(given["q_out"])
    rope_cache_write(**(given | {"q_weight": weight}))
    rope_cache_write(**(given | {"q_weight": weight.float(), "q_out": other}))
    assert torch.equal(given["q_out"], other)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("slot_mapping", lambda x: x + 256, r"slot_mapping\[\d\] is \d+; allowed: .* 0 to 255"),
        ("cos", lambda x: x[:, :63], r"sin has shape \[7, 64\]"),
        ("sin", lambda x: x.half(), "cos is torch.float32 and sin torch.float16"),
        ("query", lambda x: x[:3], r"query has shape \[3, 9, 64\]"),
        ("query", lambda x: x.half(), "query is torch.float16 and key torch.float32"),
        ("query", lambda x: x.mT.contiguous().mT, "query has strides"),
        ("q_out", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "it must be contiguous"),
        ("value", lambda x: x[:, :2], r"value has shape \[7, 2, 64\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    given = arguments(Case())
    with pytest.raises(ValueError, match=message):
        rope_cache_write(**(given | {name: change(given[name])}))
    assert all(given[out].isnan().all() for out in ("q_out", "k_out", "key_cache", "value_cache"))


@pytest.mark.parametrize("rotated", [63, 0, 66])
def test_angles_of_odd_or_too_many_elements_are_refused(rotated: int) -> None:
    given = arguments(Case())
    with pytest.raises(ValueError, match=rf"cos and sin have {rotated} elements; allowed: even"):
        rope_cache_write(**(given | {name: torch.ones(7, rotated) for name in ("cos", "sin")}))


# ---- the op ---------------------------------------------------------------------------------------


@pytest.mark.skipif(
    native.how_ops_are_called() != "C++, called without Python", reason=str(native.how_ops_are_called())
)
@pytest.mark.parametrize(
    "case",
    [Case(torch.bfloat16, joint=True), Case(torch.float16, norms=True, hnd=False),
     Case(torch.bfloat16, torch.float8_e4m3fn, scales=2), Case(size=128, rotated=32)],
    ids=str,
)  # fmt: skip
def test_calls_that_python_served_once_are_served_without_it(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For other numbers of tokens too; none, and what is refused, are Python's."""
    seen: list[int] = []

    def watched(*args: Any, **kwargs: Any) -> None:
        seen.append(len(args[0]))
        rope_cache_write(*args, **kwargs)

    monkeypatch.setattr(cpu, "rope_cache_write", watched)
    with torch.inference_mode():
        results = [served(case, tokens) for tokens in (7, 7, 200, 0)]
        assert seen == [7, 0]
        for a, b in zip(results[0], results[1], strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        query, key, cache = results[2]
        given = arguments(replace(case, tokens=200))
        rope_cache_write(**given)
        assert torch.equal(query, given["q_out"])
        assert torch.equal(key, given["k_out"])
        for place, name in enumerate(("key_cache", "value_cache")):
            assert_same_bits(cache[:, place], given[name])
        refused = op_arguments(case)
        with pytest.raises(ValueError, match=r"slot_mapping\[\d\] is"):
            rope_kv_cache_update(**(refused | {"slot_mapping": refused["slot_mapping"] + 256}))
        assert refused["kv_cache"].isnan().all()
        with pytest.raises(ValueError, match="rows of slot_mapping is 2"):
            rope_kv_cache_update(**(refused | {"slot_mapping": refused["slot_mapping"][:2]}))


def served(case: Case, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    native.serve_cpu_ops()
    given = op_arguments(replace(case, tokens=tokens))
    query, key = rope_kv_cache_update(**given)
    assert query.is_contiguous()
    assert key.is_contiguous()
    return query, key, given["kv_cache"]


def test_gradients_are_refused_by_calls_that_are_known_too() -> None:
    case = Case()
    with torch.no_grad():
        for _ in range(2):
            served(case, 7)
    given = op_arguments(case)
    with pytest.raises(RuntimeError, match="requires grad"):
        rope_kv_cache_update(**(given | {"query": given["query"].requires_grad_()}))


# ---- the pass -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
def test_without_kernels_the_graph_stays_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_rope, "rope_problem", lambda device_type: f"no compiler for {device_type}")
    assert "no rotation and cache write: no compiler for" in check(plain, fused=False)


def test_the_op_says_where_it_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_write.cpu, "unavailable_reason", lambda: "no compiler")
    monkeypatch.setattr(rope_write.triton, "unavailable_reason", lambda device_type: "no Triton")
    with pytest.raises(ValueError, match="has no kernel here: no compiler; leave its pass out"):
        rope_kv_cache_update(**op_arguments(Case()))
