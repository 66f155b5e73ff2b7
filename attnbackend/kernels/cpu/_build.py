"""Compiles the C++ sources on first use, keeps the library in a user cache folder and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
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
_OPS_FLAGS = (
    "-std=c++20", "-O2", "-shared", "-fPIC", "-w",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
)  # fmt: skip


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


def library_path(target: Target | None = None) -> Path:
    """Where the library of this source, these flags, this torch and ``target`` is or would be.

    It does not depend on the compiler: what one machine built serves another that has none.
    """
    return _kernels(target or current_target()).path


@dataclass(frozen=True)
class _Source:
    """What a library is made of."""

    name: str
    what: str
    """For people."""
    entry: Path
    """The file to compile; all C++ of its folder and of this one belongs to it."""
    flags: tuple[str, ...]
    links: tuple[str, ...]
    machine: str = ""
    places: tuple[str, ...] = ()
    """Flags that say where torch is: not part of what the library is."""

    @property
    def path(self) -> Path:
        torch_is = f"{torch.__version__} {torch.version.git_version}"
        parts = [*self.flags, *self.links, self.machine, torch_is, sys.platform]
        digest = hashlib.sha256("\0".join(parts).encode())
        files = [path for folder in {_FOLDER, self.entry.parent} for path in folder.iterdir()]
        for path in sorted(path for path in files if path.suffix in (".h", ".cpp")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return cache_folder() / f"{self.name}_{digest.hexdigest()[:24]}.so"

    def compile(self, compiler: str, built: Path, scratch: Path) -> None:
        inputs = [*self.places, str(self.entry), *self.links]
        _run([compiler, *self.flags, *inputs, "-o", str(built)], scratch)


def _kernels(target: Target) -> _Source:
    return _Source(
        f"cpu_kernels_{target.name}", f"the CPU kernels ({target.name})", _FOLDER / _ENTRY_SOURCE,
        (*_FLAGS, *target.flags), tuple(_openmp_link_flags()), target.machine,
    )  # fmt: skip


def _ops(name: str, what: str, entry: str) -> _Source:
    torch_folder = Path(torch.__file__).parent
    return _Source(
        name, what, _FOLDER / "torch_ops" / entry, _OPS_FLAGS, ("-ltorch_cpu", "-lc10"),
        places=(f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"),
    )  # fmt: skip


def _cpu_ops() -> _Source:
    return _ops("cpu_ops", "the CPU ops", "ops.cpp")


def _library_calls() -> _Source:
    return _ops("library_calls", "the calls of libraries' ops", "library_calls.cpp")


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


def _compile(source: _Source, path: Path) -> None:
    compiler, start = find_compiler(), time.monotonic()
    say(f"building {source.what} with {compiler}, once, into {path.parent} ...")
    write_whole(path, lambda built, scratch: source.compile(compiler, built, scratch))
    say(f"{source.what.removeprefix('the ').split(' (')[0]} built in {time.monotonic() - start:.0f} s")


def build(target: Target | None = None, *, anew: bool = False) -> Path:
    """The path of the kernels' library, compiled if it is not there or not whole.

    Args:
        target: instruction set; None: what this process runs.
        anew: compile it even where it is there.

    Raises:
        BuildError: no compiler, a failed compilation, or a folder that cannot be written to.
    """
    return _build(_kernels(target or current_target()), anew)


def build_ops(*, anew: bool = False) -> Path:
    """As `build`, of the library through which torch calls the kernels without Python."""
    return _build(_cpu_ops(), anew)


def _build(source: _Source, anew: bool) -> Path:
    if not sys.platform.startswith(("linux", "darwin")):
        raise BuildError(f"the C++ kernels build on Linux and macOS, not on {sys.platform!r}")
    path = source.path
    if is_whole(path) and not anew:
        return path
    find_compiler()  # before a folder is made for nothing
    try:
        with folder_lock(path.parent, source.what):
            if anew or not is_whole(path):
                if path.exists() and not anew:
                    say(f"{path} is damaged and is built again")
                _compile(source, path)
    except OSError as error:
        raise BuildError(f"cannot write to {path.parent}: {error}; set ATTNBACKEND_CACHE_DIR") from error
    return path


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"loading {path} failed: {error}") from error


def _load(path: Path) -> ctypes.CDLL:
    library = _open(path)
    for name in ("attention", "cache_write", "rope", "last_refusal", "struct_sizes"):
        getattr(library, f"attnbackend_{name}").restype = ctypes.c_int64
    library.attnbackend_last_refusal.restype = None
    sizes = library.attnbackend_struct_sizes()
    assert sizes == STRUCT_SIZES, f"args.h has struct sizes {sizes}, _structs.py {STRUCT_SIZES}"
    return library


def load_library(target: Target | None = None) -> ctypes.CDLL:
    """Builds if need be and loads; what does not load is built again, once. BuildError if that fails."""
    return _load_or_rebuild(partial(build, target), _load)


def load_ops() -> ctypes.CDLL:
    """As `load_library`, of the ops."""
    return _load_or_rebuild(build_ops, _open)


def build_library_calls(*, anew: bool = False) -> Path:
    """As `build`, of the library through which ops of ours call a library's op without Python."""
    return _build(_library_calls(), anew)


def load_library_calls() -> ctypes.CDLL:
    """As `load_ops`, of `build_library_calls`."""
    return _load_or_rebuild(build_library_calls, _open)


def _load_or_rebuild(build: Callable[..., Path], load: Callable[[Path], ctypes.CDLL]) -> ctypes.CDLL:
    path = build()
    try:
        return load(path)
    except BuildError as error:
        say(f"{error}; building it again")
        return load(build(anew=True))


@cache
def cached_library() -> ctypes.CDLL | str:
    """The library, or why there is none. Tried once a process."""
    try:
        return load_library()
    except BuildError as error:
        return str(error)
