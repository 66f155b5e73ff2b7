"""From logits to token ids, on the device that has the logits and without waiting for it.

Shape suffixes: N rows of logits, M rows among them that sample, K sorted candidates, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnbackend.runtime.random_draws import gumbel_draws
from attnbackend.runtime.sampling_params import SamplingParams
from attnbackend.runtime.sampling_table import SampledRows, SamplingTable

INVALID_TOKEN = -1
"""Stands for a row with no usable distribution: a NaN, a +inf, or no logit above -inf."""


_FEW = 256
"""Candidates that top_p looks at before it sorts the whole vocabulary."""


class Draw(NamedTuple):
    """What decides one row besides its logits: token `output_index` of a request with `seed`."""

    params: SamplingParams
    seed: int
    output_index: int


@dataclass(frozen=True)
class SamplingPlan:
    """The rows that are not greedy, on the logits' device, and what the host knows about them.

    Attributes:
        rows, temperature, top_k, top_p, keys: [M], as in `SampledRows`.
        max_top_k: the largest of `top_k`.
        has_top_p: some row has a nucleus.
        may_be_wide: some nucleus may hold more than the first candidates.
    """

    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    keys: Tensor
    max_top_k: int
    has_top_p: bool
    may_be_wide: bool

    @classmethod
    def of(cls, rows: SampledRows, tensors: Mapping[str, Tensor]) -> SamplingPlan:
        """A plan of rows whose arrays are, or will be, in `tensors`."""
        has_nucleus = rows.top_p < 1
        is_wide = has_nucleus & ((rows.top_k == 0) | (rows.top_k > _FEW))
        return cls(
            **tensors,
            max_top_k=int(rows.top_k.max()),
            has_top_p=bool(has_nucleus.any()),
            may_be_wide=bool(is_wide.any()),
        )


class Sampled(NamedTuple):
    """Chosen tokens, on the device."""

    ids: Tensor
    """int64 [N], each inside the vocabulary also where the row is unusable."""
    largest: Tensor
    """[N], the largest logit; not finite where the row is unusable."""

    def tokens(self) -> list[int]:
        """The ids on the host, `INVALID_TOKEN` for unusable rows; waits for the device."""
        ids: list[int] = self.ids.tolist()
        # A sum that is finite has finite terms only, and is the cheaper question.
        if not math.isfinite(self.largest.sum().item()):
            ids = torch.where(self.largest.isfinite(), self.ids, INVALID_TOKEN).tolist()
        return ids


def sample(logits_NV: Tensor, plan: SamplingPlan | None, out: Sampled | None = None) -> Sampled:
    """Choose one token a row.

    Rows do not influence each other. A greedy row takes its largest logit (lowest id among
    equals); others sample from softmax(logits / temperature) cut by top_k, then by top_p.

    Args:
        logits_NV: [N, V], any float dtype and device; -inf rules a token out.
        plan: the rows that are not greedy; None: all are.
        out: where the result goes; None: into new tensors.
    """
    sampled = take_largest(logits_NV, out)
    if plan is not None:
        sample_rows(logits_NV, plan, sampled)
    return sampled


@torch.inference_mode()
def take_largest(logits_NV: Tensor, out: Sampled | None = None) -> Sampled:
    """The greedy choice of each row."""
    # max propagates NaN, so the one pass that greedy needs also finds unusable rows.
    into = None if out is None else (out.largest, out.ids)
    largest_N, ids_N = torch.max(logits_NV, dim=-1, out=into)
    return Sampled(ids_N, largest_N)


@torch.inference_mode()
def sample_rows(logits_NV: Tensor, plan: SamplingPlan, sampled: Sampled) -> None:
    """Replaces the greedy choice in ``sampled`` by a sampled one where the plan says so."""
    is_all = len(plan.rows) == len(logits_NV)
    logits_MV = logits_NV if is_all else logits_NV[plan.rows]
    sampled.ids.index_copy_(0, plan.rows, _sample_rows(logits_MV, sampled.largest[plan.rows], plan))


def sample_tokens(logits_NV: Tensor, draws: Sequence[Draw]) -> list[int]:
    """`sample` of rows that are described one by one.

    Returns:
        N token ids; `INVALID_TOKEN` for a row that holds NaN or +inf, or nothing but -inf.
    """
    assert logits_NV.shape[0] == len(draws), (logits_NV.shape, len(draws))
    return sample(logits_NV, _plan_of(draws, logits_NV.device)).tokens() if draws else []


def _plan_of(draws: Sequence[Draw], device: torch.device) -> SamplingPlan | None:
    table = SamplingTable(len(draws))
    for row, draw in enumerate(draws):
        table.set(row, draw.params, draw.seed)
    indices = np.array([draw.output_index for draw in draws], dtype=np.int64)
    rows = table.select(np.arange(len(draws)), indices)
    if rows is None:
        return None
    return SamplingPlan.of(rows, {name: torch.from_numpy(x).to(device) for name, x in rows._asdict().items()})


def _sample_rows(logits_MV: Tensor, largest_M: Tensor, plan: SamplingPlan) -> Tensor:
    kept_MV = filter_by_plan(logits_MV, plan)
    noise_MV = gumbel_draws(plan.keys, logits_MV.shape[1])
    return _scaled(kept_MV, largest_M, plan.temperature).add_(noise_MV).argmax(dim=-1)


def _scaled(logits_MV: Tensor, largest_M: Tensor, temperature_M: Tensor) -> Tensor:
    """(logits - row maximum) / temperature in float64; the shift keeps tiny temperatures finite."""
    return (logits_MV.double() - largest_M.double()[:, None]).div_(temperature_M[:, None])


def filter_logits(logits_MV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set logits that top_k, then top_p, rule out to -inf; ties at either limit are kept.

    Args:
        logits_MV: [M, V], any float dtype; left as it is.
        params: one for each row, each with a temperature above 0.

    Returns:
        [M, V] in the dtype of `logits_MV`: a new tensor, or `logits_MV` itself when no row
        restricts anything.
    """
    plan = _plan_of([Draw(p, 0, 0) for p in params], logits_MV.device)
    assert plan is not None
    return filter_by_plan(logits_MV, plan)


