"""Scaled queries and quantised outputs, where they are claimed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnbackend.testing.batches import (
    PagedBatch,
    expected_attention,
    rounding_spread,
    yardstick_attention,
)
from attnbackend.testing.conformance.batch_shapes import MIXED, ONE_REQUEST, PADDED
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.subject import Subject
from attnbackend.testing.judgement import assert_attention_within_rule
from attnbackend.testing.tolerance import ulp_at

__all__ = ["Scales"]

_Q_SCALE, _OUTPUT_SCALE, _GROUPS = 0.25, 0.0005, 2
_HALF_STEP = {torch.float8_e4m3fn: (2.0**-4, 2.0**-10), torch.float8_e5m2: (2.0**-3, 2.0**-17)}
"""Of a format: largest relative rounding error of normal values, largest absolute one of the others."""


class Scales(Check):
    name = "scales"
    proves = "Query scale, output scale and output block scale are applied once, and stored values saturate."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        features = ["plain", "everything", generate.scaled_cache]
        for claim in ("query_scale", "output_scale", "output_block_scale"):
            if getattr(generate.backend, f"supports_{claim}"):
                for feature in features:
                    batches = (PADDED, ONE_REQUEST) if feature == "plain" else (MIXED,)
                    for case in generate.some(*((feature, batch) for batch in batches)):
                        yield replace(case, id=f"{claim}-{case.id}", feature=claim)

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        batch = subject.batch(case.attention)
        if case.feature == "query_scale":
            return _query_scale(subject, batch)
        exact, own_error = expected_attention(batch)[0], _own_error(batch)
        formats = (torch.float8_e4m3fn, torch.float8_e5m2)
        if case.feature == "output_scale":
            return [f for dtype in formats for f in _output_scale(subject, batch, exact, own_error, dtype)]
        return _block_scale(subject, batch, exact, own_error)


def _scale(subject: Subject, value: float) -> Tensor:
    return torch.full((1,), value, device=subject.device)


def _query_scale(subject: Subject, batch: PagedBatch) -> Sequence[str]:
    subject.run_forward(batch, q_scale=_scale(subject, _Q_SCALE))
    scaled = replace(batch.case, scale=batch.case.softmax_scale * _Q_SCALE)
    assert_attention_within_rule(replace(batch, case=scaled))
    if subject.backend.supports_quantized_query:
        stored = batch.query.to(torch.float8_e4m3fn)
        subject.run_forward(batch, query=stored, q_scale=_scale(subject, _Q_SCALE))
        assert_attention_within_rule(replace(batch, case=scaled, query=stored.to(batch.query.dtype)))
    return ()


def _own_error(batch: PagedBatch) -> float:
    """What the relative rule allows a kernel before its result is rounded to the format."""
    exact = expected_attention(batch)[0]
    if batch.case.dtype is torch.float32:
        off = rounding_spread(batch)[0]
    else:
        off = (yardstick_attention(batch)[0].double() - exact).abs()
    return 2 * float(off.max()) + ulp_at(float(exact.abs().max()), batch.case.dtype)


def _output_scale(
    subject: Subject, batch: PagedBatch, exact: Tensor, own_error: float, dtype: torch.dtype
) -> Iterator[str]:  # fmt: skip
    scale = _OUTPUT_SCALE if dtype is torch.float8_e4m3fn else 1e-5
    stored = torch.full(batch.output.shape, 1, dtype=torch.uint8, device=subject.device).view(dtype)
    subject.run_forward(batch, output=stored, output_scale=_scale(subject, scale))
    limit = torch.finfo(dtype).max
    wanted = (exact / scale).clamp(-limit, limit)
    own = torch.full_like(wanted, own_error / scale)
    yield from _apart(f"output in {dtype}", stored.cpu().double(), wanted, dtype, own)


def _block_scale(subject: Subject, batch: PagedBatch, exact: Tensor, own_error: float) -> Sequence[str]:
    dtype, tokens = torch.float8_e4m3fn, len(exact)
    stored = torch.full(batch.output.shape, 1, dtype=torch.uint8, device=subject.device).view(dtype)
    scales = torch.full((tokens, _GROUPS), torch.nan, device=subject.device)
    subject.run_forward(batch, output=stored, output_block_scale=scales)
    groups = exact.reshape(tokens, _GROUPS, -1)
    wanted = groups.abs().amax(-1) / torch.finfo(dtype).max
    got = scales.cpu().double()
    if not torch.allclose(got, wanted, rtol=1e-2, atol=0.0):
        return [f"block scales are {got.flatten()[:3].tolist()}..., not {wanted.flatten()[:3].tolist()}..."]
    divisor = torch.where(wanted == 0, 1.0, wanted).unsqueeze(-1)
    real = stored.cpu().double().reshape(groups.shape)
    own = (own_error / divisor).expand_as(groups)
    return list(_apart("output in blocks", real, groups / divisor, dtype, own))


def _apart(what: str, got: Tensor, wanted: Tensor, dtype: torch.dtype, own: Tensor) -> Iterator[str]:
    """Beyond rounding to the format what is within the kernel's ``own`` error of the exact value."""
    relative, absolute = _HALF_STEP[dtype]
    allowed = own + 1.01 * ((wanted.abs() + own) * relative).clamp(min=absolute)
    bad = ~((got - wanted).abs() <= allowed)
    if bool(bad.any()):
        first = tuple(int(i) for i in bad.nonzero()[0])
        yield (
            f"{what}: {int(bad.sum())} of {bad.numel()} stored values are wrong, first at {list(first)}: "
            f"{float(got[first]):.6g} instead of {float(wanted[first]):.6g}"
        )
