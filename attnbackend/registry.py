"""Names and classes of backends: the built-in members, third-party names, overrides and plugins.

A name maps to a class or to a dotted path that is imported when the backend is first wanted. Every change
moves the registry's generation, on which selection caches.
"""

from __future__ import annotations

import difflib
import enum
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from attnbackend.backend import AttentionBackend, check_parts

__all__ = [
    "AttentionBackendEnum",
    "MambaAttentionBackendEnum",
    "backend_names",
    "clear_override",
    "is_implemented",
    "is_overridden",
    "register_backend",
    "registry_generation",
    "registry_scope",
    "resolve_backend",
]

ENTRY_POINT_GROUP = "attnbackend.backends"

B = TypeVar("B", bound=type[AttentionBackend])


class _BackendMember(enum.Enum):
    """A member's value is the dotted path of its class; the member is a name, the registry holds the rest."""

    @property
    def key(self) -> str:
        """The name in the registry, unique over both enums."""
        return self.name

    def get_path(self) -> str:
        """Dotted path of the class that the name stands for now, overrides included."""
        entry = _entries().get(self.key)
        return entry.path if entry else str(self.value)

    def get_class(self) -> type[AttentionBackend]:
        """The class that the name stands for now; see `resolve_backend` for the errors."""
        return resolve_backend(self.key)

    def is_implemented(self) -> bool:
        """Whether a class stands behind the name."""
        return is_implemented(self.key)

    def is_overridden(self) -> bool:
        return is_overridden(self.key)

    def clear_override(self) -> None:
        clear_override(self.key)


_HERE = "attnbackend.backends"


@enum.unique
class AttentionBackendEnum(_BackendMember):
    """Attention backends that the project knows by name. Third parties need no member: any name will do."""

    FLASH_ATTN = f"{_HERE}.flash_attn.FlashAttentionBackend"
    FLASH_ATTN_DIFFKV = f"{_HERE}.flash_attn_diffkv.FlashAttentionDiffKVBackend"
    TRITON_ATTN = f"{_HERE}.triton_attn.TritonAttentionBackend"
    TRITON_ATTN_DIFFKV = f"{_HERE}.triton_attn_diffkv.TritonAttentionDiffKVBackend"
    ROCM_ATTN = f"{_HERE}.rocm_attn.RocmAttentionBackend"
    ROCM_AITER_UNIFIED_ATTN = f"{_HERE}.rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend"
    ROCM_AITER_FA = f"{_HERE}.rocm_aiter_fa.RocmAiterFlashAttentionBackend"
    FLASHINFER = f"{_HERE}.flashinfer.FlashInferBackend"
    FLEX_ATTENTION = f"{_HERE}.flex_attention.FlexAttentionBackend"
    CPU_ATTN = f"{_HERE}.cpu_attn.CPUAttentionBackend"
    HPC_ATTN = f"{_HERE}.hpc_attn.HPCAttentionBackend"
    TURBOQUANT = f"{_HERE}.turboquant.TurboQuantBackend"
    MINIMAX_M3_SPARSE = f"{_HERE}.minimax_m3_sparse.MiniMaxM3SparseBackend"
    TORCH_SDPA = f"{_HERE}.torch_sdpa.TorchSDPABackend"
    NO_ATTENTION = f"{_HERE}.no_attention.NoAttentionBackend"
    TRITON_MLA = f"{_HERE}.mla.triton_mla.TritonMLABackend"
    FLASHMLA = f"{_HERE}.mla.flashmla.FlashMLABackend"
    FLASHINFER_MLA = f"{_HERE}.mla.flashinfer_mla.FlashInferMLABackend"
    CUTLASS_MLA = f"{_HERE}.mla.cutlass_mla.CutlassMLABackend"
    FLASH_ATTN_MLA = f"{_HERE}.mla.flash_attn_mla.FlashAttentionMLABackend"
    TOKENSPEED_MLA = f"{_HERE}.mla.tokenspeed_mla.TokenSpeedMLABackend"
    ROCM_AITER_MLA = f"{_HERE}.mla.rocm_aiter_mla.RocmAiterMLABackend"
    ROCM_AITER_TRITON_MLA = f"{_HERE}.mla.rocm_aiter_triton_mla.RocmAiterTritonMLABackend"
    FLASHINFER_MLA_SPARSE = f"{_HERE}.mla.flashinfer_mla_sparse.FlashInferMLASparseBackend"
    FLASHINFER_MLA_SPARSE_SM120 = f"{_HERE}.mla.flashinfer_mla_sparse.FlashInferMLASparseSM120Backend"
    FLASHMLA_SPARSE = f"{_HERE}.mla.flashmla_sparse.FlashMLASparseBackend"
    FLASH_ATTN_MLA_SPARSE = f"{_HERE}.mla.flash_attn_mla_sparse.FlashAttentionMLASparseBackend"
    ROCM_AITER_MLA_SPARSE = f"{_HERE}.mla.rocm_aiter_mla_sparse.RocmAiterMLASparseBackend"
    XPU_MLA_SPARSE = f"{_HERE}.mla.xpu_mla_sparse.XPUMLASparseBackend"
    FLASHMLA_SPARSE_DSV4 = f"{_HERE}.mla.dsv4.FlashMLASparseDSV4Backend"
    FLASHINFER_MLA_SPARSE_DSV4 = f"{_HERE}.mla.dsv4.FlashInferMLASparseDSV4Backend"
    ROCM_FLASHMLA_SPARSE_DSV4 = f"{_HERE}.mla.dsv4.RocmFlashMLASparseDSV4Backend"
    CUSTOM = "register a class under the name CUSTOM"


