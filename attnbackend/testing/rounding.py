"""How far honest float32 arithmetic strays from float64, as a distribution and not as one draw.

The relative rule of :mod:`attnbackend.testing.tolerance` compares two largest errors. In float32 both are
luck: where one key decides a row, all of its outputs inherit the rounding of one dot product, so a batch of
few rows has a handful of independent errors, and of two honest results one is often more than twice as far
off as the other. But what each is a draw from is known. With ``u = 2**-24``, and roundings that are
independent and of mean zero (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis",
SIAM J. Sci. Comput. 41(5), 2019), each rounding has at most the variance ``(u * value)**2 / 3``, so a sum of
n terms a_i, added one by one, has ``u**2 / 3`` times the sum of its squared partial sums. In an order that
does not depend on their values, partial sums are a line from 0 to sum(a), of squares n * sum(a)**2 / 3, and a
Brownian bridge about it, of squares n * sum(a**2) * w, where w has the distribution of the Cramer-von Mises
statistic: 1/6 on average, 1.17 at its 99.9% quantile, which counts since any order may be the kernel's.
Together they are at most

    (u**2 / 3) * (n + 1) * (sqrt(1.17 * sum(a**2)) + abs(sum(a)) / sqrt(3))**2

These variances are carried through logits, softmax and weighted sum. Three standard deviations are the
yardstick's error, of which the rule allows twice as much. Sums in lanes, tiles or trees stray less.

What it catches is in ``docs/conformance.md``; ``tests/test_testing_rounding.py`` holds it to that.

Shape suffixes: as in :mod:`attnbackend.testing.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from attnbackend.testing.reference import (
    AttentionFeatures,
    DenseAttention,
    _Request,
    _softmax_with_sink,
)
from attnbackend.testing.reference_mla import LatentAttention, LatentRequest, _causal

__all__ = ["float32_latent_spread", "float32_spread"]

_SIGMAS = 3.0
"""A normal variable is beyond twice as many with probability 2e-9: once in 500 million elements."""
_BRIDGE = 1.17
"""99.9% quantile of the Cramer-von Mises statistic."""
_ROUNDING = 2.0**-48 / 3
"""Variance of one rounding of 1."""
_EXP = 48 * _ROUNDING
"""Of the exponential, off by 2**-22 at most: what PTX documents of ex2.approx.f32."""


class _Float32Spread(DenseAttention):
    """Gives the yardstick's errors of output and LSE in the places of output and LSE."""

    def _attend(
        self, query: Tensor, requests: Iterable[_Request], asked: AttentionFeatures
    ) -> tuple[Tensor, Tensor]:
        out_THD = query.new_zeros(query.shape, dtype=torch.float64)
        lse_TH = out_THD.new_zeros(query.shape[:2])
        for request in requests:
            s_HNL = self._logits(request, asked, torch.float64)
            p_HNL, lse_HN = _softmax_with_sink(s_HNL, asked.sinks)
            lse_HN = lse_HN.masked_fill(lse_HN == -torch.inf, 0.0)
            q_HND, k_HDL = request.q_NHD.transpose(0, 1) * asked.scale, request.k_LHD.permute(1, 2, 0)
            off_HNL = _exponent_variance(q_HND, k_HDL, s_HNL, lse_HN, asked.logits_soft_cap)
            out_HND, log_HN = _carried(p_HNL, off_HNL, request.v_LHD.transpose(0, 1), lse_HN)
            out_THD[request.rows] = _SIGMAS * out_HND.sqrt().transpose(0, 1)
            lse_TH[request.rows] = _SIGMAS * log_HN.sqrt().transpose(0, 1)
        return out_THD, lse_TH


