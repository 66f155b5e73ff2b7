"""The ops in a compiled graph."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from attnbackend._torch_compat import inductor_code, reset_compiler
from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED, PADDED
from attnbackend.testing.conformance.bits import differing, same_bits
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.step import Step, StepTensors
from attnbackend.testing.conformance.subject import Subject

__all__ = ["Compiled"]

_ALLOCATION = re.compile(r"empty_strided\w*\(\(([\d, ]*)\)")


class Compiled(Check):
    name = "compiled"
    proves = "Compiled, write and read give eager's output and cache, and the generated code copies no cache."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        unwritten = {"new_tokens_written": False}
        fp8 = next((n for n in generate.features if "float32_cache_fp8" in n), "hnd")
        yield from generate.some(
            ("everything", MIXED),
            ("plain", PADDED),
            ("layers_interleaved", DECODE),
            (fp8, DECODE),
            ("ranges_over_chunks", MIXED),
            ("encoder_window", MIXED),
            ("cross", PADDED),
            **unwritten,
        )
        for case in generate.case("plain", DECODE, spare_blocks=64, **unwritten):
            yield replace(case, id="generated_code")

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        batch = subject.batch(replace(case.attention, lse=False))
        step = Step(subject, batch)
        eager, traced = (step.tensors(subject, batch) for _ in range(2))
        expected = step(eager)
        reset_compiler()
        try:
            if case.id == "generated_code":
                output, code = inductor_code(step, traced)
                copies = list(_copies(code, traced))
            else:
                output = torch.compile(step, backend="aot_eager", fullgraph=True)(traced)
                copies = []
        finally:
            reset_compiler()
        return [*copies, *_apart("output", output, expected), *_apart("cache", traced, eager)]


def _apart(what: str, got: torch.Tensor | StepTensors, wanted: torch.Tensor | StepTensors) -> Iterator[str]:
    a, b = (x if isinstance(x, torch.Tensor) else x["kv_cache"] for x in (got, wanted))
    assert a is not None
    assert b is not None
    if not same_bits(a, b):
        yield f"{what} of the compiled graph differs from eager's: {differing(a, b)}"


def _copies(code: str, tensors: StepTensors) -> Iterator[str]:
    """Allocations of a cache's size in generated code; the case's cache is larger than all else."""
    cache = tensors["kv_cache"]
    assert cache is not None
    sizes = [[int(n) for n in re.findall(r"\d+", shape)] for shape in _ALLOCATION.findall(code)]
    if not sizes:
        yield "the generated code allocates nothing, not even the output: it cannot be judged"
    for shape in sizes:
        if math.prod(shape) >= cache.numel():
            yield f"the generated code allocates a tensor of shape {shape}, as large as the cache: a copy"
