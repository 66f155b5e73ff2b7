"""Rows and tokens that are only there to fill a shape, and memory that nobody owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnbackend.testing.batches import PagedBatch
from attnbackend.testing.conformance.batch_shapes import PADDED
from attnbackend.testing.conformance.bits import differing
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.subject import Subject

__all__ = ["Padding"]

_KINDS = ("ranges_over_window", "chunks", "encoder_only", "cross")
_POISONS = {"NaN": torch.nan, "+inf": torch.inf, "-inf": -torch.inf}


class Padding(Check):
    name = "padding"
    proves = (
        "Padded tokens and requests without keys give zeros and -inf; what lies behind seq_len never matters."
    )

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        for feature in ("plain", "no_lse", "sinks", "everything", "not_causal", *_KINDS):
            for batch in (PADDED, "graph_padding_requests", "zero_length_rows", "mixed"):
                if batch != "mixed" or feature in ("plain", "not_causal"):
                    yield from generate.case(feature, batch)
        for case in generate.case("plain", "decode"):
            nothing = {"query_lens": (0, 0), "context_lens": (0, 0), "num_padded_tokens": 150}
            attention = replace(case.attention, **nothing)  # type: ignore[arg-type]
            yield replace(case, id="plain-nothing_but_padding", attention=attention)

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        batch = subject.batch(case.attention)
        stale = _unowned(batch)
        findings: list[str] = []
        calm: list[Tensor] = []
        for name, value in {"zero": 0.0, **_POISONS}.items():
            _fill(batch.kv_cache, stale, value)
            batch.poison_outputs()
            subject.run_forward(batch)
            results = [x.clone() for x in (batch.output, batch.lse) if x is not None]
            findings += [f"with {name} in stale memory: {fault}" for fault in _unfilled(batch)]
            calm = calm or results
            findings += _changed(name, results, calm)
        return findings


def _unowned(batch: PagedBatch) -> Tensor:
    """bool [B, S]: tokens of the cache that no request owns."""
    size = batch.kv_cache.shape[2]
    owned = torch.zeros(batch.kv_cache.shape[0] * size, dtype=torch.bool)
    if batch.case.attn_type.keeps_no_cache:
        return ~owned.view(-1, size)
    for row, length in enumerate(batch.seq_lens.tolist()):
        positions = torch.arange(length)
        blocks = batch.block_table[row].cpu().long()[positions // size]
        owned[blocks * size + positions % size] = True
    return ~owned.view(-1, size)


def _fill(kv_cache: Tensor, stale_BS: Tensor, value: float) -> None:
    """Through bytes for float8, where indexing is not implemented everywhere."""
    bits = kv_cache.view(torch.uint8) if kv_cache.dtype.itemsize == 1 else kv_cache
    filler = torch.full((1,), value).to(kv_cache.dtype)
    number = filler.view(torch.uint8) if kv_cache.dtype.itemsize == 1 else filler
    bits.transpose(1, 2)[stale_BS.to(bits.device)] = number.to(bits.device)


def _unfilled(batch: PagedBatch) -> Iterator[str]:
    starts, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    places = {f"tail from token {starts[-1]}": slice(starts[-1], None)}
    for row, length in enumerate(lens):
        if length == 0 and starts[row + 1] > starts[row]:
            places[f"request {row} of seq_len 0"] = slice(starts[row], starts[row + 1])
    for where, rows in places.items():
        if not bool((batch.output[rows] == 0).all()):
            yield f"output of the {where} is {_some(batch.output[rows], 0.0)}, not 0"
        if batch.lse is not None and not bool((batch.lse[rows] == -torch.inf).all()):
            yield f"LSE of the {where} is {_some(batch.lse[rows], -torch.inf)}, not -inf"


def _some(x: Tensor, wanted: float) -> float:
    return float(x[x != wanted][0])


def _changed(name: str, results: list[Tensor], calm: list[Tensor]) -> Iterator[str]:
    for what, got, wanted in zip(("output", "LSE"), results, calm, strict=False):
        if not torch.allclose(got.float(), wanted.float(), rtol=1e-3, atol=1e-5, equal_nan=True):
            yield f"{name} in memory that no request owns changes the {what}: {differing(got, wanted)}"
