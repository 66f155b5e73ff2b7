"""``attnbackend check`` and ``pytest --attn-backend``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

import attnbackend
from attnbackend import cli
from attnbackend.cli.app import app

HONEST = "attnbackend.testing.conformance.honest.HonestBackend"
ROOT = Path(attnbackend.__file__).parents[1]

BACKEND_FILE = """
from attnbackend.testing.conformance.honest import HonestBackend
from attnbackend.testing.conformance.mutants.kernels import LSEInBaseTwo

class Liar(HonestBackend):
    get_name = staticmethod(lambda: "LIAR")
    get_impl_cls = staticmethod(lambda: LSEInBaseTwo)
"""

INNER_CLASSES = """
class Outer:
    class Inner(Liar):
        get_name = staticmethod(lambda: "INNER")

    class Wrong(Liar):
        get_name = staticmethod(lambda: "WRONG")
        get_impl_cls = staticmethod(lambda: int)
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def test_a_conforming_backend_exits_with_0_and_prints_a_matrix() -> None:
    result = run(HONEST, "--only", "lse", "--only", "overflow")
    assert result.exit_code == cli.EXIT_OK, result.output
    assert result.stdout.startswith("HONEST on cpu conforms")
    assert "lse" in result.stdout.splitlines()[1]


def test_a_failure_exits_with_1_and_its_line_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_liar.py").write_text(BACKEND_FILE)
    monkeypatch.chdir(tmp_path)
    result = run("my_liar.Liar", "--only", "lse", "--case", "plain*", "--seed", 3)
    assert result.exit_code == cli.EXIT_NOT_POSSIBLE
    assert "declare lse_base = LSEBase.TWO" in result.stdout
    line = next(line for line in result.stdout.splitlines() if "repeat: attnbackend check" in line)
    assert "--seed 3" in line
    again = run(*line.split("attnbackend check ")[1].split())
    assert again.exit_code == cli.EXIT_NOT_POSSIBLE
    assert "1 failed" in again.stdout


def test_json_and_html_hold_the_report(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = run("torch_sdpa", "--only", "determinism", "--json", "--html", page)
    data = json.loads(result.stdout)
    assert data["backend"] == "TORCH_SDPA"
    assert data["counts"]["skipped"] == len(data["outcomes"]) > 0
    assert "TORCH_SDPA" in page.read_text()


def test_a_log_gets_a_line_now_and_then_and_failures_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_liar.py").write_text(BACKEND_FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attnbackend.cli.check._SECONDS_BETWEEN_LINES", 0.0)
    result = run("my_liar.Liar", "--only", "lse", "--case", "plain*")
    lines = result.stderr.splitlines()
    assert "failed: lse plain-halves" in lines
    assert "my_liar.Liar: 2 of 2 cases, now lse" in lines
    assert "\x1b" not in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals in Python's pty on Windows")
def test_a_terminal_gets_a_bar_on_stderr_alone() -> None:
    import pty

    command = [
        sys.executable, "-c", "from attnbackend.cli import main; raise SystemExit(main())",
        "check", "CPU_ATTN", "--only", "determinism", "--json",
    ]  # fmt: skip
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            shown += part
        assert process.stdout is not None
        report = json.loads(process.stdout.read())
    os.close(ours)
    assert f"{len(report['outcomes'])}/{len(report['outcomes'])}".encode() in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NOBODY_ATTN"], "unknown attention backend"),
        (["cpu_attn", "--only", "numerix"], "did you mean numerics"),
        (["cpu_attn", "--device", "tpu"], "--device 'tpu' is unknown"),
        (["no_such_module.Backend"], "No module named"),
        ([".."], "'..' is no path of a backend class"),
        ([".Backend"], "'.Backend' is no path of a backend class"),
        (["cpu_attn", "--seed", "4294967296"], "seed is 4294967296; expected 0 <= seed < 4294967296"),
        (["cpu_attn", "--seed", "-1"], "seed is -1"),
    ],
)
def test_wrong_requests_exit_with_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == cli.EXIT_USER_ERROR
    assert message in result.stderr


def test_a_class_within_another_has_a_path_and_its_wrong_parts_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_classes.py").write_text(BACKEND_FILE + INNER_CLASSES)
    monkeypatch.chdir(tmp_path)
    options = ("--only", "lse", "--case", "plain-halves")
    found = run("my_classes:Outer.Inner", *options)
    assert found.exit_code == cli.EXIT_NOT_POSSIBLE
    assert "attnbackend check my_classes:Outer.Inner --only lse" in found.stdout
    wrong = run("my_classes:Outer.Wrong", *options)
    assert wrong.exit_code == cli.EXIT_USER_ERROR
    assert "error: WRONG: int is not a subclass of AttentionImpl" in wrong.stderr


@pytest.mark.parametrize("option", ["--html", "--page"])
def test_files_that_cannot_be_written_are_found_before_anything_runs(option: str, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        result = run("cpu_attn", "--only", "determinism", option, path)
        assert result.exit_code == cli.EXIT_USER_ERROR
        assert not result.stdout
        return result.stderr

    assert f"{option} {tmp_path} is a folder" in refused(tmp_path)
    assert f"there is no folder {tmp_path / 'none'}" in refused(tmp_path / "none" / "report")


def test_a_page_of_other_text_is_not_overwritten(tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("# Mine\n")
    result = run("cpu_attn", "--only", "determinism", "--page", notes)
    assert result.exit_code == cli.EXIT_USER_ERROR
    assert "is no page of conformance sections" in result.stderr
    assert notes.read_text() == "# Mine\n"


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1",  # as the command `pytest` does
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-p", "attnbackend_pytest", "-q", "-rA", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def test_pytest_gets_one_test_for_each_check_and_case(tmp_path: Path) -> None:
    (tmp_path / "my_liar.py").write_text(BACKEND_FILE)
    options = ["--attn-backend", "my_liar.Liar", "--attn-backend", HONEST, "-k", "lse and plain-halves"]
    done = run_pytest(tmp_path, *options)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "PASSED HONEST::lse::plain-halves" in done.stdout
    assert "FAILED LIAR::lse::plain-halves" in done.stdout
    assert "repeat: attnbackend check my_liar.Liar --only lse --case plain-halves --seed 0" in done.stdout


def test_pytest_says_what_is_wrong_with_a_name(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--attn-backend", "NOBODY_ATTN")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--attn-backend NOBODY_ATTN: unknown attention backend" in done.stderr + done.stdout


def test_pytest_without_the_option_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\ndef test_nothing():\n    assert not {'torch', 'attnbackend'} & sys.modules.keys()\n"
    )
    done = run_pytest(tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