@enum.unique
class MambaAttentionBackendEnum(_BackendMember):
    """State-space and linear-attention backends."""

    MAMBA1 = f"{_HERE}.mamba.mamba1.Mamba1Backend"
    MAMBA2 = f"{_HERE}.mamba.mamba2.Mamba2Backend"
    SHORT_CONV = f"{_HERE}.mamba.short_conv.ShortConvBackend"
    LINEAR = f"{_HERE}.mamba.linear.LinearAttentionBackend"
    GDN_ATTN = f"{_HERE}.mamba.gdn.GDNAttentionBackend"
    CUSTOM = "register a class under the name MAMBA_CUSTOM"

    @property
    def key(self) -> str:
        return "MAMBA_CUSTOM" if self.name == "CUSTOM" else self.name


_BUILT_IN: dict[str, str] = {
    m.key: m.value for enum_cls in (AttentionBackendEnum, MambaAttentionBackendEnum) for m in enum_cls
}


@dataclass(frozen=True)
class _Entry:
    """A registration that is not a built-in: its dotted path, and the class once it is known."""

    path: str
    cls: type[AttentionBackend] | None = None


@dataclass
class _State:
    entries: dict[str, _Entry]
    resolved: dict[str, type[AttentionBackend]]
    generation: int = 0
    plugins_loaded: bool = False


_STATE = _State(entries={}, resolved={})


def registry_generation() -> int:
    """A number that grows with every change of the registry."""
    return _STATE.generation


def _changed() -> None:
    _STATE.generation += 1
    _STATE.resolved.clear()


def _entries() -> dict[str, _Entry]:
    """Registrations, after the plugins had their turn; a plugin never displaces an explicit one."""
    if not _STATE.plugins_loaded:
        _STATE.plugins_loaded = True
        for point in entry_points(group=ENTRY_POINT_GROUP):
            _STATE.entries.setdefault(point.name, _Entry(point.value.replace(":", ".")))
        if _STATE.entries:
            _changed()
    return _STATE.entries


def backend_names() -> list[str]:
    """Every name that can be asked for, built-in ones first, whether implemented or not."""
    return [*_BUILT_IN, *sorted(set(_entries()) - set(_BUILT_IN))]


def is_overridden(name: str) -> bool:
    """Whether a built-in name stands for another class than its own."""
    return name in _BUILT_IN and name in _entries()


def is_implemented(name: str) -> bool:
    """Whether a class stands behind ``name``; built-in members may wait for theirs."""
    return name in _entries() or (name in _BUILT_IN and _module_exists(_BUILT_IN[name]))


@cache
def _module_exists(path: str) -> bool:
    module = path.rpartition(".")[0]
    try:
        return bool(module) and importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def resolve_backend(name: str | _BackendMember) -> type[AttentionBackend]:
    """The class behind a name, imported now if need be, with its ops generated.

    Raises:
        ValueError: no such name (near names are listed), or a member that has no class yet.
        TypeError: the class is not a complete backend of that name.
        ImportError: the class's module cannot be imported.
    """
    key = name.key if isinstance(name, _BackendMember) else name
    found = _STATE.resolved.get(key)
    if found is None:
        found = _STATE.resolved[key] = _resolve(key)
    return found


