"""Libraries share the process's C++ runtime, also where the compiler would give them one of their own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from attnbackend.cpp_runtime import SHARED, has_own_runtime, libraries_to_link

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="libstdc++ is Linux's"),
]


def compiler_that(does: str, folder: Path) -> str:
    script = folder / "compiler"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)
    return str(script)


def test_a_compiler_with_an_archive_alone_is_told_to_link_the_shared_one(tmp_path: Path) -> None:
    """As one does whose libstdc++.so is not there: the archive comes behind what is asked for."""
    static = compiler_that('exec g++ "$@" -static-libstdc++', tmp_path)
    assert libraries_to_link(static) == [SHARED]


def test_other_compilers_are_told_nothing(tmp_path: Path) -> None:
    assert libraries_to_link(compiler_that('exec g++ "$@"', tmp_path)) == []
    assert libraries_to_link(compiler_that("exit 1", tmp_path)) == []
    assert libraries_to_link(str(tmp_path / "no such compiler")) == []


def test_libraries_without_locales_need_no_runtime() -> None:
    assert not has_own_runtime(b"\x7fELF nothing of C++")
    assert not has_own_runtime(b"_ZNSt6locale7classicEv libstdc++.so.6")
