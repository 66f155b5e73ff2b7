"""What the cache writer writes, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from attnbackend.testing.batches import expected_kv_cache
from attnbackend.testing.conformance.batch_shapes import BATCHES, MIXED, PADDED
from attnbackend.testing.conformance.bits import differing, same_bits
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.subject import Subject

__all__ = ["CacheWrites"]

_ABOUT_MEMORY = ("memory", "layout", "head_size", "block_size", "kv_cache_dtype", "per_head_quant_scales")


class CacheWrites(Check):
    name = "cache_writes"
    proves = "New tokens lie in their slots, rounded once and saturated; no other byte of the buffer changes."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        unwritten = {"new_tokens_written": False, "raw_new_tokens": True}
        for name, feature in generate.features.items():
            if name == "plain":
                for batch in (*BATCHES, "long_prompt", "many_requests"):
                    yield from generate.case(name, batch, **unwritten)
            elif feature.claim in _ABOUT_MEMORY:
                yield from generate.some((name, MIXED), (name, PADDED), **unwritten)

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        batch = subject.batch(case.attention)
        if batch.kv_cache.dtype.itemsize == 1 and len(batch.key):
            extremes = torch.tensor([9e4, -9e4, torch.inf, -torch.inf])[: batch.key.shape[-1]]
            batch.key[0, 0, : len(extremes)] = extremes.to(batch.key)
        expected, everything = expected_kv_cache(batch), batch.kv_buffer.clone()
        before = batch.kv_cache.clone()
        subject.run_write(batch)
        findings = []
        if not same_bits(batch.kv_cache, expected):
            findings.append(
                f"the layer's cache is not what it must be: {differing(batch.kv_cache, expected)}"
            )
        batch.kv_cache.copy_(before)
        if not same_bits(batch.kv_buffer, everything):
            where = differing(batch.kv_buffer, everything)
            findings.append(f"memory of other layers was written: {where}")
        return findings
