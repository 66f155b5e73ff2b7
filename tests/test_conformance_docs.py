"""The pages on backends say what is so: their code runs, their tables are those of the data."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from attnbackend.testing.conformance.mutants.table import with_tables

DOCS = Path(__file__).parents[1] / "docs"


def test_the_code_of_the_author_s_guide_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("my_attention")
    monkeypatch.setitem(sys.modules, "my_attention", module)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "writing-a-backend.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, "writing-a-backend.md", "exec"), vars(module))
    assert "BOASTER on cpu does not conform" in capsys.readouterr().out


def test_the_tables_are_those_of_the_data() -> None:
    text = (DOCS / "conformance.md").read_text()
    assert with_tables(text) == text, (
        "run python -m attnbackend.testing.conformance.mutants.table docs/conformance.md"
    )
