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

__all__ = ["FAR_AWAY", "GEOMETRY", "Overflow", "offsets_allowed", "wrong_far_away"]

_LIMIT = 2**31 - 1


class Overflow(Check):
    name = "overflow"
    proves = (
        "Offsets beyond 2**31 - 1 are read and written right, or max_cache_offset says no and is kept to; "
        "blocks beyond 2**16 are, too."
    )

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        narrow = [n for n, f in generate.features.items() if f.claim == "kv_cache_dtype" and "fp8" in n]
        feature = narrow[0] if narrow else "plain"
        for case in generate.case(feature, "decode", new_tokens_written=False, lse=False):
            for name in (GEOMETRY, *FAR_AWAY):
                yield replace(case, id=name)

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        if case.id == GEOMETRY:
            return list(offsets_allowed(subject, case.attention))
        return list(wrong_far_away(subject, subject.batch(case.attention), case.id))


def wrong_far_away(subject: BaseSubject[Any, Batch], batch: Batch, how: str) -> Iterator[str]:
    """Of a write and reads of the batch in a large cache, unless they are refused as claimed.

    Args:
        how: of `FAR_AWAY`.
    """
    far = FAR_AWAY[how](batch)
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
    """The same batch with so large a stride between blocks that most offsets exceed 2**31 - 1."""
    blocks, page = batch.kv_cache.shape[0], math.prod(batch.kv_cache.shape[1:])
    return _moved(batch, -(-(_LIMIT + 1) // (blocks // 2)) // page * page + page, 0)


def _far_along(batch: Batch) -> Batch:
    """The same batch in the last blocks of so many that their numbers take more than 16 bits."""
    return _moved(batch, math.prod(batch.kv_cache.shape[1:]), 66_000)


def _moved(batch: Batch, stride: int, shift: int) -> Batch:
    """With ``stride`` elements from block to block, and all blocks but the reserved one ``shift`` further on.

    Only the pages that are touched become memory, on the CPU; a GPU allocates all of it.
    """
    near, moved = batch.kv_cache, cast(Any, batch)
    blocks, page = near.shape[0] + shift, math.prod(near.shape[1:])
    size = ((blocks - 1) * stride + page) * near.dtype.itemsize
    try:
        storage = torch.empty(size, dtype=torch.uint8, device=near.device)
    except RuntimeError as error:
        raise Skipped(f"no address space for {size / 2**30:.1f} GiB: {str(error).splitlines()[0]}") from None
    strides = (stride, *near[0].contiguous().stride())
    far = storage.view(near.dtype).as_strided((blocks, *near.shape[1:]), strides)
    copy_bits(far[:1], near[:1])
    copy_bits(far[shift:], near)
    table, slots = moved.block_table, moved.slot_mapping
    there: Batch = replace(
        moved, kv_cache=far, kv_buffer=far.unsqueeze(1),
        block_table=torch.where(table > 0, table + shift, table),
        slot_mapping=torch.where(slots < 0, slots, slots + shift * batch.case.block_size),
    )  # fmt: skip
    return there


GEOMETRY = "geometry"
FAR_AWAY = {"strides_beyond_32_bits": _far_apart, "blocks_beyond_16_bits": _far_along}
"""Id of a case -> the batch in a large cache."""
