"""Exported programs, and AOTInductor packages, whose graphs hold backends' ops: packaging and loading."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from attnbackend._torch_compat import aoti_package, inductor_cpp_compiler, load_aoti_package
from attnbackend.cpp_runtime import has_own_runtime, libraries_to_link
from attnbackend.registry import backend_names, is_implemented, resolve_backend

__all__ = ["define_all_ops", "load_package", "load_program", "save_package"]

_HEAD = 1 << 23
"""Bytes of a library that hold the names it uses; a model's weights come behind them."""


def define_all_ops() -> list[str]:
    """Defines the ops of every backend that can be imported here, and the types that programs take.

    A backend's ops come with its class, which nobody may have asked for yet in a process that only loads
    programs.

    Returns:
        Names of the backends.
    """
    import attnbackend.layers
    import attnbackend.ops.latent_rope_write
    import attnbackend.ops.rope_write  # noqa: F401

    defined = []
    for name in filter(is_implemented, backend_names()):
        try:
            resolve_backend(name)
        except (ImportError, OSError):
            continue  # What needs it fails on loading, with the op's name.
        defined.append(name)
    return defined


def load_program(path: str | Path) -> torch.export.ExportedProgram:
    """``torch.export.load`` in a process that may not have met the program's backends yet."""
    define_all_ops()
    from attnbackend.layers import BatchTensors, DecodeTensors

    with torch.serialization.safe_globals([BatchTensors, DecodeTensors]):  # the example inputs hold them
        return torch.export.load(str(path))


def save_package(
    program: torch.export.ExportedProgram, path: str | Path, *, options: Mapping[str, Any] | None = None
) -> str:
    """Compiles a program by AOTInductor into a package that `load_package` loads.

    It is ``torch._inductor.aoti_compile_and_package``, and links the C++ runtime that torch uses also where
    the compiler would give the package one of its own, with which torch cannot load it.

    Args:
        program: as `integrations.programs.export_model` makes it.
        path: of the package; ends with ".pt2".
        options: Inductor's.

    Returns:
        The path.

    Raises:
        ValueError: the package has a C++ runtime of its own nevertheless.
    """
    libraries = libraries_to_link(inductor_cpp_compiler())
    path = aoti_package(program, str(path), libraries, options or {})
    _check_runtime(path)
    return path


def load_package(path: str | Path) -> Callable[..., Any]:
    """An AOTInductor package, ready to be called, in a process that may not have met its backends yet.

    Raises:
        ValueError: the package has a C++ runtime of its own, with which torch's loader crashes.
    """
    _check_runtime(path)
    define_all_ops()
    return load_aoti_package(str(path))


def _check_runtime(path: str | Path) -> None:
    if not zipfile.is_zipfile(path):
        return  # torch says what it is instead
    with zipfile.ZipFile(path) as package:
        for name in [n for n in package.namelist() if n.endswith(".so")]:
            with package.open(name) as library:
                own = has_own_runtime(library.read(_HEAD))
            if own:
                raise ValueError(
                    f"{name} in package {str(path)!r} has a C++ runtime of its own, with which torch's "
                    "loader crashes: its compiler linked libstdc++ as an archive; build the package with "
                    "attnbackend.save_package, or set CXX to a compiler that has libstdc++.so"
                )
