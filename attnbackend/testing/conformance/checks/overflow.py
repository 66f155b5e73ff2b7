"""Caches whose offsets do not fit into 32 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from attnbackend.kv_cache import kv_cache_geometry, spec_of
from attnbackend.testing.conformance.base_subject import BaseSubject, Batch, Case
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.exchange import copy_bits
from attnbackend.testing.conformance.outcome import Skipped
from attnbackend.testing.conformance.subject import Subject

__all__ = ["Overflow", "offsets_allowed", "wrong_far_away"]

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
            return list(offsets_allowed(subject, case.attention))
        return list(wrong_far_away(subject, subject.batch(case.attention)))


def wrong_far_away(subject: BaseSubject[Any, Batch], batch: Batch) -> Iterator[str]:
    """Of a write and reads of the batch in a cache of large strides, unless they are refused as claimed."""
    far = _far_apart(batch)
    for role in subject.roles:
        try:
            subject.run_write(far)
            subject.run(role, far)
        except ValueError:
            if subject.backend.max_cache_offset is None:
                raise
            continue
        try:
            subject.judge(role, batch)  # The results are where the nearer batch has them.
        except AssertionError as error:
            yield f"{subject.called(role)}{error}"


def offsets_allowed(subject: BaseSubject[Case, Any], case: Case) -> Iterator[str]:
    """Allocates nothing: shapes and strides alone are looked at."""
    limit = subject.backend.max_cache_offset
    spec = spec_of(subject.params(case))
    page = kv_cache_geometry(subject.backend, spec, 1).num_elements
    most = _LIMIT if limit is None else limit
    fitting = max(1, (most + 1) // page)
    kv_cache_geometry(subject.backend, spec, fitting)
    try:
        geometry = kv_cache_geometry(subject.backend, spec, fitting + 1)
    except ValueError:
        if limit is None:
            yield "a cache beyond 2**31 - 1 is refused without max_cache_offset"
        return
    if limit is not None:
        yield f"a cache that reaches offset {geometry.max_offset} is allowed, beyond the claim {limit}"


def _far_apart(batch: Batch) -> Batch:
    """The same batch with so large a stride between blocks that most offsets exceed 2**31 - 1.

    Only the pages that are touched become memory, on the CPU; a GPU allocates all of it.
    """
    near, moved = batch.kv_cache, cast(Any, batch)
    blocks, page = near.shape[0], math.prod(near.shape[1:])
    stride = -(-(_LIMIT + 1) // (blocks // 2)) // page * page + page
    size = ((blocks - 1) * stride + page) * near.dtype.itemsize
    try:
        storage = torch.empty(size, dtype=torch.uint8, device=near.device)
    except RuntimeError as error:
        raise Skipped(f"no address space for {size / 2**30:.1f} GiB: {str(error).splitlines()[0]}") from None
    strides = (stride, *near[0].contiguous().stride())
    far = storage.view(near.dtype).as_strided(near.shape, strides)
    copy_bits(far, near)
    there: Batch = replace(moved, kv_cache=far, kv_buffer=far.unsqueeze(1))
    return there
