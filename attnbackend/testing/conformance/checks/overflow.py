"""Caches whose offsets do not fit into 32 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnbackend.kv_cache import kv_cache_geometry, spec_of
from attnbackend.testing.batches import PagedBatch
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.outcome import Skipped
from attnbackend.testing.conformance.planned import params_of
from attnbackend.testing.conformance.subject import Subject
from attnbackend.testing.judgement import assert_attention_within_rule

__all__ = ["Overflow"]

_LIMIT = 2**31 - 1


class Overflow(Check):
    name = "overflow"
    proves = (
        "Offsets beyond 2**31 - 1 are read and written right, or max_cache_offset says no and is kept to."
    )

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        narrow = [n for n, f in generate.features.items() if f.claim == "kv_cache_dtype" and "fp8" in n]
        feature = narrow[0] if narrow else "plain"
        for case in generate.case(feature, "decode", new_tokens_written=False, lse=False):
            yield replace(case, id="geometry")
            yield replace(case, id="strides_beyond_32_bits")

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        if case.id == "geometry":
            return _geometry(subject, case)
        batch = subject.batch(case.attention)
        far = _far_apart(batch)
        limit = subject.backend.max_cache_offset
        try:
            subject.run_write(far)
            subject.run_forward(far)
        except ValueError:
            if limit is None:
                raise
            return ()
        assert_attention_within_rule(replace(batch, output=far.output, lse=far.lse))
        return ()


def _geometry(subject: Subject, case: ConformanceCase) -> Sequence[str]:
    """Allocates nothing: shapes and strides alone are looked at."""
    limit = subject.backend.max_cache_offset
    spec = spec_of(params_of(case.attention, subject.device.type))
    page = kv_cache_geometry(subject.backend, spec, 1).num_elements
    most = _LIMIT if limit is None else limit
    fitting = max(1, (most + 1) // page)
    kv_cache_geometry(subject.backend, spec, fitting)
    try:
        geometry = kv_cache_geometry(subject.backend, spec, fitting + 1)
    except ValueError:
        return () if limit is not None else ["a cache beyond 2**31 - 1 is refused without max_cache_offset"]
    if limit is not None:
        return [f"a cache that reaches offset {geometry.max_offset} is allowed, beyond the claim {limit}"]
    return ()


def _far_apart(batch: PagedBatch) -> PagedBatch:
    """The same batch with so large a stride between blocks that most offsets exceed 2**31 - 1.

    Only the pages that are touched become memory, on the CPU; a GPU allocates all of it.
    """
    near = batch.kv_cache
    blocks = near.shape[0]
    page = 2 * near.shape[2] * near.shape[3] * near.shape[4]
    stride = -(-(_LIMIT + 1) // (blocks // 2)) // page * page + page
    size = ((blocks - 1) * stride + page) * near.dtype.itemsize
    try:
        storage = torch.empty(size, dtype=torch.uint8, device=near.device)
    except RuntimeError as error:
        raise Skipped(f"no address space for {size / 2**30:.1f} GiB: {str(error).splitlines()[0]}") from None
    strides = (stride, *near[0].contiguous().stride())
    far = storage.view(near.dtype).as_strided(near.shape, strides)
    _copy_bits(far, near)
    return replace(batch, kv_cache=far, kv_buffer=far.unsqueeze(1))


def _copy_bits(target: Tensor, source: Tensor) -> None:
    if source.dtype.itemsize == 1:
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)
