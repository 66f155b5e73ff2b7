"""For which instruction set the kernels are compiled: torch's own choice, so that its variable rules both."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from attnbackend._torch_compat import has_avx512_bf16

__all__ = ["TARGETS", "Target", "current_target", "find_target", "runnable_targets"]

_X86 = ("x86_64", "amd64")


@dataclass(frozen=True)
class Target:
    """An instruction set: its name, the compiler's flags, and what else the machine code depends on."""

    name: str
    flags: tuple[str, ...]
    machine: str = ""


_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd")

TARGETS = (
    Target("default", ()),
    Target("avx2", _AVX2),
    Target("avx512", _AVX512),
    Target("avx512_bf16", (*_AVX512, "-mavx512bf16")),
)
"""On x86-64, each a superset of those before it. A library for one runs on every processor that has it."""


def runnable_targets() -> tuple[Target, ...]:
    """Targets that this processor runs, as far as torch may use it; the last is the best."""
    if platform.machine().lower() not in _X86:
        return (_native(),)
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return TARGETS if has_avx512_bf16() else TARGETS[:3]
    return TARGETS[: 2 if capability == "AVX2" else 1]


def current_target() -> Target:
    """What this process runs; ``ATEN_CPU_CAPABILITY`` (default, avx2, avx512) limits it as it does torch."""
    return runnable_targets()[-1]


def find_target(name: str) -> Target:
    """The target of that name, whether or not it runs here.

    Raises:
        ValueError: there is none for this machine.
    """
    known = TARGETS if platform.machine().lower() in _X86 else (_native(),)
    for target in known:
        if target.name == name:
            return target
    raise ValueError(f"target {name!r} is unknown; allowed: {', '.join(t.name for t in known)}")


def _native() -> Target:
    """Whatever this processor has; such a library suits equal processors alone."""
    return Target("native", ("-march=native",), _processor())


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(kept))
