"""torch's own checks of a custom op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from attnbackend.testing.batches import PagedBatch
from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED, PADDED
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.subject import Subject

__all__ = ["OpCheck"]


class OpCheck(Check):
    name = "opcheck"
    proves = "Schema, fake, autograd registration and AOT dispatch of both ops agree (torch.library.opcheck)."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        yield from generate.some(
            ("everything", MIXED), ("no_lse", PADDED), ("plain", "one_token"), ("strided_tensors", DECODE),
            ("layers_interleaved", DECODE), (generate.scaled_cache, DECODE), ("ranges_over_window", MIXED),
            ("chunks", DECODE), ("encoder_only", MIXED), ("cross", DECODE),
        )  # fmt: skip

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        findings = []
        for what, op, arguments in (
            ("forward", subject.forward, subject.forward_args),
            ("kv_cache_update", subject.write, subject.write_args),
        ):
            if op is subject.write and not case.attention.writes_new_tokens:
                continue
            args, kwargs = arguments(_comparable(subject.batch(case.attention)))
            results = torch.library.opcheck(op, args, kwargs, raise_exception=False)
            findings += [
                f"{what}: {utility}: {str(result).splitlines()[0] if str(result) else type(result).__name__}"
                for utility, result in results.items()
                if result != "SUCCESS"
            ]
        return findings


def _comparable(batch: PagedBatch) -> PagedBatch:
    """opcheck compares by value, so nothing may be NaN, nor float8, which torch cannot compare."""
    if batch.kv_cache.dtype.itemsize == 1:
        batch = replace(batch, kv_cache=batch.kv_cache.view(torch.uint8))
        batch.kv_cache.clamp_(max=0x70)  # no NaN in either format
    for x in (batch.kv_cache, batch.query, batch.key, batch.value, batch.output, batch.lse):
        if x is not None and x.is_floating_point():
            x.copy_(x.nan_to_num(0.5))
    return batch
