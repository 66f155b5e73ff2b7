"""The ops of latent attention in traced programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED
from attnbackend.testing.conformance.checks.compiled import Compiled as DenseCompiled
from attnbackend.testing.conformance.checks.compiled import compiled_differs
from attnbackend.testing.conformance.checks.export import PACKAGED, loaded_differs
from attnbackend.testing.conformance.checks.export import Export as DenseExport
from attnbackend.testing.conformance.latent.base import LatentCheck
from attnbackend.testing.conformance.latent.case import LatentCase
from attnbackend.testing.conformance.latent.cases import LatentCases
from attnbackend.testing.conformance.latent.memory import SAMPLES
from attnbackend.testing.conformance.latent_subject import LatentSubject
from attnbackend.testing.mla_batches import MLABatch

__all__ = ["Compiled", "Export", "OpCheck"]


class OpCheck(LatentCheck):
    name = "opcheck"
    proves = "Schemas, fakes, autograd registration and AOT dispatch agree (torch.library.opcheck)."

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        yield from generate.some(*SAMPLES)

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        batch, findings = _comparable(subject.batch(case.mla)), []
        calls = {**subject.calls(batch), "write": subject.write_call(batch)}
        for what, call in calls.items():
            results = torch.library.opcheck(call.op, *call.arguments, raise_exception=False)
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
    name = DenseCompiled.name
    proves = DenseCompiled.proves

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        unwritten = {"new_tokens_written": False, "lse": False}
        yield from generate.some(
            ("plain", MIXED), ("layers_interleaved", DECODE), ("cache_fp8_scaled", DECODE), **unwritten
        )
        for case in generate.case("plain", DECODE, spare_blocks=200, **unwritten):
            yield replace(case, id="generated_code")

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        batch = subject.batch(case.mla)
        return [
            finding
            for role in subject.roles
            for finding in compiled_differs(subject, role, batch, True, case.id == "generated_code")
        ]


class Export(LatentCheck):
    name = DenseExport.name
    proves = DenseExport.proves

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        unwritten = {"new_tokens_written": False, "lse": False}
        yield from generate.some(("plain", MIXED), ("cache_fp8_scaled", DECODE), **unwritten)
        for case in generate.case("plain", DECODE, **unwritten):
            yield replace(case, id=PACKAGED)

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        batch = subject.batch(case.mla)
        return [
            finding
            for role in subject.roles
            for finding in loaded_differs(subject, role, batch, True, case.id == PACKAGED)
        ]
