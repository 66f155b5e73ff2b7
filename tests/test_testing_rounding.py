"""The spread of honest float32 rounding: no honest order of sums leaves it, and small faults do.

A fault is the float64 reference with one thing rounded or off: the least noisy form that it can take.

Shape suffixes: H heads, N query tokens, L keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbackend.testing import (
    AttentionCase,
    PagedBatch,
    assert_within_spread,
    expected_attention,
    make_batch,
)
from attnbackend.testing.batches import _dense, rounding_spread
from attnbackend.testing.mla_batches import absorbed_mixed, expected_mixed, make_mla_batch
from attnbackend.testing.mla_cases import MLACase
from attnbackend.testing.reference import AttentionFeatures, DenseAttention, _softmax_with_sink
from attnbackend.testing.reference_mla import LatentAttention, LatentRequest, reference_mla
from attnbackend.testing.rounding import _sum_variance, float32_latent_spread

LONG = AttentionCase(query_lens=(1,), context_lens=(1023,), num_heads=8, num_kv_heads=2, head_size=128)
SHORT = replace(LONG, query_lens=(5, 1, 1), context_lens=(0, 33, 70))
ONE_KEY = replace(SHORT, probe="newest_key")
LARGE = replace(SHORT, scale=8.0)
EVERYTHING = replace(
    SHORT, sliding_window=21, logits_soft_cap=13.0, use_alibi=True, use_sinks=True, kv_cache_dtype="fp8",
    k_scale=0.3, v_scale=0.7,
)  # fmt: skip

Change = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Off(DenseAttention):
    """float64 with something changed on its way."""

    exact: bool = True
    operands: Change = same
    values: Change = same
    logits: Change = same
    weights: Change = same

    def _attend(self, query: Tensor, requests: Any, asked: AttentionFeatures) -> tuple[Tensor, Tensor]:
        out_THD = query.new_zeros(query.shape, dtype=torch.float64)
        lse_TH = out_THD.new_full(query.shape[:2], -torch.inf)
        for request in requests:
            changed = replace(
                request, q_NHD=self.operands(request.q_NHD), k_LHD=self.operands(request.k_LHD),
                v_LHD=self.values(request.v_LHD),
            )  # fmt: skip
            s_HNL = self.logits(self._logits(changed, asked, torch.float64))
            p_HNL, lse_HN = _softmax_with_sink(s_HNL, asked.sinks)
            out_THD[request.rows] = (self.weights(p_HNL) @ changed.v_LHD.transpose(0, 1)).transpose(0, 1)
            lse_TH[request.rows] = lse_HN.transpose(0, 1)
        return out_THD, lse_TH


def to_tf32(x: Tensor) -> Tensor:
    """10 bits of mantissa, to nearest."""
    bits = x.float().view(torch.int32).add(0x1000).bitwise_and(~0x1FFF)
    return bits.view(torch.float32).to(x.dtype)


def to_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def rough_exp(x: Tensor) -> Tensor:
    """Off by up to 2**-14, as a polynomial of too low a degree."""
    generator = torch.Generator().manual_seed(0)
    return x * (1 + 2.0**-14 * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1))


FAULTS = {
    "operands in TF32": (Off(operands=to_tf32), 80, 7),
    "values and weights in TF32": (Off(values=to_tf32, weights=to_tf32), 75, None),
    "weights in bfloat16": (Off(weights=to_bfloat16), 400, None),
    "exponential off by 2**-14": (Off(weights=rough_exp), 9, None),
    "scale off by 1e-4": (Off(logits=lambda s: s * 1.0001), 27, 16),
}
"""Name -> fault, its smallest ratio to what is allowed in output and LSE over six seeds of LONG."""


def ratios(batch: PagedBatch, result: tuple[Tensor, Tensor]) -> list[float]:
    found = zip(result, expected_attention(batch), rounding_spread(batch), strict=True)
    return [
        float(((got.float() - exact).abs() / (2 * spread + 2.0**-23 * exact.abs())).nan_to_num(0.0).max())
        for got, exact, spread in found
    ]


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", range(2))
def test_small_faults_are_far_beyond_the_spread(name: str, seed: int) -> None:
    fault, output, lse = FAULTS[name]
    batch = make_batch(replace(LONG, seed=seed))
    got = ratios(batch, _dense(batch, fault))
    assert got[0] > output
    assert lse is None or got[1] > lse


@dataclass(frozen=True)
class InOrder(DenseAttention):
    """float32 throughout, every sum element after element in a random order: as inexact as honest gets."""

    exact: bool = False
    seed: int = 0

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        total = a.new_zeros(*a.shape[:2], b.shape[2])
        for x in torch.randperm(a.shape[2], generator=generator).tolist():
            total = total + a[:, :, x, None] * b[:, None, x]
        return total


CASES = {"short": SHORT, "one_key": ONE_KEY, "large": LARGE, "everything": EVERYTHING}


@pytest.mark.parametrize("name", CASES)
def test_sums_in_any_order_stay_within(name: str) -> None:
    worst = 0.0
    for seed in range(12):
        batch = make_batch(replace(CASES[name], seed=seed))
        result = _dense(batch, InOrder(seed=seed))
        for got, exact, spread in zip(result, expected_attention(batch), rounding_spread(batch), strict=True):
            worst = max(worst, assert_within_spread(got, exact, spread).ratio)
    assert 0.1 < worst < 0.6


@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["of_both_signs", "of_one_sign"])
def test_the_variance_of_a_sum_is_that_of_float32(offset: float) -> None:
    """Over orders of the same terms; the quantile of the bridge makes it at most about 7 times too large."""
    generator = torch.Generator().manual_seed(0)
    a_N, b_N = (torch.randn(64, generator=generator) + offset for _ in range(2))
    exact = a_N.double() * b_N.double()
    errors = []
    for _ in range(2000):
        total = torch.zeros(())
        for i in torch.randperm(64, generator=generator):
            total = total + a_N[i] * b_N[i]
        errors.append(float(total) - float(exact.sum()))
    derived = float(_sum_variance(exact.sum(), (exact**2).sum(), 64))
    assert 1.0 < derived / float(torch.tensor(errors).square().mean()) < 16.0


@dataclass(frozen=True)
class LatentsInOrder(LatentAttention):
    """Honest float32, every sum in one order of its terms; `bits` fewer of the operands are a fault."""

    bits: int = 0

    def _attend(
        self, q_NHD: Tensor, k_JHD: Tensor, v_JHV: Tensor, visible_NJ: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        q_HND, k_HJD = (self._cut(x.float()).transpose(0, 1) for x in (q_NHD, k_JHD))
        s_HNJ = sum(q_HND[:, :, None, d] * k_HJD[:, None, :, d] for d in range(q_HND.shape[2])) * scale
        s_HNJ = s_HNJ.masked_fill(~visible_NJ, -torch.inf)
        largest_HN1 = s_HNJ.amax(-1, keepdim=True)
        p_HNJ, v_HJV = torch.exp(s_HNJ - largest_HN1), v_JHV.float().transpose(0, 1)
        keys = range(p_HNJ.shape[2])
        total_HN, out_HNV = (sum(terms) for terms in (
            (p_HNJ[..., j] for j in keys), (p_HNJ[..., j, None] * v_HJV[:, None, j] for j in keys)
        ))  # fmt: skip
        out_HNV = out_HNV / total_HN.unsqueeze(-1)
        return out_HNV.transpose(0, 1), (largest_HN1.squeeze(-1) + total_HN.log()).t()

    def _cut(self, x: Tensor) -> Tensor:
        return (x.view(torch.int32) >> self.bits << self.bits).view(torch.float32)


def latents(seed: int) -> tuple[Tensor, Tensor, list[LatentRequest]]:
    """One token of DeepSeek's sizes, few keys: about as many independent errors as heads."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (1, 4, 512), (1, 4, 64), (7, 512), (7, 64)
    query_latent, query_rope, kv_c, k_pe = (torch.randn(size, generator=generator) for size in sizes)
    return query_latent, query_rope, [LatentRequest(slice(0, 1), kv_c.double(), k_pe.double())]


