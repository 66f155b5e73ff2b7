"""From logits to token ids.

Shape suffixes: N rows of logits, M rows among them that sample, P rows that use top_p,
K sorted candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnbackend.runtime.random_draws import draw_key, gumbel_draws
from attnbackend.runtime.sampling_params import SamplingParams

INVALID_TOKEN = -1
"""Stands for a row with no usable distribution: a NaN, a +inf, or no logit above -inf."""


_FEW = 256
"""Candidates that top_p looks at before it sorts the whole vocabulary."""


class Draw(NamedTuple):
    """What decides one row besides its logits: token `output_index` of a request with `seed`."""

    params: SamplingParams
    seed: int
    output_index: int


@torch.inference_mode()
def sample_tokens(logits_NV: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose one token a row.

    Rows do not influence each other. A greedy row takes its largest logit (lowest id among
    equals); others sample from softmax(logits / temperature) cut by top_k, then by top_p.

    Args:
        logits_NV: [N, V], any float dtype and device; -inf rules a token out.
        draws: one for each row.

    Returns:
        N token ids; `INVALID_TOKEN` for a row that holds NaN or +inf, or nothing but -inf.
    """
    assert logits_NV.shape[0] == len(draws), (logits_NV.shape, len(draws))
    if not draws:
        return []
    # max propagates NaN, so the one pass that greedy needs also finds unusable rows.
    max_N, ids_N = logits_NV.max(dim=-1)
    sampling = [row for row, draw in enumerate(draws) if not draw.params.is_greedy]
    if sampling:
        rows = torch.tensor(sampling, device=logits_NV.device)
        logits_MV = logits_NV if len(sampling) == len(draws) else logits_NV[rows]
        ids_N[rows] = _sample_rows(logits_MV, max_N[rows], [draws[row] for row in sampling])
    tokens: list[int] = torch.where(max_N.isfinite(), ids_N, INVALID_TOKEN).tolist()
    return tokens


def _sample_rows(logits_MV: Tensor, max_M: Tensor, draws: Sequence[Draw]) -> Tensor:
    params = [draw.params for draw in draws]
    kept_MV = filter_logits(logits_MV, params)
    keys = [draw_key(draw.seed, draw.output_index) for draw in draws]
    keys_M = torch.tensor(keys, dtype=torch.int64, device=logits_MV.device)
    noise_MV = gumbel_draws(keys_M, logits_MV.shape[1])
    scores_MV = _scaled(kept_MV, max_M, params).add_(noise_MV)
    return scores_MV.argmax(dim=-1)


def _scaled(logits_MV: Tensor, max_M: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(logits - row maximum) / temperature in float64; the shift keeps tiny temperatures finite."""
    temperature_M = _column([p.temperature for p in params], torch.float64, logits_MV.device)
    return (logits_MV.double() - max_M.double()[:, None]).div_(temperature_M)


def filter_logits(logits_MV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set logits that top_k, then top_p, rule out to -inf; ties at either limit are kept.

    Args:
        logits_MV: [M, V], any float dtype; left as it is.
        params: one for each row, each with a temperature above 0.

    Returns:
        [M, V] in the dtype of `logits_MV`: a new tensor, or `logits_MV` itself when no row
        restricts anything.
    """
    vocab_size = logits_MV.shape[1]
    if any(0 < p.top_k < vocab_size for p in params):
        logits_MV = _apply_top_k(logits_MV, [p.top_k for p in params])
    nucleus = [row for row, p in enumerate(params) if p.top_p < 1]
    if not nucleus:
        return logits_MV
    rows = torch.tensor(nucleus, device=logits_MV.device)
    limited_PV = _apply_top_p(logits_MV[rows], [params[row] for row in nucleus])
    return logits_MV.index_copy(0, rows, limited_PV)


def _apply_top_k(logits_MV: Tensor, top_k: Sequence[int]) -> Tensor:
    vocab_size = logits_MV.shape[1]
    limits = [k if 0 < k < vocab_size else 0 for k in top_k]
    largest_MK = logits_MV.topk(max(limits), dim=-1).values
    limit_M1 = _column(limits, torch.int64, logits_MV.device)
    threshold_M1 = largest_MK.gather(1, (limit_M1 - 1).clamp_(min=0))
    is_cut_MV = (logits_MV < threshold_M1) & (limit_M1 > 0)
    return logits_MV.masked_fill(is_cut_MV, -torch.inf)


def _apply_top_p(logits_PV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    top_p_P1 = _column([p.top_p for p in params], torch.float64, logits_PV.device)
    max_P = logits_PV.amax(dim=-1)
    total_P1 = _scaled(logits_PV, max_P, params).exp_().sum(dim=-1, keepdim=True)
    needed_P1 = top_p_P1 * total_P1
    few_PK = logits_PV.topk(min(_FEW, logits_PV.shape[1]), dim=-1).values
    threshold_P1, mass_P = _nucleus_limit(few_PK, needed_P1, max_P, params)
    # Each row decides for itself whether a few candidates are enough, so that rows stay apart.
    wide = (mass_P < needed_P1[:, 0]).nonzero()[:, 0]
    if len(wide):
        sorted_PK = logits_PV[wide].sort(dim=-1, descending=True).values
        wide_params = [params[row] for row in wide.tolist()]
        limit, _ = _nucleus_limit(sorted_PK, needed_P1[wide], max_P[wide], wide_params)
        threshold_P1[wide] = limit
    return logits_PV.masked_fill(logits_PV < threshold_P1, -torch.inf)


def _nucleus_limit(
    sorted_PK: Tensor, needed_P1: Tensor, max_P: Tensor, params: Sequence[SamplingParams]
) -> tuple[Tensor, Tensor]:
    """Smallest logit [P, 1] with less than `needed` weight before it, and all weight seen [P].

    Equal logits share their value, so the first of them speaks for all.
    """
    weight_PK = _scaled(sorted_PK, max_P, params).exp_()
    upto_PK = weight_PK.cumsum(dim=-1)
    before_PK = upto_PK.roll(1, dims=-1)
    before_PK[:, 0] = 0
    last_P1 = (before_PK < needed_P1).sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
    return sorted_PK.gather(1, last_P1), upto_PK[:, -1]


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]
