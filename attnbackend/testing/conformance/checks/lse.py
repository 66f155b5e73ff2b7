"""The LSE as others use it: for merging partial results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbackend.ops.merge import merge_attn_states
from attnbackend.testing.batches import PagedBatch, expected_attention
from attnbackend.testing.conformance.base_subject import AnyBatch, BaseSubject, Batch
from attnbackend.testing.conformance.bits import same_bits
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.subject import Subject

__all__ = ["LSE", "State", "empty_state", "merged_differs"]


class LSE(Check):
    name = "lse"
    proves = "The LSE is natural, parts merged by it equal the whole, and the empty state is (0, -inf)."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        if not generate.backend.supports_lse():
            return
        for feature in ("plain", "another_scale", "soft_cap", "multi_query", "hnd"):
            for case in generate.case(feature, "decode"):
                lengths = {"query_lens": (1, 0, 1), "context_lens": (70, 0, 46)}
                halves = replace(case.attention, **lengths)  # type: ignore[arg-type]
                yield replace(case, id=f"{feature}-halves", attention=halves)
        yield from generate.some(("plain", "graph_padding_requests"), ("sinks", "decode"))

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        batch = subject.batch(case.attention)
        whole = _run(subject, "forward", batch, batch.seq_lens, batch.block_table)
        findings = [*_natural(batch, whole[1]), *empty_state(batch, whole)]
        if case.id.endswith("-halves"):
            findings += merged_differs(subject, "forward", batch)
        return findings


State = tuple[Tensor, Tensor]
"""Output and LSE."""


def _run(subject: BaseSubject[Any, Batch], role: str, batch: Batch, seq_lens: Tensor, table: Tensor) -> State:
    batch.poison_outputs()
    subject.run(role, batch, seq_lens=seq_lens, block_table=table)
    results = subject.results(role, batch)
    return results["output"].clone(), results["LSE"].clone()


def _natural(batch: PagedBatch, lse_TH: Tensor) -> list[str]:
    """The rule would fail too; this says what is likely wrong."""
    exact = expected_attention(batch)[1].to(torch.float32)
    finite = exact.isfinite() & (exact.abs() > 0.1)
    got, wanted = lse_TH.cpu()[finite], exact[finite]
    if bool(finite.any()) and torch.allclose(got, wanted / math.log(2), rtol=1e-2):
        return [
            f"the LSE is in base 2, but lse_base says otherwise: {float(got[0]):.6g} instead of "
            f"{float(wanted[0]):.6g}; declare lse_base = LSEBase.TWO"
        ]
    if bool(finite.any()) and not torch.allclose(got, wanted, rtol=2e-2, atol=2e-2):
        return [f"the LSE is {float(got[0]):.6g} where the natural one is {float(wanted[0]):.6g}"]
    return []


def empty_state(batch: AnyBatch, state: State) -> list[str]:
    """Merging with the state of a request without keys changes no bit of another."""
    lengths = batch.query_start_loc.diff().long()
    empty_T = torch.repeat_interleave(batch.seq_lens == 0, lengths)
    out, lse = (x[: len(empty_T)] for x in state)
    findings = []
    if bool((lse[empty_T] != -torch.inf).any()) or bool((out[empty_T] != 0).any()):
        findings.append("a request of seq_len 0 does not give the empty state (0, -inf)")
    other_out, other_lse = torch.randn_like(out[empty_T]), torch.randn_like(lse[empty_T])
    merged = merge_attn_states(out[empty_T], lse[empty_T], other_out, other_lse)
    if not (same_bits(merged[0], other_out) and same_bits(merged[1], other_lse)):
        findings.append("merging with the state of a request of seq_len 0 changes the other state")
    return findings


def merged_differs(subject: BaseSubject[Any, Batch], role: str, batch: Batch) -> list[str]:
    """Keys of the first pages and of the others apart, then merged."""
    pages = 2
    head = pages * batch.case.block_size
    rows = batch.seq_lens > 0
    first = torch.where(rows, batch.seq_lens.clamp(max=head), 0)
    parts = [
        _run(subject, role, batch, first, batch.block_table),
        _run(subject, role, batch, batch.seq_lens - first, batch.block_table[:, pages:].contiguous()),
    ]
    results = subject.results(role, batch)
    for name, merged in zip(("output", "LSE"), merge_attn_states(*parts[0], *parts[1]), strict=True):
        results[name].copy_(merged)
    try:
        # Twice the usual factor: two roundings, of the parts and of their sum.
        subject.judge(role, batch, factor=4.0)
    except AssertionError as error:
        return [f"merged {error}"]
    return []