def filter_by_plan(logits_MV: Tensor, plan: SamplingPlan) -> Tensor:
    """As `filter_logits`."""
    if plan.max_top_k:
        logits_MV = _apply_top_k(logits_MV, plan)
    return _apply_top_p(logits_MV, plan) if plan.has_top_p else logits_MV


def _apply_top_k(logits_MV: Tensor, plan: SamplingPlan) -> Tensor:
    most = min(plan.max_top_k, logits_MV.shape[1])
    largest_MK = logits_MV.topk(most, dim=-1).values
    limit_M1 = plan.top_k[:, None]
    threshold_M1 = largest_MK.gather(1, (limit_M1 - 1).clamp_(0, most - 1))
    is_cut_MV = (logits_MV < threshold_M1) & (limit_M1 > 0)
    return logits_MV.masked_fill(is_cut_MV, -torch.inf)


def _apply_top_p(logits_MV: Tensor, plan: SamplingPlan) -> Tensor:
    largest_M, few = logits_MV.amax(dim=-1), min(_FEW, logits_MV.shape[1])
    total_M = _scaled(logits_MV, largest_M, plan.temperature).exp_().sum(dim=-1)
    needed_M = plan.top_p * total_M
    few_MK = logits_MV.topk(few, dim=-1).values
    threshold_M, mass_M = _nucleus_limit(few_MK, needed_M, largest_M, plan.temperature)
    if plan.may_be_wide and few < logits_MV.shape[1]:
        # Each row decides for itself whether a few candidates are enough, so that rows stay apart.
        wide_M = (mass_M < needed_M) & (plan.top_p < 1)
        # Only where it costs no wait can the rows be counted, to sort no others.
        rows = slice(None) if logits_MV.is_cuda else wide_M.nonzero()[:, 0]
        sorted_MV = logits_MV[rows].sort(dim=-1, descending=True).values
        limit_M, _ = _nucleus_limit(sorted_MV, needed_M[rows], largest_M[rows], plan.temperature[rows])
        threshold_M[rows] = torch.where(wide_M[rows], limit_M, threshold_M[rows])
    threshold_M = threshold_M.masked_fill(plan.top_p >= 1, -torch.inf)
    return logits_MV.masked_fill(logits_MV < threshold_M[:, None], -torch.inf)


def _nucleus_limit(
    sorted_MK: Tensor, needed_M: Tensor, largest_M: Tensor, temperature_M: Tensor
) -> tuple[Tensor, Tensor]:
    """Smallest logit [M] with less than `needed` weight before it, and all weight seen [M].

    Equal logits share their value, so the first of them speaks for all.
    """
    weight_MK = _scaled(sorted_MK, largest_M, temperature_M).exp_()
    upto_MK = weight_MK.cumsum(dim=-1)
    before_MK = upto_MK.roll(1, dims=-1)
    before_MK[:, 0] = 0
    last_M1 = (before_MK < needed_M[:, None]).sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
    return sorted_MK.gather(1, last_M1)[:, 0], upto_MK[:, -1]
