"""The ops in an exported program."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnbackend._torch_compat import aoti_round_trip, reset_compiler
from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED, PADDED
from attnbackend.testing.conformance.bits import differing, same_bits
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.outcome import Skipped
from attnbackend.testing.conformance.step import Step
from attnbackend.testing.conformance.subject import Subject

__all__ = ["Export"]


class Export(Check):
    name = "export"
    proves = "Exported, saved and loaded, write and read give eager's output and cache."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        unwritten = {"new_tokens_written": False}
        yield from generate.some(("everything", MIXED), ("plain", PADDED), ("ranges", MIXED), **unwritten)
        yield from generate.some(("encoder_only", MIXED), ("cross", DECODE), **unwritten)
        for case in generate.case("plain", DECODE, **unwritten):
            yield replace(case, id="aotinductor")

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        if case.id == "aotinductor" and not subject.slow:
            raise Skipped("building an AOTInductor package takes a C++ compile; ask for it with --slow")
        batch = subject.batch(replace(case.attention, lse=False))
        step = Step(subject, batch)
        example, eager, loaded = (step.tensors(subject, batch) for _ in range(3))
        expected = step(eager)
        reset_compiler()
        program = torch.export.export(step, (example,))
        run = _packaged(program) if case.id == "aotinductor" else _saved(program)
        output = run(loaded)
        pairs = {"output": (output, expected), "cache": (loaded["kv_cache"], eager["kv_cache"])}
        return [
            f"{what} of the loaded program differs from eager's: {differing(got, wanted)}"
            for what, (got, wanted) in pairs.items()
            if not same_bits(got, wanted)
        ]


def _saved(program: torch.export.ExportedProgram) -> Callable[..., Any]:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def _packaged(program: torch.export.ExportedProgram) -> Callable[..., Any]:
    with tempfile.TemporaryDirectory() as folder:
        return aoti_round_trip(program, str(Path(folder) / "step.pt2"))