def test_latent_sums_in_order_stay_within_and_tf32_does_not() -> None:
    """Two largest errors would not tell: torch's blocked sums stray so little that honest ones fail."""
    ratios = []
    for seed in range(12):
        batch = latents(seed)
        exact, spread = (x.mqa(*batch, scale=576**-0.5) for x in (reference_mla, float32_latent_spread))
        honest, faulty = (LatentsInOrder(exact=False, bits=n).mqa(*batch, scale=576**-0.5) for n in (0, 13))
        for got, right, allowed in zip(honest, exact, spread, strict=True):
            ratios.append(assert_within_spread(got, right, allowed).ratio)
        for got, right, allowed in zip(faulty, exact, spread, strict=True):
            with pytest.raises(AssertionError, match="ratio"):
                assert_within_spread(got, right, allowed)
    assert 0.1 < max(ratios) < 0.6


def test_latent_steps_stay_within_in_either_space_and_tf32_does_not() -> None:
    ratios = []
    for seed in range(12):
        case = MLACase(query_lens=(1, 2, 40), context_lens=(3, 0, 9), dtype=torch.float32, seed=seed)
        batch = make_mla_batch(case)
        exact, spread = expected_mixed(batch), expected_mixed(batch, float32_latent_spread)
        honest = expected_mixed(batch, LatentsInOrder(exact=False))
        for got in (honest, absorbed_mixed(batch)):
            ratios.append(assert_within_spread(got, exact, spread).ratio)
        faulty = expected_mixed(batch, LatentsInOrder(exact=False, bits=13))
        with pytest.raises(AssertionError, match="ratio"):
            assert_within_spread(faulty, exact, spread)
    assert 0.1 < max(ratios) < 0.6


def test_an_unread_key_and_a_structural_zero_are_no_rounding() -> None:
    batch = make_batch(replace(SHORT, query_lens=(2, 1), context_lens=(-1, 3)))
    exact, spread = expected_attention(batch)[0], rounding_spread(batch)[0]
    assert float(spread[0].max()) == 0.0
    wrong = exact.float()
    wrong[0, 0, 0] = 1e-30
    with pytest.raises(AssertionError, match=r"not exactly zero .* first at \[0, 0, 0\]"):
        assert_within_spread(wrong, exact, spread)
    with pytest.raises(AssertionError, match="wrong -inf"):
        assert_within_spread(
            torch.zeros(batch.output.shape[:2]), expected_attention(batch)[1], rounding_spread(batch)[1]
        )