def _resolve(name: str) -> type[AttentionBackend]:
    entry = _entries().get(name)
    if entry is None:
        entry = _Entry(_built_in_path(name))
    cls = entry.cls or _import_class(entry.path)
    _adopt(name, cls)
    return cls


def _built_in_path(name: str) -> str:
    if name not in _BUILT_IN:
        raise ValueError(f"unknown attention backend {name!r}{_near(name)}; known: {', '.join(backend_names())}")
    if not is_implemented(name):
        raise ValueError(
            f"attention backend {name!r} is not implemented; register a class for it with "
            f"register_backend({name!r}), or choose one of {', '.join(filter(is_implemented, backend_names()))}"
        )
    return _BUILT_IN[name]


def _near(name: str) -> str:
    near = difflib.get_close_matches(name.upper(), backend_names(), n=3)
    return f", did you mean {' or '.join(near)}?" if near else ""


def _import_class(path: str) -> Any:
    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _adopt(name: str, cls: Any) -> None:
    """Checks that ``cls`` is a complete backend called ``name`` and generates its ops."""
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
        raise TypeError(f"{cls!r}, registered as {name!r}, is not a subclass of AttentionBackend")
    if cls.get_name() != name:
        raise TypeError(
            f"{cls.__qualname__}.get_name() returns {cls.get_name()!r} but it is registered as {name!r}; "
            "ops and selection go by the name, so make the two agree"
        )
    check_parts(cls)
    from attnbackend.ops.generate import define_backend_ops

    define_backend_ops(cls)


def register_backend(
    name: str | _BackendMember | None = None, class_path: str | None = None, *, override: bool = False
) -> Callable[[B], B]:  # fmt: skip
    """Registers a backend class, as a decorator or by dotted path.

    As a decorator, ``@register_backend()`` takes the class's own name. By path,
    ``register_backend("MY_ATTN", "my_package.attn.MyBackend")`` imports nothing until the backend is wanted.
    A built-in member may be given another class; `clear_override` gives it back its own.

    Args:
        name: the backend's name; any string, or a member of one of the enums.
        class_path: ``package.module.Class``; None when used as a decorator.
        override: replace an earlier registration of a third-party name.

    Raises:
        ValueError: the name is registered already and ``override`` is False, or the path has no dot.
        TypeError: the class is not a complete backend of that name.
    """
    key = name.key if isinstance(name, _BackendMember) else name
    if class_path is not None:
        _register_path(key, class_path, override)
    elif isinstance(key, type):
        raise TypeError("write @register_backend() with parentheses")

    def decorate(cls: B) -> B:
        own = key if key is not None else cls.get_name()
        _check_free(own, override)
        _adopt(own, cls)
        _STATE.entries[own] = _Entry(f"{cls.__module__}.{cls.__qualname__}", cls)
        _changed()
        return cls

    return decorate


def _register_path(name: str | None, path: str, override: bool) -> None:
    if name is None or "." not in path:
        raise ValueError(
            f"register_backend(name={name!r}, class_path={path!r}): give a name and a path such as "
            "'my_package.module.MyBackend'"
        )
    _check_free(name, override)
    _STATE.entries[name] = _Entry(path)
    _changed()


def _check_free(name: str, override: bool) -> None:
    taken = _entries().get(name)
    if taken is not None and not override:
        raise ValueError(
            f"attention backend {name!r} is registered already as {taken.path}; pass override=True to "
            "replace it, or clear_override() first"
        )


def clear_override(name: str | _BackendMember) -> None:
    """Forgets a registration: a built-in name gets its own class back, another name is gone.

    Raises:
        ValueError: nothing is registered under ``name``.
    """
    key = name.key if isinstance(name, _BackendMember) else name
    if _entries().pop(key, None) is None:
        raise ValueError(f"nothing is registered under {key!r}")
    _changed()


@contextmanager
def registry_scope() -> Iterator[None]:
    """Restores the registry when the ``with`` block ends; for tests."""
    saved = dict(_entries())
    try:
        yield
    finally:
        _STATE.entries = saved
        _changed()
