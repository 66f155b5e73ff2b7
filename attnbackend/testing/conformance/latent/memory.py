"""What the ops of latent attention read and write besides their answer.

Shape legend: B blocks, S block_size, W row width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnbackend.testing.conformance.batch_shapes import BATCHES, DECODE, MIXED, PADDED
from attnbackend.testing.conformance.bits import differing, same_bits
from attnbackend.testing.conformance.checks.overflow import (
    FAR_AWAY,
    GEOMETRY,
    offsets_allowed,
    wrong_far_away,
)
from attnbackend.testing.conformance.checks.overflow import Overflow as DenseOverflow
from attnbackend.testing.conformance.checks.state_audit import write_faults
from attnbackend.testing.conformance.latent.base import LatentCheck
from attnbackend.testing.conformance.latent.case import LatentCase
from attnbackend.testing.conformance.latent.cases import LatentCases
from attnbackend.testing.conformance.latent_subject import LatentSubject
from attnbackend.testing.mla_batches import MLABatch, expected_mla_cache
from attnbackend.testing.state_audit import AllowedWrite, audit_op

__all__ = ["SAMPLES", "CacheWrites", "Overflow", "Padding", "StateAudit"]

SAMPLES = (
    ("plain", MIXED), ("no_lse", PADDED), ("plain", "one_token"), ("strided_tensors", DECODE),
    ("layers_interleaved", DECODE), ("cache_fp8_scaled", DECODE),
)  # fmt: skip
"""Cases of the checks that are about the ops' schemas."""

_ABOUT_MEMORY = ("memory", "head sizes", "block_size", "kv_cache_dtype", "dtype")


class CacheWrites(LatentCheck):
    name = "cache_writes"
    proves = (
        "The backend's shape is that of the cache; new rows lie in their slots, rounded once and saturated; "
        "no other byte of the buffer changes."
    )

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        for name, (claim, _) in generate.features.items():
            if name == "plain":
                yield from generate.some(*((name, batch) for batch in BATCHES), new_tokens_written=False)
            elif claim in _ABOUT_MEMORY:
                yield from generate.some((name, MIXED), (name, PADDED), new_tokens_written=False)

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        batch = _with_extremes(subject.batch(case.mla))
        expected, everything = expected_mla_cache(batch), batch.kv_buffer.clone()
        before = batch.kv_cache.clone()
        subject.run_write(batch)
        findings = list(_other_shapes(subject, batch))
        if not same_bits(batch.kv_cache.cpu(), expected):
            where = differing(batch.kv_cache.cpu(), expected)
            findings.append(f"the layer's cache is not what it must be: {where}")
        batch.kv_cache.copy_(before)
        if not same_bits(batch.kv_buffer, everything):
            findings.append(f"memory of other layers was written: {differing(batch.kv_buffer, everything)}")
        return findings


def _other_shapes(subject: LatentSubject, batch: MLABatch) -> Iterator[str]:
    """Between what the backend allocates and what the ops take."""
    case, wanted = batch.case, tuple(batch.kv_cache.shape)
    size = (wanted[0], case.block_size, 1, case.head_size)
    found = subject.backend.get_kv_cache_shape(*size, case.kv_cache_dtype)
    if tuple(found) != wanted:
        yield f"get_kv_cache_shape{(*size, case.kv_cache_dtype)} is {found}; the ops take {wanted}"
        return
    dims = subject.backend.parse_kv_cache_shape(wanted)
    if (dims.num_blocks, dims.block_size, dims.num_kv_heads) != size[:3]:
        yield f"parse_kv_cache_shape({wanted}) is {dims}"


def _with_extremes(batch: MLABatch) -> MLABatch:
    """Values beyond what float8 holds; with a scale for each group of a row they only stretch it."""
    if batch.kv_cache.dtype.itemsize == 1 and batch.kv_cache.dtype is not torch.uint8 and len(batch.kv_c):
        batch.kv_c[0, :2] = torch.tensor([9e4, -9e4]).to(batch.kv_c)
    return batch


_POISONS = {"zero": 0.0, "NaN": torch.nan, "+inf": torch.inf, "-inf": -torch.inf}


