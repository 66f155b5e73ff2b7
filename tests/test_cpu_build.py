"""Building the C++ kernels: shared by processes, interrupted, without a compiler, on a full disk.

Most tests compile with a shell script that stands for a compiler and notes each time it is called.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attnbackend import cli
from attnbackend.kernels.cpu import BuildError, _build, current_target, unavailable_reason
from attnbackend.kernels.cpu._target import TARGETS, Target, runnable_targets

WRITE = 'echo library > "$out"'


class Bench:
    """A cache folder and a fake compiler of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache, self.log, self._compiler = folder / "cache", folder / "log", folder / "compiler"
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("ATTNBACKEND_CACHE_DIR", str(self.cache))
        self.compile_with(WRITE)

    def compile_with(self, body: str) -> None:
        """Shell commands that find the file to write in $out."""
        self._compiler.write_text(f"#!/bin/sh\necho $$ >> {self.log}\nfor out; do :; done\n{body}\n")
        self._compiler.chmod(self._compiler.stat().st_mode | stat.S_IEXEC)
        self._monkeypatch.setenv("CXX", str(self._compiler))

    def no_compiler(self) -> None:
        self._monkeypatch.setenv("CXX", "no-such-compiler")

    @property
    def compilations(self) -> int:
        return len(self.log.read_text().split()) if self.log.exists() else 0

    @property
    def kept(self) -> list[str]:
        """Names in the cache folder, the lock excepted."""
        return sorted(name for name in os.listdir(self.cache) if name != ".lock")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def in_a_process(work: Callable[[], object]) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("30 s were not enough")


def test_a_library_is_built_once_and_appears_whole(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = _build.build(), _build.build()
    assert first == second
    assert first.read_bytes().startswith(b"library\n")
    assert bench.kept == [first.name]
    assert bench.compilations == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"attnbackend: building the CPU kernels ({current_target().name}) with ")
    assert str(bench.cache) in lines[0]
    assert lines[1].startswith("attnbackend: CPU kernels built in ")


