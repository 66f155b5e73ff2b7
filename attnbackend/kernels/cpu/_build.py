"""Compiles the C++ sources on first use, keeps the library in a user cache folder and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

# Importing torch also loads the OpenMP runtime that the library must share.
import torch

from attnbackend.kernels.cpu._structs import STRUCT_SIZES

_FOLDER = Path(__file__).parent
_ENTRY_SOURCE = "kernels.cpp"
_BUILD_TIMEOUT_S = 300
# No flag here changes the meaning of inf, NaN or the order of additions.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-w",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)


class BuildError(RuntimeError):
    """The C++ kernels cannot be built or loaded here; the message says why."""


def cache_folder() -> Path:
    """Where built libraries are kept: $ATTNBACKEND_CACHE_DIR, else ~/.cache/attnbackend."""
    chosen = os.environ.get("ATTNBACKEND_CACHE_DIR")
    return Path(chosen) if chosen else Path.home() / ".cache" / "attnbackend"


def find_compiler() -> str:
    """The C++ compiler: $CXX if set, else g++, else clang++. BuildError if there is none."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else ("g++", "clang++"):
        path = shutil.which(name)
        if path:
            return path
    looked = f"$CXX={chosen!r}" if chosen else "g++ and clang++"
    raise BuildError(f"no C++ compiler: looked on PATH for {looked}; install one or set CXX")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"running {command[0]!r} failed: {error}") from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise BuildError(f"{' '.join(command)} exited with {done.returncode}:\n{tail}")
    return done.stdout


def _cpu_features() -> str:
    """What -march=native depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(kept))


def _openmp_link_flags() -> list[str]:
    """Links against torch's own libgomp where its name is not the standard one.

    Two OpenMP runtimes in a process would give two thread pools fighting for the cores.
    """
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        if path.name != "libgomp.so.1":
            return ["-Wl,--as-needed", str(path), f"-Wl,-rpath,{path.parent}"]
    return []


def _command(compiler: str) -> list[str]:
    return [compiler, *_FLAGS, str(_FOLDER / _ENTRY_SOURCE), *_openmp_link_flags()]


def _fingerprint(command: list[str]) -> str:
    sources = sorted(p for p in _FOLDER.iterdir() if p.suffix in (".h", ".cpp"))
    parts = [" ".join(command), _run([command[0], "--version"]), _cpu_features()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _compile(command: list[str], target: Path) -> None:
    """Builds beside the target and renames, so other processes see all of it or nothing."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".so.tmp")
    except OSError as error:
        raise BuildError(f"cannot write to {target.parent}: {error}; set ATTNBACKEND_CACHE_DIR") from error
    os.close(handle)
    try:
        _run([*command, "-o", temporary])
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def build() -> Path:
    """The path of the library for this source, compiler and CPU, compiled if it is not there."""
    if not sys.platform.startswith(("linux", "darwin")):
        raise BuildError(f"the C++ kernels build on Linux and macOS, not on {sys.platform!r}")
    command = _command(find_compiler())
    target = cache_folder() / f"cpu_kernels_{_fingerprint(command)}.so"
    if not target.exists():
        _compile(command, target)
    return target


def load_library() -> ctypes.CDLL:
    """Builds if need be, loads, and checks that the structs agree. BuildError if any fails."""
    path = build()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"loading {path} failed: {error}") from error
    for name in ("attention", "cache_write", "last_refusal", "struct_sizes"):
        getattr(library, f"attnbackend_{name}").restype = ctypes.c_int64
    library.attnbackend_last_refusal.restype = None
    sizes = library.attnbackend_struct_sizes()
    assert sizes == STRUCT_SIZES, f"args.h has struct sizes {sizes}, _structs.py {STRUCT_SIZES}"
    return library


@cache
def cached_library() -> ctypes.CDLL | str:
    """The library, or why there is none. Tried once a process."""
    try:
        return load_library()
    except BuildError as error:
        return str(error)
