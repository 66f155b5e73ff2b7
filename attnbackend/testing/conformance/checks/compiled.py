"""The ops in a compiled graph."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbackend._torch_compat import inductor_code, reset_compiler
from attnbackend.testing.conformance.base_subject import BaseSubject, Batch
from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED, PADDED
from attnbackend.testing.conformance.bits import differing, same_bits
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.step import Step, StepTensors
from attnbackend.testing.conformance.subject import Subject

__all__ = ["Compiled", "compiled_differs", "differences"]

_ALLOCATION = re.compile(r"empty_strided\w*\(\(([\d, ]*)\)")


class Compiled(Check):
    name = "compiled"
    proves = "Compiled, write and read give eager's output and cache, and the generated code copies no cache."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        unwritten = {"new_tokens_written": False}
        yield from generate.some(
            ("everything", MIXED),
            ("plain", PADDED),
            ("layers_interleaved", DECODE),
            (generate.scaled_cache, DECODE),
            ("ranges_over_chunks", MIXED),
            ("encoder_window", MIXED),
            ("cross", PADDED),
            **unwritten,
        )
        for case in generate.case("plain", DECODE, spare_blocks=64, **unwritten):
            yield replace(case, id="generated_code")

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        batch = subject.batch(replace(case.attention, lse=False))
        writes = case.attention.writes_new_tokens
        return list(compiled_differs(subject, "forward", batch, writes, case.id == "generated_code"))


def compiled_differs(
    subject: BaseSubject[Any, Batch], role: str, batch: Batch, writes: bool, generated: bool
) -> Iterator[str]:
    """A compiled write and read against eager ones; with ``generated`` by Inductor, whose code is read."""
    step = Step(subject, role, batch, writes)
    eager, traced = (step.tensors(subject, role, batch) for _ in range(2))
    expected = step(eager)
    reset_compiler()
    try:
        if generated:
            output, code = inductor_code(step, traced)
            yield from _copies(code, traced)
        else:
            output = torch.compile(step, backend="aot_eager", fullgraph=True)(traced)
    finally:
        reset_compiler()
    pairs = {"output": (output, expected), "cache": (traced["kv_cache"], eager["kv_cache"])}
    yield from differences(f"{subject.called(role)}%s of the compiled graph", pairs)


def differences(what: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> Iterator[str]:
    """Of what was got from what eager gives; the name goes into ``what``."""
    for name, (got, wanted) in pairs.items():
        if not same_bits(got, wanted):
            yield f"{what % name} differs from eager's: {differing(got, wanted)}"


def _copies(code: str, tensors: StepTensors) -> Iterator[str]:
    """Allocations of a cache's size in generated code; the case's cache is larger than all else."""
    cache = tensors["kv_cache"]
    sizes = [[int(n) for n in re.findall(r"\d+", shape)] for shape in _ALLOCATION.findall(code)]
    if not sizes:
        yield "the generated code allocates nothing, not even the output: it cannot be judged"
    for shape in sizes:
        if math.prod(shape) >= cache.numel():
            yield f"the generated code allocates a tensor of shape {shape}, as large as the cache: a copy"
