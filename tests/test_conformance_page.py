"""The page of matrices: written section by section, and of the cases that there are."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from attnbackend import resolve_backend
from attnbackend.testing.conformance import CHECKS, check_backend
from attnbackend.testing.conformance.cases import CaseGenerator
from attnbackend.testing.conformance.digest import cases_digest
from attnbackend.testing.conformance.honest import HonestBackend
from attnbackend.testing.conformance.latent import LATENT_CHECKS, LatentCases
from attnbackend.testing.conformance.mutants import MUTANTS
from attnbackend.testing.conformance.page import report_section, write_section

LIBRARIES = ("FLASH_ATTN", "FLASH_ATTN+TRITON_ATTN")
DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("conformance-matrix.md", "conformance-h200.md")
SECTION = re.compile(r"<!-- (\S+) (\S+) -->\n(.*?)(?=\n<!-- |\Z)", re.DOTALL)


def test_a_section_replaces_its_older_self_and_leaves_the_others(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for name in ("TORCH_SDPA", "CPU_ATTN", "TORCH_SDPA"):
        report = check_backend(name, only=["determinism"])
        write_section(page, report, f"attnbackend check {name}")
    text = page.read_text()
    assert re.findall("<!-- (.*) -->", text) == ["CPU_ATTN cpu", "TORCH_SDPA cpu"]
    assert text.count("# What each backend does") == 1
    assert "`attnbackend check CPU_ATTN`" in text
    changed = text.replace("# What each backend does", "# What each backend does here\n\nOur words.", 1)
    for own in (text, changed):
        page.write_text(own)
        write_section(page, report, "attnbackend check TORCH_SDPA")
        assert page.read_text() == own


def test_a_section_says_what_passed_and_what_failed() -> None:
    honest = check_backend(
        "attnbackend.testing.conformance.honest.HonestBackend", only=["lse"], case="plain*"
    )
    assert re.search(r"\nConforms: [0-9]+ passed; ", report_section(honest, "x"))
    broken = check_backend(MUTANTS["lse_in_base_two"].backend(), only=["lse"], case="plain*")
    section = report_section(broken, "x")
    assert "Does not conform: " in section
    assert "| FAIL " in section


def test_the_digest_of_cases_tells_their_contents_and_not_their_order() -> None:
    generate = CaseGenerator(HonestBackend, "cpu", quick=True)
    cases = [("lse", case) for case in CHECKS["lse"].cases(generate)]
    digest = cases_digest(cases)
    assert re.fullmatch("[0-9a-f]{8}", digest)
    assert cases_digest(reversed(cases)) == digest
    (check, first), *others = cases
    longer = replace(first, attention=replace(first.attention, context_lens=(71, 0, 46)))
    assert digest not in (cases_digest([(check, longer), *others]), cases_digest([("plan", first), *others]))


def sections() -> list[tuple[str, str, str]]:
    return [section for page in PAGES for section in SECTION.findall((DOCS / page).read_text())]


@pytest.mark.parametrize(("name", "device", "text"), sections(), ids=lambda x: x if len(x) < 30 else "")
def test_the_pages_show_the_cases_of_today_s_claims(name: str, device: str, text: str) -> None:
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    (_, *checks), _, *rows = table
    shown = Counter(
        {
            (claim, check): sum(map(int, re.findall(r"\d+", cell)))
            for claim, *cells in rows
            for check, cell in zip(checks, cells, strict=True)
            if cell
        }
    )
    backend = resolve_backend(name)
    if name in LIBRARIES and (missing := backend.unavailable_reason(device)):
        pytest.skip(f"the claims of {name} are those of its library: {missing}")
    suite, cases = (LATENT_CHECKS, LatentCases) if backend.is_mla else (CHECKS, CaseGenerator)
    generate = cases(backend, device, quick="--quick" in text)
    planned = [(check.name, case) for check in suite.values() for case in check.cases(generate)]
    again = f"claims or cases changed: run the command of {name} on {device} again"
    assert shown == Counter((case.feature, check) for check, case in planned), again
    assert f"; cases {cases_digest(planned)}." in text, again
    assert "Does not conform" not in text
