"""Nothing of an earlier call may decide a later one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attnbackend.testing.batches import PagedBatch
from attnbackend.testing.cases import AttentionCase
from attnbackend.testing.conformance.base_subject import BaseSubject, Batch, Case
from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED, UNEVEN_DECODE
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.exchange import put_in
from attnbackend.testing.conformance.subject import Subject
from attnbackend.testing.judgement import assert_attention_within_rule

__all__ = ["Stateless", "later_calls"]

_FEATURES = ("plain", "everything", "ranges")
_FURTHER = ("no_lse", "alibi", "sinks", "encoder_only", "cross", "hnd")
"""Not in a quick run."""


class Stateless(Check):
    name = "stateless"
    proves = (
        "Later calls, with other contents in the same memory or the same contents elsewhere, are right too."
    )

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        per_head = [n for n, f in generate.features.items() if f.claim == "per_head_quant_scales"][:1]
        further = () if generate.quick else (*_FURTHER, *per_head)
        for feature in dict.fromkeys((*_FEATURES, generate.scaled_cache, *further)):
            one = MIXED if feature in ("plain", "ranges") else DECODE
            batches = [one] if generate.quick else [DECODE, MIXED]
            batches += [UNEVEN_DECODE] if feature == "plain" else []
            written = feature == "cross"  # no call of the writer adds to an encoder's keys
            yield from generate.some(*((feature, batch) for batch in batches), new_tokens_written=written)
        if generate.backend.supports_query_scale:
            for case in generate.case("plain", DECODE, new_tokens_written=False):
                yield replace(case, id=f"query_scale-{case.id}", feature="query_scale")

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        scales = iter((0.25, 0.5, 0.25) if case.feature == "query_scale" else (None,) * 3)
        other = _changed(subject, case.attention)
        act = partial(_write_and_judge, subject, scales)
        return list(later_calls(subject, case.attention, other, act))


def later_calls(
    subject: BaseSubject[Case, Batch], case: Case, other: Batch, act: Callable[[Batch], None]
) -> Iterator[str]:
    """What ``act`` finds of a case, then of ``other`` in the same memory, then of the case elsewhere.

    Args:
        act: writes, reads, and raises AssertionError where the answer is not right.
    """
    first, elsewhere = subject.batch(case), subject.batch(case)
    for what, contents, memory in (
        ("the first call", first, first),
        ("other contents in the memory of the first call", other, first),
        ("the contents of the first call elsewhere", elsewhere, elsewhere),
    ):
        try:
            act(contents if contents is memory else put_in(memory, contents))
        except AssertionError as error:
            yield f"{what}: {error}"


def _write_and_judge(subject: Subject, scales: Iterator[float | None], batch: PagedBatch) -> None:
    if batch.case.writes_new_tokens:
        subject.run_write(batch)
    batch.poison_outputs()
    extras: dict[str, Any] = {}
    if (q_scale := next(scales)) is not None:
        extras["q_scale"] = torch.full((1,), q_scale, device=subject.device)
    subject.run_forward(batch, **extras)
    scale = batch.case.softmax_scale * (1.0 if q_scale is None else q_scale)
    assert_attention_within_rule(replace(batch, case=replace(batch.case, scale=scale)))


def _changed(subject: Subject, case: AttentionCase) -> PagedBatch:
    """Tensors of the same shapes with other contents: requests in reverse, other data and scales."""
    ranges = case.bidirectional_ranges
    batch = subject.batch(
        replace(
            case, seed=case.seed + 1, query_lens=case.query_lens[::-1], context_lens=case.context_lens[::-1],
            bidirectional_ranges=None if ranges is None else ranges[::-1],
            k_scale=_halved(case.k_scale), v_scale=_halved(case.v_scale),
        )
    )  # fmt: skip
    return batch if batch.alibi_slopes is None else replace(batch, alibi_slopes=batch.alibi_slopes.flip(0))


def _halved(scale: float | tuple[float, ...] | None) -> float | tuple[float, ...] | None:
    """Heads in reverse too."""
    if isinstance(scale, tuple):
        return tuple(x / 2 for x in reversed(scale))
    return None if scale is None else scale / 2
