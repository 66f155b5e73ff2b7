"""Whether the Triton kernels can run on a device, and if not, why."""

from __future__ import annotations

import os


def unavailable_reason(device_type: str) -> str | None:
    """None when the kernels run on `device_type` ("cuda" or "cpu"), else the reason why not.

    On "cpu" they run only interpreted: `TRITON_INTERPRET=1` must be set before triton is imported.
    """
    reason = _import_problem()
    if reason is not None:
        return reason
    if device_type == "cuda":
        return _cuda_problem()
    if device_type == "cpu":
        return _cpu_problem()
    return f"the Triton kernels run on device types 'cuda' and 'cpu', not {device_type!r}"


def _import_problem() -> str | None:
    try:
        import triton  # noqa: F401
    except (ImportError, OSError) as error:
        return f"triton cannot be imported: {error}"
    return None


def _cuda_problem() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    return "torch finds no CUDA device"


def _cpu_problem() -> str | None:
    from .codec import INTERPRETED, interpreter_problem

    if INTERPRETED:
        return interpreter_problem()
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 was set too late: set it before triton is imported"
    return "Triton compiles no CPU code; TRITON_INTERPRET=1 in the environment runs it interpreted"
