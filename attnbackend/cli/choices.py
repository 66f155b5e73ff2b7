"""Options that several commands share, turned from words into values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbackend.cli.errors import UserError, check_choice

if TYPE_CHECKING:
    import torch

__all__ = [
    "backend_choice",
    "compute_capability",
    "device_type",
    "dtype_choice",
    "kv_cache_dtype_choice",
]

_DTYPES = ("float32", "bfloat16", "float16")
_DEVICE_TYPES = ("cpu", "cuda", "xpu")


def backend_choice(name: str | None, *, implemented: bool = True) -> str | None:
    """The backend's name as the registry writes it.

    Args:
        name: in any case; None stays None.
        implemented: refuse names that no class stands behind.

    Raises:
        ValueError: unknown, with near names, or not implemented.
    """
    if name is None:
        return None
    from attnbackend.registry import any_case_name, backend_names, require_implemented

    found = any_case_name(name)
    if implemented or found not in backend_names():
        require_implemented(found)
    return found


def kv_cache_dtype_choice(name: str) -> str:
    """The name of a cache type; UserError, with near names, for others."""
    from attnbackend.kv_cache import KV_CACHE_DTYPES

    return check_choice("--kv-cache-dtype", name, KV_CACHE_DTYPES)


def dtype_choice(name: str, device_type: str) -> torch.dtype:
    """The dtype of a name; "auto" is float32 on the CPU and bfloat16 elsewhere.

    Raises:
        UserError: another name, with near names.
    """
    import torch

    automatic = "float32" if device_type == "cpu" else "bfloat16"
    chosen = check_choice("--dtype", name, ("auto", *_DTYPES))
    dtype: torch.dtype = getattr(torch, automatic if chosen == "auto" else chosen)
    return dtype


def device_type(name: str | None) -> str:
    """A device type that backends are chosen for; None: CUDA where there is one, else the CPU."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return check_choice("--device", name, _DEVICE_TYPES)


def compute_capability(text: str | None, device: str) -> tuple[int, int] | None:
    """``9.0`` as (9, 0); None: that of the device that is here.

    Raises:
        UserError: not two numbers, or given for a device that is not CUDA.
    """
    from attnbackend.platforms import current_platform

    if text is None:
        return current_platform(device).compute_capability
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise UserError(f"--compute-capability {text!r} is not two numbers such as 9.0")
    if device != "cuda":
        raise UserError(f"--compute-capability {text} goes with --device cuda, not {device}")
    return int(major), int(minor)
