"""Loading exported programs and AOTInductor packages whose graphs hold backends' ops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attnbackend._torch_compat import load_aoti_package
from attnbackend.registry import backend_names, is_implemented, resolve_backend

__all__ = ["define_all_ops", "load_package", "load_program"]


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


def load_package(path: str | Path) -> Callable[..., Any]:
    """An AOTInductor package, ready to be called, in a process that may not have met its backends yet."""
    define_all_ops()
    return load_aoti_package(str(path))
