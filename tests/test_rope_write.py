"""Rotation, head norms and cache write as one op.

Shape legend: T tokens, H query heads, K key-value heads, D head size, R rotated elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rope_steps import DEVICE, D, H, K, T
from torch import Tensor

import attnbackend
from attnbackend import ops
from attnbackend.kernels import cpu
from attnbackend.kernels.triton import unavailable_reason
from attnbackend.ops import rope_write
from attnbackend.ops.rope_write import rope_kv_cache_update
from attnbackend.testing import assert_within_rule

SLOTS = [17, -1, 40, 2, 63]

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(
        unavailable_reason(DEVICE) is not None, reason=f"Triton: {unavailable_reason(DEVICE)}"
    ),
]


@pytest.fixture(autouse=True, params=["Triton", "C++"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Triton":
        monkeypatch.setattr(rope_write, "cpu", SimpleNamespace(unavailable_reason=lambda: "left out"))
    elif DEVICE == "cuda" or cpu.unavailable_reason() is not None:
        pytest.skip(f"no kernel in C++ for {DEVICE}: {cpu.unavailable_reason()}")


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float32
    rotated: int = D
    norms: bool = False
    cache_dtype: str = "auto"
    hnd: bool = False
    split: bool = False
    """Query, key and value are views of one tensor."""


CASES = {
    "plain": Case(),
    "half types": Case(torch.bfloat16),
    "float16, norms": Case(torch.float16, norms=True),
    "partial": Case(rotated=16),
    "partial, norms, of one projection": Case(rotated=16, norms=True, split=True),
    "HND": Case(hnd=True, norms=True),
    "fp8 cache": Case(torch.bfloat16, cache_dtype="fp8_e4m3"),
    "fp8 cache as bytes, partial": Case(rotated=24, cache_dtype="fp8_e5m2", split=True),
}


def arguments(case: Case, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    if case.split:
        cut = torch.randn(T, (H + 2 * K) * D).to(case.dtype).split([H * D, K * D, K * D], -1)
        query, key, value = (x.unflatten(-1, (-1, D)) for x in cut)
    else:
        query, key, value = (torch.randn(T, n, D).to(case.dtype) for n in (H, K, K))
    fp8 = case.cache_dtype.startswith("fp8")
    cache = torch.full((4, K, 2, 16, D) if case.hnd else (4, 2, 16, K, D), 0x7F if fp8 else float("nan"))
    cache = cache.to(torch.uint8 if fp8 else case.dtype)
    scales = {f"{x}_scale": torch.tensor([s]) for x, s in (("k", 0.5), ("v", 2.0))} if fp8 else {}
    weights = {f"{x}_weight": torch.rand(D).to(case.dtype) + 0.5 for x in ("q", "k")} if case.norms else {}
    angles = torch.rand(T, case.rotated) * 6
    found = {
        "query": query, "key": key, "value": value, "cos": angles.cos().to(case.dtype),
        "sin": angles.sin().to(case.dtype), "kv_cache": cache.permute(0, 2, 3, 1, 4) if case.hnd else cache,
        "slot_mapping": torch.tensor(SLOTS), **weights, **scales,
    }  # fmt: skip
    found = {name: x.to(device) for name, x in found.items()}
    return found | {"kv_cache_dtype": case.cache_dtype} | {f"{x}_eps": 1e-3 for x in ("q", "k") if weights}


def by_hand(
    x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, weight: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The definition, in ``dtype``."""
    x_THD, cos_TR, sin_TR = (t.to(dtype) for t in (x_THD, cos_TR, sin_TR))
    if weight is not None:
        x_THD = x_THD * torch.rsqrt(x_THD.pow(2).mean(-1, keepdim=True) + 1e-3) * weight.to(dtype)
    turned, rest = x_THD[..., : cos_TR.shape[-1]], x_THD[..., cos_TR.shape[-1] :]
    low, high = turned.chunk(2, -1)
    turned = turned * cos_TR[:, None] + torch.cat([-high, low], -1) * sin_TR[:, None]
    return torch.cat([turned, rest], -1)


@pytest.mark.parametrize("name", CASES)
def test_the_op_rotates_normalises_and_writes(name: str, device: str) -> None:
    case, given = CASES[name], arguments(CASES[name], device)
    before = given["kv_cache"].clone()
    outputs = rope_kv_cache_update(**given)
    for x, out in zip(("query", "key"), outputs, strict=True):
        exact, plain = (
            by_hand(given[x], given["cos"], given["sin"], given.get(f"{x[0]}_weight"), dtype)
            for dtype in (torch.float64, case.dtype)
        )
        assert_within_rule(out, exact, plain, what=x, by="row")
        assert out.is_contiguous()
    expected = before.clone()
    options = {k: given[k] for k in ("k_scale", "v_scale", "kv_cache_dtype") if k in given}
    with attnbackend.set_config(backend="TORCH_SDPA" if device == "cpu" else "TRITON_ATTN"):
        ops.kv_cache_update(outputs[1], given["value"], expected, given["slot_mapping"], **options)
    assert torch.equal(given["kv_cache"].cpu().view(torch.uint8), expected.cpu().view(torch.uint8))


def test_opcheck() -> None:
    given = arguments(CASES["partial, norms, of one projection"], DEVICE)
    given["kv_cache"].zero_()
    torch.library.opcheck(rope_kv_cache_update, (), given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cos": torch.ones(T, D + 2)}, r"shape of cos is \(5, 34\)"),
        ({"q_weight": torch.ones(3)}, r"shape of q_weight is \(3,\)"),
        ({"query": torch.ones(2, H, D)}, "tokens and head size of key"),
        ({"slot_mapping": torch.ones(2, dtype=torch.int64)}, "slot_mapping"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_kv_cache_update(**(arguments(Case(), DEVICE) | {k: x.to(DEVICE) for k, x in change.items()}))
