"""Both forms of latent attention against float64.

Shape legend: T tokens, S keys, H heads, D head size of query and key, V that of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnbackend.config import set_config
from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED
from attnbackend.testing.conformance.checks import lse as dense
from attnbackend.testing.conformance.checks.numerics import in_other_settings
from attnbackend.testing.conformance.latent.base import LatentCheck
from attnbackend.testing.conformance.latent.case import LatentCase
from attnbackend.testing.conformance.latent.cases import LatentCases
from attnbackend.testing.conformance.latent_subject import MIXED as MIXED_STEPS
from attnbackend.testing.conformance.latent_subject import MQA, LatentSubject
from attnbackend.testing.mla_batches import MLABatch
from attnbackend.testing.mla_cases import MLACase
from attnbackend.testing.reference_mla import plain_torch_mla, reference_mla
from attnbackend.testing.rounding import float32_latent_spread
from attnbackend.testing.tolerance import assert_within_rule, assert_within_spread

__all__ = ["LSE", "Mixed", "OnLatents", "OwnKeys"]

_HALVES = "plain-halves"


class OnLatents(LatentCheck):
    name = "mqa"
    proves = (
        "Absorbed queries on the latent cache: output and LSE within twice plain PyTorch's error of float64."
    )

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        yield from generate.pairs()

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        batch = subject.batch(case.mla)
        subject.run(MQA, batch)
        subject.judge(MQA, batch)
        _judge_in_other_settings(subject, MQA, case, batch)
        return ()


def _judge_in_other_settings(subject: LatentSubject, role: str, case: LatentCase, batch: MLABatch) -> None:
    if case.feature == "plain" and case.id.endswith((MIXED, DECODE)):
        batch.poison_outputs()
        in_other_settings(subject.device, partial(subject.run, role, batch))
        subject.judge(role, batch)


class Mixed(LatentCheck):
    name = "mixed"
    proves = (
        "Whole steps, decodes beside prompts, with contexts in one chunk and in many that are merged by LSE."
    )

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        if generate.backend.is_sparse:
            return
        for case in generate.pairs():
            left_out = case.id.startswith(("no_lse", "another_scale"))
            if generate.quick and case.feature != "plain":  # `mqa` has the decodes
                left_out |= case.id.endswith(DECODE)
            if not left_out:
                yield case

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        batch = subject.batch(case.mla)
        for tokens in (14, 1 << 15):
            batch.poison_outputs()
            with set_config(mla_context_tokens=tokens):
                subject.run(MIXED_STEPS, batch)
            subject.judge(MIXED_STEPS, batch)
        _judge_in_other_settings(subject, MIXED_STEPS, case, batch)
        return ()


class LSE(LatentCheck):
    name = dense.LSE.name
    proves = "Parts merged by their LSE equal the whole, and the empty state is (0, -inf)."

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        if not generate.backend.supports_lse():
            return
        yield from generate.case("plain", "graph_padding_requests")
        if not generate.backend.is_sparse:  # a selection counts from the request's first key
            halves = {"query_lens": (1, 0, 1), "context_lens": (70, 0, 46)}
            for case in generate.case("plain", DECODE):
                yield replace(case, id=_HALVES, mla=replace(case.mla, **halves))  # type: ignore[arg-type]

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        batch = subject.batch(case.mla)
        subject.run(MQA, batch)
        whole = subject.results(MQA, batch)
        findings = dense.empty_state(batch, (whole["output"], whole["LSE"]))
        return [*findings, *(dense.merged_differs(subject, MQA, batch) if case.id == _HALVES else ())]


_QUERIES, _KEYS = (3, 0, 5, 4, 40), (7, 2, 0, 2, 40)
"""Sequences without queries, without keys, with fewer keys than queries, and a longer one."""
_PADDING = 2
_OF_OWN_KEYS = ("plain", "wide_values", "full_size", "strided_tensors", "heads_of_20", "no_lse")
_FACTOR = 0.3
"""Of logits, far from the usual (P + R) ** -0.5, which a library would take by itself."""


class OwnKeys(LatentCheck):
    name = "mha"
    proves = (
        "Sequences with keys and values of their own, causal and not: output and natural-log LSE as above."
    )

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        if generate.backend.is_sparse:
            return
        yield from generate.some(*((feature, DECODE) for feature in _OF_OWN_KEYS), scale=_FACTOR)
        for name in generate.features:
            if name.startswith("dtype_"):
                yield from generate.case(name, MIXED, scale=_FACTOR)

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        for causal in (True, False):
            _run_sequences(subject, case.mla, causal)
        return ()


def _run_sequences(subject: LatentSubject, case: MLACase, causal: bool) -> None:
    query, key, value, starts_q, starts_k = _sequences(case)
    moved = [x.to(subject.device) for x in (query, key, value)]
    output = torch.full(
        (*query.shape[:2], case.v_head_dim), torch.nan, dtype=case.dtype, device=subject.device
    )
    lse = torch.full(query.shape[:2], torch.nan, device=subject.device) if case.lse else None
    if case.strided_tensors:
        moved[2] = torch.cat([moved[2], moved[2]], -1)[..., case.v_head_dim :]
    starts = (starts_q.to(subject.device), starts_k.to(subject.device))
    assert subject.mha is not None
    subject.mha(*moved, output, *starts, scale=case.softmax_scale, lse=lse, causal=causal)
    is_float32 = case.dtype is torch.float32
    exact, known = (
        attend.mha(query, key, value, starts_q, starts_k, scale=case.softmax_scale, causal=causal)
        for attend in (reference_mla, float32_latent_spread if is_float32 else plain_torch_mla)
    )
    hold = assert_within_spread if is_float32 else assert_within_rule
    hold(output, exact[0], known[0], what=f"output, causal={causal}")
    if lse is not None:
        hold(lse, exact[1], known[1], what=f"LSE, causal={causal}")


def _sequences(case: MLACase) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(rows: int, size: int) -> Tensor:
        return torch.randn(rows, case.num_heads, size, generator=generator).to(case.dtype)

    starts_q, starts_k = (
        torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32) for lengths in (_QUERIES, _KEYS)
    )
    tokens, keys = sum(_QUERIES) + _PADDING, sum(_KEYS)
    return (
        normal(tokens, case.qk_head_dim), normal(keys, case.qk_head_dim), normal(keys, case.v_head_dim),
        starts_q, starts_k,
    )  # fmt: skip
