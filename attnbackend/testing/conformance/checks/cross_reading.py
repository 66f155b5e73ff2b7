"""Caches that one backend writes and another reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from attnbackend.kv_cache import write_kv_cache
from attnbackend.registry import resolve_backend
from attnbackend.testing.batches import PagedBatch, op_kwargs, op_positional
from attnbackend.testing.conformance.batch_shapes import MIXED
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator, config_of
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.subject import Subject
from attnbackend.testing.judgement import assert_attention_within_rule

__all__ = ["CrossReading"]

READER = "TORCH_SDPA"


class CrossReading(Check):
    name = "cross_reading"
    proves = "What the default writer wrote the backend reads, and what the backend wrote TORCH_SDPA reads."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        about = ("plain", "memory", "layout", "kv_cache_dtype", "per_head_quant_scales")
        for name, feature in generate.features.items():
            if generate.quick and "dtype" in name and not name.startswith(generate.plain_cache):
                continue
            if feature.claim in about and name != "no_lse":
                yield from generate.case(name, MIXED, new_tokens_written=False)

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        findings = []
        for what, write, read in (
            ("written by the default writer, read by the backend", _default_write, subject.run_forward),
            ("written and read by the backend", subject.run_write, subject.run_forward),
            ("read without key and value", _default_write, partial(_read_cache_alone, subject)),
            (f"written by the backend, read by {READER}", subject.run_write, _other_read),
        ):
            batch = subject.batch(case.attention)
            if read is _other_read and not _can_read(subject, case):
                continue
            write(batch)
            read(batch)
            try:
                assert_attention_within_rule(batch)
            except AssertionError as error:
                findings.append(f"{what}: {error}")
        return findings


def _read_cache_alone(subject: Subject, batch: PagedBatch) -> None:
    """As layers do that share another layer's cache."""
    subject.run_forward(batch, key=None, value=None)


def _default_write(batch: PagedBatch) -> None:
    write_kv_cache(
        batch.key, batch.value, batch.kv_cache, batch.slot_mapping, batch.k_scale, batch.v_scale
    )  # fmt: skip


def _can_read(subject: Subject, case: ConformanceCase) -> bool:
    config = config_of(case.attention, subject.device.type)
    return not resolve_backend(READER).validate_configuration(config)


def _other_read(batch: PagedBatch) -> None:
    torch.ops.attnbackend.torch_sdpa_forward(*op_positional(batch), **op_kwargs(batch))
