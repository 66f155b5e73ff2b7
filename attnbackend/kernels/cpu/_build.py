"""Compiles the C++ sources on first use, keeps the library in a user cache folder and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

# Importing torch also loads the OpenMP runtime that the library must share.
import torch

from attnbackend.kernels.cpu._cached_file import folder_lock, is_whole, say, write_whole
from attnbackend.kernels.cpu._structs import STRUCT_SIZES
from attnbackend.kernels.cpu._target import Target, current_target

_FOLDER = Path(__file__).parent
_ENTRY_SOURCE = "kernels.cpp"
_BUILD_TIMEOUT_S = 600
# No flag here changes the meaning of inf, NaN or the order of additions.
_FLAGS = (
    "-std=c++17",
    "-O3",
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


def _openmp_link_flags() -> list[str]:
    """Links against torch's own libgomp where its name is not the standard one.

    Two OpenMP runtimes in a process would give two thread pools fighting for the cores.
    """
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        if path.name != "libgomp.so.1":
            return ["-Wl,--as-needed", str(path), f"-Wl,-rpath,{path.parent}"]
    return []


def _arguments(target: Target) -> list[str]:
    """Of any compiler."""
    return [*_FLAGS, *target.flags, str(_FOLDER / _ENTRY_SOURCE), *_openmp_link_flags()]


def library_path(target: Target | None = None) -> Path:
    """Where the library of this source, these flags, this torch and ``target`` is or would be.

    It does not depend on the compiler: what one machine built serves another that has none.
    """
    target = target or current_target()
    parts = [*_FLAGS, *target.flags, *_openmp_link_flags(), target.machine, torch.__version__, sys.platform]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(p for p in _FOLDER.iterdir() if p.suffix in (".h", ".cpp")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return cache_folder() / f"cpu_kernels_{target.name}_{digest.hexdigest()[:24]}.so"


def _run(command: list[str], scratch: Path) -> None:
    environment = os.environ | {"TMPDIR": str(scratch)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"running {command[0]!r} failed: {error}") from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise BuildError(f"{' '.join(command)} exited with {done.returncode}:\n{tail}")


def _compile(target: Target, path: Path) -> None:
    compiler, start = find_compiler(), time.monotonic()
    say(f"building the CPU kernels ({target.name}) with {compiler}, once, into {path.parent} ...")
    write_whole(path, lambda built, scratch: _run([compiler, *_arguments(target), "-o", str(built)], scratch))
    say(f"CPU kernels built in {time.monotonic() - start:.0f} s")


def build(target: Target | None = None, *, anew: bool = False) -> Path:
    """The path of the library, compiled if it is not there or not whole.

    Args:
        target: instruction set; None: what this process runs.
        anew: compile it even where it is there.

    Raises:
        BuildError: no compiler, a failed compilation, or a folder that cannot be written to.
    """
    if not sys.platform.startswith(("linux", "darwin")):
        raise BuildError(f"the C++ kernels build on Linux and macOS, not on {sys.platform!r}")
    target = target or current_target()
    path = library_path(target)
    if is_whole(path) and not anew:
        return path
    find_compiler()  # before a folder is made for nothing
    try:
        with folder_lock(path.parent, "the CPU kernels"):
            if anew or not is_whole(path):
                if path.exists() and not anew:
                    say(f"{path} is damaged and is built again")
                _compile(target, path)
    except OSError as error:
        raise BuildError(f"cannot write to {path.parent}: {error}; set ATTNBACKEND_CACHE_DIR") from error
    return path


def _load(path: Path) -> ctypes.CDLL:
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


def load_library(target: Target | None = None) -> ctypes.CDLL:
    """Builds if need be and loads; what does not load is built again, once. BuildError if that fails."""
    path = build(target)
    try:
        return _load(path)
    except BuildError as error:
        say(f"{error}; building it again")
        return _load(build(target, anew=True))


@cache
def cached_library() -> ctypes.CDLL | str:
    """The library, or why there is none. Tried once a process."""
    try:
        return load_library()
    except BuildError as error:
        return str(error)