class Padding(LatentCheck):
    name = "padding"
    proves = (
        "Padded tokens and requests without keys give zeros and -inf; what lies behind seq_len never matters."
    )

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        for feature in ("plain", "no_lse"):
            for batch in (PADDED, "graph_padding_requests", "zero_length_rows", MIXED):
                yield from generate.case(feature, batch)
        for case in generate.case("plain", DECODE):
            nothing = replace(case.mla, query_lens=(0, 0), context_lens=(0, 0), num_padded_tokens=3)
            yield replace(case, id="plain-nothing_but_padding", mla=nothing)

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        batch, findings = subject.batch(case.mla), list[str]()
        stale, calm = _unowned(batch), list[Tensor]()
        for name, value in _POISONS.items():
            batch.kv_cache[stale.to(subject.device)] = value
            batch.poison_outputs()
            for role in subject.roles:
                subject.run(role, batch)
            results = _results(subject, batch)
            findings += [f"with {name} in stale memory: {fault}" for fault in _unfilled(subject, batch)]
            calm = calm or results
            for got, wanted in zip(results, calm, strict=True):
                if not torch.allclose(got.float(), wanted.float(), rtol=1e-3, atol=1e-5, equal_nan=True):
                    findings.append(f"{name} in memory that no request owns: {differing(got, wanted)}")
        return findings


def _results(subject: LatentSubject, batch: MLABatch) -> list[Tensor]:
    outputs = (batch.latent_output, batch.lse, None if subject.mixed is None else batch.output)
    return [x.clone() for x in outputs if x is not None]


def _unowned(batch: MLABatch) -> Tensor:
    """bool [B, S]: rows of the cache that no request owns."""
    size = batch.kv_cache.shape[1]
    owned = torch.zeros(batch.kv_cache.shape[0] * size, dtype=torch.bool)
    for row, length in enumerate(batch.seq_lens.tolist()):
        positions = torch.arange(length)
        blocks = batch.block_table[row].cpu().long()[positions // size]
        owned[blocks * size + positions % size] = True
    return ~owned.view(-1, size)


def _unfilled(subject: LatentSubject, batch: MLABatch) -> Iterator[str]:
    starts, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    places = {f"tail from token {starts[-1]}": slice(starts[-1], None)}
    for row, length in enumerate(lens):
        if length == 0 and starts[row + 1] > starts[row]:
            places[f"request {row} of seq_len 0"] = slice(starts[row], starts[row + 1])
    outputs = {"latent output": batch.latent_output}
    if subject.mixed is not None:
        outputs["output"] = batch.output
    for where, rows in places.items():
        for what, output in outputs.items():
            if not bool((output[rows] == 0).all()):
                yield f"{what} of the {where} is not 0"
        if batch.lse is not None and not bool((batch.lse[rows] == -torch.inf).all()):
            yield f"LSE of the {where} is not -inf"


class StateAudit(LatentCheck):
    name = "state_audit"
    proves = "A call changes its declared arguments and no other memory of the process, and does change them."

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        yield from generate.some(*SAMPLES)

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        unwritten = subject.batch(replace(case.mla, new_tokens_written=False))
        calls = {**subject.calls(subject.batch(case.mla)), "write": subject.write_call(unwritten)}
        allow = [AllowedWrite(x, "a workspace of the backend") for x in subject.backend.workspaces()]
        findings: list[str] = []
        for what, call in calls.items():
            findings += write_faults(what, audit_op(call.op, *call.arguments, allow=allow))
        return findings


class Overflow(LatentCheck):
    name = DenseOverflow.name
    proves = DenseOverflow.proves

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        feature = "cache_fp8" if "cache_fp8" in generate.features else "plain"
        for case in generate.case(feature, DECODE, new_tokens_written=False, lse=False):
            for name in (GEOMETRY, *FAR_AWAY):
                yield replace(case, id=name)

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        if case.id == GEOMETRY:
            return list(offsets_allowed(subject, case.mla))
        return list(wrong_far_away(subject, subject.batch(case.mla), case.id))
