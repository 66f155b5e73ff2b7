"""Which C++ runtime a compiled library uses: the process's, or a copy of its own.

A compiler that has libstdc++ as an archive alone links a copy of it into each library. Beside torch's, the
locales of the two mix, and what asks for one, as AOTInductor's models do where they read their device's name,
ends in std::bad_cast or a segmentation fault.
"""

from __future__ import annotations

import subprocess
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["has_own_runtime", "libraries_to_link"]

SHARED = ":libstdc++.so.6"
"""As the linker's -l takes it."""
_SOURCE = "#include <locale>\nbool is_classic() { return std::locale() == std::locale::classic(); }\n"


def has_own_runtime(library: bytes) -> bool:
    """Whether a library, or the beginning of one, names locales of libstdc++ and loads no libstdc++."""
    return b"_ZNSt6locale" in library and b"libstdc++.so" not in library


def libraries_to_link(compiler: str) -> list[str]:
    """What ``compiler`` must be told to link for libraries to use the process's runtime; mostly nothing."""
    if has_own_runtime(_library_of(compiler, [])) and (shared := _library_of(compiler, [SHARED])):
        return [] if has_own_runtime(shared) else [SHARED]
    return []


def _library_of(compiler: str, libraries: list[str]) -> bytes:
    """A small library that the compiler makes, which looks where Inductor does; nothing where it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
        source.write_text(_SOURCE)
        links = [f"-L{sysconfig.get_config_var('LIBDIR')}", *(f"-l{name}" for name in libraries)]
        command = [compiler, "-shared", "-fPIC", str(source), *links, "-o", str(built)]
        try:
            done = subprocess.run(command, capture_output=True)
        except OSError:
            return b""  # whoever needs the compiler says so
        return built.read_bytes() if done.returncode == 0 else b""
