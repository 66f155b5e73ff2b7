"""The ops in an exported program."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnbackend._torch_compat import load_aoti_package, reset_compiler
from attnbackend.programs import save_package
from attnbackend.testing.conformance.base_subject import BaseSubject, Batch
from attnbackend.testing.conformance.batch_shapes import DECODE, MIXED, PADDED
from attnbackend.testing.conformance.case import ConformanceCase
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.checks.compiled import differences
from attnbackend.testing.conformance.outcome import Skipped
from attnbackend.testing.conformance.step import Step
from attnbackend.testing.conformance.subject import Subject

__all__ = ["PACKAGED", "Export", "loaded_differs"]

PACKAGED = "aotinductor"
"""Id of the case that is slow."""


class Export(Check):
    name = "export"
    proves = "Exported, saved and loaded, write and read give eager's output and cache."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        unwritten = {"new_tokens_written": False}
        yield from generate.some(("everything", MIXED), ("plain", PADDED), ("ranges", MIXED), **unwritten)
        yield from generate.some(("encoder_only", MIXED), ("cross", DECODE), **unwritten)
        for case in generate.case("plain", DECODE, **unwritten):
            yield replace(case, id=PACKAGED)

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        batch = subject.batch(replace(case.attention, lse=False))
        writes = case.attention.writes_new_tokens
        return list(loaded_differs(subject, "forward", batch, writes, case.id == PACKAGED))


def loaded_differs(
    subject: BaseSubject[Any, Batch], role: str, batch: Batch, writes: bool, packaged: bool
) -> Iterator[str]:
    """An exported write and read, saved and loaded, against eager ones.

    Args:
        packaged: as an AOTInductor package.

    Raises:
        Skipped: ``packaged``, and the subject leaves out what is slow.
    """
    if packaged and not subject.slow:
        raise Skipped("building an AOTInductor package takes a C++ compile; ask for it with --slow")
    step = Step(subject, role, batch, writes)
    example, eager, loaded = (step.tensors(subject, role, batch) for _ in range(3))
    expected = step(eager)
    reset_compiler()
    program = torch.export.export(step, (example,))
    output = (_packaged(program) if packaged else _saved(program))(loaded)
    pairs = {"output": (output, expected), "cache": (loaded["kv_cache"], eager["kv_cache"])}
    yield from differences(f"{subject.called(role)}%s of the loaded program", pairs)


def _saved(program: torch.export.ExportedProgram) -> Callable[..., Any]:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def _packaged(program: torch.export.ExportedProgram) -> Callable[..., Any]:
    with tempfile.TemporaryDirectory() as folder:
        return load_aoti_package(save_package(program, Path(folder) / "step.pt2"))
