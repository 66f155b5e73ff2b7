"""What the ops of latent attention read and write besides their answer.

Shape legend: B blocks, S block_size, W row width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnbackend._torch_compat import reset_compiler
from attnbackend.testing.conformance.batch_shapes import BATCHES, DECODE, MIXED, PADDED
from attnbackend.testing.conformance.bits import differing, same_bits
from attnbackend.testing.conformance.latent.base import LatentCheck
from attnbackend.testing.conformance.latent.case import LatentCase
from attnbackend.testing.conformance.latent.cases import LatentCases
from attnbackend.testing.conformance.latent.subject import Arguments, LatentSubject
from attnbackend.testing.mla_batches import MLABatch, expected_mla_cache, update_arguments
from attnbackend.testing.state_audit import AllowedWrite, AuditReport, audit_op

__all__ = ["CacheWrites", "Compiled", "OpCheck", "Padding", "StateAudit"]

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
            for op, (positional, keyword) in subject.calls(batch).values():
                op(*positional, **keyword)
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


_SAMPLES = (
    ("plain", MIXED), ("no_lse", PADDED), ("plain", "one_token"), ("strided_tensors", DECODE),
    ("layers_interleaved", DECODE), ("cache_fp8_scaled", DECODE),
)  # fmt: skip


class StateAudit(LatentCheck):
    name = "state_audit"
    proves = "A call changes its declared arguments and no other memory of the process, and does change them."

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        yield from generate.some(*_SAMPLES)

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        allow = [AllowedWrite(x, "a workspace of the backend") for x in subject.backend.workspaces()]
        findings: list[str] = []
        for role, (op, (positional, keyword)) in subject.calls(subject.batch(case.mla)).items():
            findings += _faults(role, audit_op(op, positional, keyword, allow=allow))
        unwritten = subject.batch(replace(case.mla, new_tokens_written=False))
        positional, keyword = update_arguments(unwritten)
        return [*findings, *_faults("write", audit_op(subject.write, positional, keyword, allow=allow))]


def _faults(what: str, report: AuditReport) -> Iterator[str]:
    for finding in report.findings:
        yield f"{what}: {finding}"
    for name in sorted(report.declared - report.written):
        yield f"{what}: {name} is declared written, poisoned before the call, and was not written"


class OpCheck(LatentCheck):
    name = "opcheck"
    proves = "Schemas, fakes, autograd registration and AOT dispatch agree (torch.library.opcheck)."

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        yield from generate.some(*_SAMPLES)

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        batch, findings = _comparable(subject.batch(case.mla)), []
        calls = {**subject.calls(batch), "write": (subject.write, update_arguments(batch))}
        for what, (op, (positional, keyword)) in calls.items():
            results = torch.library.opcheck(op, positional, keyword, raise_exception=False)
            findings += [
                f"{what}: {utility}: {(str(result) or type(result).__name__).splitlines()[0]}"
                for utility, result in results.items()
                if result != "SUCCESS"
            ]
        return findings


def _comparable(batch: MLABatch) -> MLABatch:
    """opcheck compares by value, so nothing may be NaN, nor float8, which torch cannot compare."""
    if batch.kv_cache.dtype.itemsize == 1:
        batch = replace(batch, kv_cache=batch.kv_cache.view(torch.uint8))
        batch.kv_cache.clamp_(max=0x70)
    inputs = (batch.kv_cache, batch.query, batch.query_latent, batch.query_rope, batch.kv_c, batch.k_pe)
    for x in (*inputs, batch.output, batch.latent_output, batch.lse):
        if x is not None and x.is_floating_point():
            x.copy_(x.nan_to_num(0.5))
    return batch


class Compiled(LatentCheck):
    name = "compiled"
    proves = "In a compiled graph, a write and a read of one cache give eager's output and cache."

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        yield from generate.some(
            ("plain", MIXED), ("plain", DECODE), ("layers_interleaved", DECODE), ("cache_fp8_scaled", DECODE),
            new_tokens_written=False,
        )  # fmt: skip

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        reset_compiler()
        try:
            return list(_differences(subject, case))
        finally:
            reset_compiler()


def _differences(subject: LatentSubject, case: LatentCase) -> Iterator[str]:
    def step(write: Arguments, read: Arguments) -> None:
        subject.write(*write[0], **write[1])
        op(*read[0], **read[1])

    for role in subject.calls(subject.batch(case.mla)):
        eager, traced = (subject.batch(case.mla) for _ in range(2))
        for run, batch in ((step, eager), (torch.compile(step, backend="aot_eager", fullgraph=True), traced)):
            op, arguments = subject.calls(batch)[role]
            run(update_arguments(batch), arguments)
        for what in ("output" if role == "forward_mixed" else "latent_output", "kv_cache"):
            got, wanted = getattr(traced, what), getattr(eager, what)
            if not same_bits(got, wanted):
                yield f"{what} of {role} in a graph differs from eager's: {differing(got, wanted)}"