class _LatentSpread(LatentAttention):
    """Gives the yardstick's errors of output and LSE in the places of output and LSE."""

    def _attend(
        self, q_NHD: Tensor, k_JHD: Tensor, v_JHV: Tensor, visible_NJ: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        q_HND, k_HDJ = q_NHD.double().transpose(0, 1) * scale, k_JHD.double().permute(1, 2, 0)
        s_HNJ = (q_HND @ k_HDJ).masked_fill(~visible_NJ, -torch.inf)
        lse_HN = torch.logsumexp(s_HNJ, -1)
        lse_HN = lse_HN.masked_fill(lse_HN == -torch.inf, 0.0)
        off_HNJ = _exponent_variance(q_HND, k_HDJ, s_HNJ, lse_HN, 0.0)
        p_HNJ = torch.exp(s_HNJ - lse_HN.unsqueeze(-1))
        out_HNV, log_HN = _carried(p_HNJ, off_HNJ, v_JHV.double().transpose(0, 1), lse_HN)
        seen_HN = visible_NJ.any(-1)
        return _SIGMAS * out_HNV.sqrt().transpose(0, 1), (_SIGMAS * log_HN.sqrt() * seen_HN).t()

    def whole(
        self, query: Tensor, kv_b_weight: Tensor, requests: list[LatentRequest], *, v_head_dim: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Of the output, the larger of those of both spaces; a request may run in either."""
        out, lse = self._empty(query, v_head_dim)
        weight_HNL = kv_b_weight.double()
        for request in requests:
            q_HND = query[request.rows].double().transpose(0, 1) * scale
            projected = _Projected.of(q_HND, weight_HNL, request, v_head_dim)
            off_HNV = projected.in_heads().maximum(projected.in_latents())
            out[request.rows] = _SIGMAS * off_HNV.sqrt().transpose(0, 1)
        return out, lse

    def _empty(self, query: Tensor, width: int) -> tuple[Tensor, Tensor]:
        out, lse = super()._empty(query, width)
        return out, torch.zeros_like(lse)


class _Projected(NamedTuple):
    """One request in the space of heads: scaled queries, weights of keys and values, and what they give."""

    q_HND: Tensor
    w_HPL: Tensor
    w_HVL: Tensor
    latent_JL: Tensor
    rope_JR: Tensor
    s_HNJ: Tensor
    lse_HN: Tensor
    p_HNJ: Tensor

    @classmethod
    def of(cls, q_HND: Tensor, weight_HNL: Tensor, request: LatentRequest, width: int) -> _Projected:
        nope = weight_HNL.shape[1] - width
        w_HPL, w_HVL = weight_HNL[:, :nope], weight_HNL[:, nope:]
        latent_JL, rope_JR = request.kv_c_JL.double(), request.k_pe_JR.double()
        s_HNJ = q_HND[..., :nope] @ (w_HPL @ latent_JL.T) + q_HND[..., nope:] @ rope_JR.T
        s_HNJ = s_HNJ.masked_fill(~_causal(request), -torch.inf)
        lse_HN = torch.logsumexp(s_HNJ, -1)
        lse_HN = lse_HN.masked_fill(lse_HN == -torch.inf, 0.0)
        p_HNJ = torch.exp(s_HNJ - lse_HN.unsqueeze(-1))
        return cls(q_HND, w_HPL, w_HVL, latent_JL, rope_JR, s_HNJ, lse_HN, p_HNJ)

    def in_heads(self) -> Tensor:
        """Variance of the output [H, N, V] where keys and values are projected first."""
        nope, terms = self.w_HPL.shape[1], self.latent_JL.shape[1]
        (k_HPJ, k_off_HPJ), (v_HVJ, v_off_HVJ) = (
            (x := w @ self.latent_JL.T, _sum_variance(x, w**2 @ (self.latent_JL**2).T, terms))
            for w in (self.w_HPL, self.w_HVL)
        )
        k_HDJ = torch.cat([k_HPJ, self.rope_JR.T.expand(len(k_HPJ), -1, -1)], 1)
        off_HNJ = _exponent_variance(self.q_HND, k_HDJ, self.s_HNJ, self.lse_HN, 0.0)
        off_HNJ = off_HNJ + self.q_HND[..., :nope] ** 2 @ k_off_HPJ
        out_HNV, _ = _carried(self.p_HNJ, off_HNJ, v_HVJ.transpose(1, 2), self.lse_HN)
        return out_HNV + self.p_HNJ**2 @ v_off_HVJ.transpose(1, 2)

    def in_latents(self) -> Tensor:
        """The same where queries are moved to the latents, and what comes of them back."""
        (nope, terms), keys = self.w_HPL.shape[1:], len(self.latent_JL)
        own_HNP, p_HNJ, w_HLV = self.q_HND[..., :nope], self.p_HNJ, self.w_HVL.transpose(1, 2)
        q_HNL, q_squares_HNL = own_HNP @ self.w_HPL, own_HNP**2 @ self.w_HPL**2
        q_HNW = torch.cat([q_HNL, self.q_HND[..., nope:]], -1)
        k_WJ = torch.cat([self.latent_JL, self.rope_JR], -1).T
        off_HNJ = _exponent_variance(q_HNW, k_WJ, self.s_HNJ, self.lse_HN, 0.0)
        off_HNJ = off_HNJ + _sum_variance(q_HNL, q_squares_HNL, nope) @ (self.latent_JL**2).T
        moved_HNV, _ = _carried(p_HNJ, off_HNJ, self.latent_JL @ w_HLV, self.lse_HN)
        sum_HNL = p_HNJ @ self.latent_JL
        summed_HNL = _sum_variance(sum_HNL, p_HNJ**2 @ self.latent_JL**2, keys)
        back_HNV = _sum_variance(sum_HNL @ w_HLV, sum_HNL**2 @ w_HLV**2, terms)
        return moved_HNV + summed_HNL @ w_HLV**2 + back_HNV


def _exponent_variance(
    q_HND: Tensor, k_HDL: Tensor, s_HNL: Tensor, lse_HN: Tensor, soft_cap: float
) -> Tensor:
    """Of the exponential of the dot product of scaled queries, and of what is done to it between: scale,
    cap, alibi, less the maximum."""
    dot_HNL, squares_HNL = q_HND @ k_HDL, q_HND**2 @ k_HDL**2
    seen_HNL = s_HNL.masked_fill(s_HNL == -torch.inf, 0.0)
    largest_HN1 = seen_HNL.abs().amax(-1, keepdim=True).maximum(lse_HN.abs().unsqueeze(-1))
    after_HN1 = 4 * (soft_cap**2 + largest_HN1**2)
    stretched_HNL = _ROUNDING * (2 * squares_HNL + after_HN1)
    return _EXP + _sum_variance(dot_HNL, squares_HNL, q_HND.shape[2]) + stretched_HNL


def _sum_variance(total: Tensor, squares: Tensor, terms: int) -> Tensor:
    """Of a sum that is ``total``, of terms whose squares sum up to ``squares``, each a rounded product."""
    partial = (_BRIDGE * squares).sqrt() + total.abs() / math.sqrt(3.0)
    return _ROUNDING * ((terms + 1) * partial**2 + squares)


def _carried(p_HNL: Tensor, off_HNL: Tensor, v_HLD: Tensor, lse_HN: Tensor) -> tuple[Tensor, Tensor]:
    """Variances of the output [H, N, D] and of the LSE [H, N], by which parts of a row may be scaled."""
    terms = p_HNL.shape[-1] + 1  # a sink counts
    out_HND, squares_HND = p_HNL @ v_HLD, p_HNL**2 @ v_HLD**2
    moved_HNL = p_HNL**2 * off_HNL
    # sum of moved * (v - out)**2, multiplied out
    spread_HND = moved_HNL @ v_HLD**2 - 2 * out_HND * (moved_HNL @ v_HLD)
    spread_HND = (spread_HND + out_HND**2 * moved_HNL.sum(-1, keepdim=True)).clamp(min=0.0)
    log_HN = _sum_variance(p_HNL.new_ones(()), (p_HNL**2).sum(-1), terms) + 4 * _ROUNDING * (1 + lse_HN**2)
    var_HND = spread_HND + _sum_variance(out_HND, squares_HND, terms) + out_HND**2 * log_HN.unsqueeze(-1)
    return var_HND, moved_HNL.sum(-1) + log_HN


float32_spread = _Float32Spread(exact=True)
"""As `reference_attention`: (yardstick's error of the output [T, H, D], of the LSE [T, H]), float64."""
float32_latent_spread = _LatentSpread(exact=True)
"""As `reference_mla`: yardstick's errors of output and LSE; `whole` tells the output's alone."""