def test_what_was_built_needs_no_compiler_nor_a_folder_that_can_be_written_to(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _build.build()
    bench.no_compiler()
    monkeypatch.setattr(_build, "folder_lock", lambda *_: pytest.fail("took the lock"))
    assert _build.build() == path


def test_a_build_writes_nothing_where_the_package_is_installed(bench: Bench) -> None:
    def listing() -> list[tuple[str, int]]:
        return sorted((str(p), p.stat().st_mtime_ns) for p in _build._FOLDER.iterdir() if p.is_file())

    before = listing()
    _build.build()
    assert listing() == before


def test_two_processes_build_once(bench: Bench) -> None:
    bench.compile_with(f"sleep 1; {WRITE}")
    processes = [in_a_process(_build.build) for _ in range(2)]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert bench.compilations == 1
    assert bench.kept == [_build.library_path().name]


def test_a_killed_build_leaves_nothing_that_matters(bench: Bench) -> None:
    bench.compile_with('echo half > "$out"; exec sleep 60')
    process = in_a_process(_build.build)
    wait_until(lambda: bench.compilations == 1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    os.kill(int(bench.log.read_text()), signal.SIGKILL)  # the compiler outlives its parent
    assert bench.kept
    bench.compile_with(WRITE)
    path = _build.build()
    assert bench.kept == [path.name]
    assert path.read_bytes().startswith(b"library\n")


@pytest.mark.parametrize("damage", ["cut short", "emptied", "changed", "without its digest"])
def test_a_damaged_library_is_built_again(
    bench: Bench, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _build.build()
    whole = path.read_bytes()
    damaged = {
        "cut short": whole[:-1], "emptied": b"", "changed": b"L" + whole[1:], "without its digest": whole[:8],
    }  # fmt: skip
    path.write_bytes(damaged[damage])
    capsys.readouterr()
    assert _build.build() == path
    assert path.read_bytes() == whole
    assert bench.compilations == 2
    assert f"{path} is damaged and is built again" in capsys.readouterr().err


def test_a_library_that_does_not_load_is_built_again_once_and_then_reported(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BuildError, match=r"loading .*\.so failed"):
        _build.load_library()
    assert bench.compilations == 2
    assert "building it again" in capsys.readouterr().err


def test_a_missing_compiler_is_a_build_error_and_makes_no_folder(bench: Bench) -> None:
    bench.no_compiler()
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: .*'no-such-compiler'; install one or set CXX"):
        _build.build()
    assert not bench.cache.exists()


def test_a_failed_build_tells_the_compilers_message_and_leaves_nothing(bench: Bench) -> None:
    bench.compile_with('echo half > "$out"; echo no such flag >&2; exit 3')
    with pytest.raises(BuildError, match=r"exited with 3:\nno such flag"):
        _build.build()
    assert bench.kept == []


def test_a_compiler_without_room_leaves_nothing(bench: Bench) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    bench.compile_with("set -e; LC_ALL=C cat /dev/zero > /dev/full")
    with pytest.raises(BuildError, match="No space left on device"):
        _build.build()
    assert bench.kept == []


def test_a_disk_that_is_full_at_the_last_byte_leaves_nothing(bench: Bench) -> None:
    """The file may have 4096 bytes, which the compiler uses up."""
    bench.compile_with('head -c 4096 /dev/zero > "$out"')

    def build() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(
            BuildError, match=r"cannot write to .*File too large.*; set ATTNBACKEND_CACHE_DIR"
        ):
            _build.build()

    process = in_a_process(build)
    process.join(30)
    assert process.exitcode == 0
    assert bench.compilations == 1
    assert bench.kept == []


@pytest.mark.parametrize("folder", ["/proc/no/such/folder", "/dev/null/folder"])
def test_a_folder_that_cannot_be_written_to_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("ATTNBACKEND_CACHE_DIR", folder)
    with pytest.raises(BuildError, match=f"cannot write to {folder}: .*; set ATTNBACKEND_CACHE_DIR"):
        _build.build()


def test_the_name_depends_on_source_flags_torch_and_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {_build.library_path(target) for target in (*TARGETS, Target("native", (), "some processor"))}
    names.add(_build.library_path(Target("native", (), "another processor")))
    monkeypatch.setattr(torch, "__version__", "99.0")
    names.add(_build.library_path(TARGETS[0]))
    monkeypatch.setattr(_build, "_FLAGS", (*_build._FLAGS, "-g"))
    names.add(_build.library_path(TARGETS[0]))
    monkeypatch.setattr(_build, "_FOLDER", Path(__file__).parent)
    names.add(_build.library_path(TARGETS[0]))
    assert len(names) == len(TARGETS) + 5


# The command


def run(*words: str) -> int:
    return cli.main(["build", *words])


def test_the_command_builds_and_prints_where(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    assert run("cpu") == cli.EXIT_OK
    target = current_target().name
    assert capsys.readouterr().out == f"{target}: {_build.library_path()}\nops: {_build.build_ops()}\n"
    assert bench.compilations == 2
    assert run("cpu", "--target", target) == run("cpu", "--force") == cli.EXIT_OK
    assert bench.compilations == 4


def test_the_command_builds_what_calls_libraries(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    assert run("library-calls") == cli.EXIT_OK
    assert capsys.readouterr().out == f"library-calls: {_build.build_library_calls()}\n"
    assert bench.compilations == 1


@pytest.mark.skipif(len(runnable_targets()) == 1, reason="one instruction set on this machine")
def test_the_command_builds_for_every_instruction_set(bench: Bench) -> None:
    pytest.importorskip("typer")
    assert run("cpu", "--all-targets") == cli.EXIT_OK
    paths = [*map(_build.library_path, TARGETS), _build.build_ops()]
    assert bench.kept == sorted(path.name for path in paths)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rocm"], "error: WHAT 'rocm' is unknown; allowed: cpu, library-calls"),
        (["cpu", "--target", "avx3"], "error: target 'avx3' is unknown; allowed: "),
    ],
)
def test_the_command_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    assert run(*words) == cli.EXIT_USER_ERROR
    assert message in capsys.readouterr().err


def test_the_command_says_what_cannot_be_built(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    bench.no_compiler()
    assert run("cpu") == cli.EXIT_NOT_POSSIBLE
    assert "error: no C++ compiler" in capsys.readouterr().err


# Whole processes

_WHO_SERVES = """
import json
from attnbackend import AttentionSelectorConfig, select_backend
from attnbackend.cli.backend_facts import all_backend_facts
import torch
config = AttentionSelectorConfig.dense(device_type="cpu", head_size=64, num_heads=2, num_kv_heads=2,
                                       dtype=torch.float32, kv_cache_dtype="auto", block_size=16)
facts = {fact.name: (fact.status, fact.reason) for fact in all_backend_facts()}
print(json.dumps([select_backend(config).name, facts["CPU_ATTN"]]))
"""


def test_without_a_compiler_sdpa_serves_and_the_list_says_why(bench: Bench) -> None:
    bench.no_compiler()
    ran = subprocess.run([sys.executable, "-c", _WHO_SERVES], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    selected, (status, reason) = json.loads(ran.stdout)
    assert (selected, status) == ("TORCH_SDPA", "unavailable")
    assert "no C++ compiler: looked on PATH for $CXX='no-such-compiler'" in reason


_CONFORMS = """
from attnbackend.kernels.cpu import current_target
from attnbackend.testing.conformance import check_backend
report = check_backend("CPU_ATTN", quick=True, only=["numerics", "cache_writes"])
import test_cpu_rope as rope
for dtype in rope.DTYPES:
    for name in rope.SHAPES:
        rope.test_rotations_and_what_is_cached(name, dtype)
    rope.test_norms_of_heads(dtype, 48)
print(current_target().name, report.ok, sum(1 for _ in report.outcomes))
"""


@pytest.mark.skipif(unavailable_reason() is not None, reason=f"no C++ kernels: {unavailable_reason()}")
@pytest.mark.parametrize("capability", [target.name for target in runnable_targets()[:-1][:2]])
def test_torch_s_variable_chooses_the_instruction_set_which_conforms(capability: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _CONFORMS], capture_output=True, text=True, timeout=300,
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability}, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    name, ok, count = ran.stdout.split()
    assert (name, ok) == (capability, "True")
    assert int(count) > 20
