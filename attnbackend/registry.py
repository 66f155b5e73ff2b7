"""Names and classes of backends: built-in members, third-party names, overrides and plugins.

A name maps to a class or to a path that is imported when the backend is first wanted. Every change
moves the registry's generation, on which selection caches.

A package brings a plugin by an entry point in the group ``attnbackend.backends``, whose name is the
backend's and whose value is the class, as in ``MY_ATTN = "my_package.attn:MyBackend"``. A plugin
that cannot be imported is unavailable, with the cause as its reason, and disturbs no other backend.

``PREFILL+DECODE``, two names with a plus between them, stands for a composition of the two, which is made
when it is asked for; see `attnbackend.backends.two_phase`.
"""

from __future__ import annotations

import difflib
import enum
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from attnbackend.backend import AttentionBackend, check_parts
from attnbackend.native_calls import new_epoch

__all__ = [
    "AttentionBackendEnum",
    "BackendName",
    "MambaAttentionBackendEnum",
    "any_case_name",
    "backend_key",
    "backend_names",
    "backend_path",
    "clear_override",
    "is_implemented",
    "is_overridden",
    "register_backend",
    "registry_generation",
    "registry_scope",
    "require_implemented",
    "resolve_backend",
]

ENTRY_POINT_GROUP = "attnbackend.backends"
COMPOSED = "+"
"""Between the names of a prompt backend and a decode backend that work on one cache."""

B = TypeVar("B", bound=type[AttentionBackend])


class _BackendMember(enum.Enum):
    """A name whose value is the path of its class; the registry holds everything else."""

    @property
    def key(self) -> str:
        """The name in the registry, unique over both enums."""
        return self.name

    def get_path(self) -> str:
        """Path of the class that the name stands for now, overrides included."""
        return backend_path(self.key)

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
    """Attention backends that the project knows; third parties need no member, any name will do."""

    FLASH_ATTN = f"{_HERE}.flash_attn.backend.FlashAttentionBackend"
    FLASH_ATTN_DIFFKV = f"{_HERE}.flash_attn_diffkv.FlashAttentionDiffKVBackend"
    TRITON_ATTN = f"{_HERE}.triton_attn.TritonAttentionBackend"
    TRITON_ATTN_DIFFKV = f"{_HERE}.triton_attn_diffkv.TritonAttentionDiffKVBackend"
    ROCM_ATTN = f"{_HERE}.rocm_attn.RocmAttentionBackend"
    ROCM_AITER_UNIFIED_ATTN = f"{_HERE}.rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend"
    ROCM_AITER_FA = f"{_HERE}.rocm_aiter_fa.RocmAiterFlashAttentionBackend"
    FLASHINFER = f"{_HERE}.flashinfer.backend.FlashInferBackend"
    FLEX_ATTENTION = f"{_HERE}.flex_attention.FlexAttentionBackend"
    CPU_ATTN = f"{_HERE}.cpu_attn.CPUAttentionBackend"
    HPC_ATTN = f"{_HERE}.hpc_attn.HPCAttentionBackend"
    TURBOQUANT = f"{_HERE}.turboquant.TurboQuantBackend"
    MINIMAX_M3_SPARSE = f"{_HERE}.minimax_m3_sparse.MiniMaxM3SparseBackend"
    TORCH_SDPA = f"{_HERE}.torch_sdpa.TorchSDPABackend"
    NO_ATTENTION = f"{_HERE}.no_attention.NoAttentionBackend"
    CPU_MLA = f"{_HERE}.mla.cpu_mla.CPUMLABackend"
    TORCH_MLA = f"{_HERE}.mla.torch_mla.TorchMLABackend"
    TORCH_MLA_SPARSE = f"{_HERE}.mla.torch_mla.TorchMLASparseBackend"
    TRITON_MLA = f"{_HERE}.mla.triton_mla.TritonMLABackend"
    TRITON_MLA_SPARSE = f"{_HERE}.mla.triton_mla.TritonMLASparseBackend"
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


BackendName = str | _BackendMember

_BUILT_IN: dict[str, str] = {
    m.key: m.value for members in (AttentionBackendEnum, MambaAttentionBackendEnum) for m in members
}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class _Entry:
    """A registration that is not a built-in: the path, and the class once it is known."""

    path: str
    cls: type[AttentionBackend] | None = None
    is_plugin: bool = False
    conflict: str | None = None
    """Why a plugin cannot be used, found before importing it."""


@dataclass
class _State:
    entries: dict[str, _Entry]
    resolved: dict[str, type[AttentionBackend]]
    generation: int = 0
    plugins_loaded: bool = False


_STATE = _State(entries={}, resolved={})


def registry_generation() -> int:
    """A number that grows with every change of the registry and never falls."""
    _entries()
    return _STATE.generation


def _changed() -> None:
    _STATE.generation += 1
    new_epoch()
    _STATE.resolved.clear()


def _entries() -> dict[str, _Entry]:
    """Registrations, after the plugins had their turn; a plugin never displaces an explicit one."""
    if not _STATE.plugins_loaded:
        _STATE.plugins_loaded = True
        points: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=ENTRY_POINT_GROUP):
            points.setdefault(point.name, []).append(point)
        for name, offers in points.items():
            _STATE.entries.setdefault(name, _plugin_entry(name, offers))
        if points:
            _changed()
    return _STATE.entries


def _plugin_entry(name: str, offers: list[EntryPoint]) -> _Entry:
    paths = sorted({point.value.strip() for point in offers})
    conflict = None
    if len(paths) > 1:
        conflict = f"installed packages offer different classes for {name!r}: {', '.join(paths)}"
    elif (other := _other_case(name)) is not None:
        conflict = f"the plugin's name {name!r} differs from {other!r} in case alone"
    elif not _NAME.fullmatch(name):
        conflict = f"the plugin's name {name!r} is not letters, digits, '_', '.' and '-'"
    return _Entry(paths[0], is_plugin=True, conflict=conflict)


def backend_names() -> list[str]:
    """Every name that can be asked for, built-in ones first, whether implemented or not."""
    return [*_BUILT_IN, *sorted(set(_entries()) - set(_BUILT_IN))]


def backend_key(name: BackendName) -> str:
    """The registry's name for a member of one of the enums; a string is returned as it is."""
    return name.key if isinstance(name, _BackendMember) else name


def any_case_name(name: str) -> str:
    """The known name that equals ``name`` up to case, or ``name`` itself where there is none."""
    if COMPOSED in name:
        return COMPOSED.join(any_case_name(part.strip()) for part in name.split(COMPOSED))
    return name if name in backend_names() else _other_case(name) or name


def _other_case(name: str) -> str | None:
    """A known name that differs from ``name`` in case alone."""
    known = (n for n in [*_BUILT_IN, *_STATE.entries] if n != name)
    return next((n for n in known if n.casefold() == name.casefold()), None)


def backend_path(name: str) -> str:
    """Path of the class that a name stands for now.

    Raises:
        ValueError: no such name.
    """
    if COMPOSED in name:
        return f" {COMPOSED} ".join(map(backend_path, _two_parts(name)))
    entry = _entries().get(name)
    if entry is None and name not in _BUILT_IN:
        raise _unknown(name)
    return entry.path if entry else _BUILT_IN[name]


def is_overridden(name: BackendName) -> bool:
    """Whether a built-in name stands for another class than its own."""
    key = backend_key(name)
    return key in _BUILT_IN and key in _entries()


def is_implemented(name: BackendName) -> bool:
    """Whether a class stands behind ``name``; built-in members may wait for theirs."""
    key = backend_key(name)
    if COMPOSED in key:
        return all(map(is_implemented, key.split(COMPOSED)))
    return key in _entries() or (key in _BUILT_IN and _module_exists(_BUILT_IN[key]))


@cache
def _module_exists(path: str) -> bool:
    module = path.rpartition(".")[0]
    try:
        return bool(module) and importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def require_implemented(name: str) -> None:
    """Passes when a class stands behind ``name``.

    Raises:
        ValueError: no such name (near names are listed), or a member that has no class yet.
    """
    if COMPOSED in name:
        for part in _two_parts(name):
            require_implemented(part)
        return
    if name not in backend_names():
        raise _unknown(name)
    if not is_implemented(name):
        usable = ", ".join(filter(is_implemented, backend_names()))
        raise ValueError(
            f"attention backend {name!r} is not implemented; register a class for it with "
            f"register_backend({name!r}), or choose one of {usable}"
        )


def _two_parts(name: str) -> tuple[str, str]:
    prefill, _, decode = name.partition(COMPOSED)
    if not prefill or not decode or COMPOSED in decode:
        raise ValueError(
            f"attention backend {name!r}: a composition is two names, that for prompts and that for decode, "
            "such as 'FLASH_ATTN+FLASHINFER'"
        )
    return prefill, decode


def _unknown(name: str) -> ValueError:
    names = backend_names()
    by_case = {n.casefold(): n for n in names}
    close = difflib.get_close_matches(name.casefold(), by_case, n=3)
    hint = f"; did you mean {' or '.join(by_case[n] for n in close)}?" if close else "."
    usable = ", ".join(filter(is_implemented, names))
    return ValueError(f"unknown attention backend {name!r}{hint} Allowed: {usable}")


def resolve_backend(name: BackendName) -> type[AttentionBackend]:
    """The class behind a name, imported now if need be, with its ops generated.

    Raises:
        ValueError: no such name (near names are listed), or a member that has no class yet.
        TypeError: the class is not a complete backend of that name.
        ImportError: the class cannot be imported, or it is a plugin that is at fault in any way.
    """
    key = backend_key(name)
    found = _STATE.resolved.get(key)
    if found is None:
        found = _STATE.resolved[key] = _resolve(key)
    return found


def _resolve(name: str) -> type[AttentionBackend]:
    require_implemented(name)
    if COMPOSED in name:
        return _composed(name)
    entry = _entries().get(name) or _Entry(_BUILT_IN[name])
    if not entry.is_plugin:
        return _load(name, entry)
    if entry.conflict:
        raise ImportError(entry.conflict)
    try:
        return _load(name, entry)
    except Exception as error:
        raise ImportError(f"plugin {entry.path}: {type(error).__name__}: {error}") from error


def _composed(name: str) -> type[AttentionBackend]:
    from attnbackend.backends.two_phase import compose

    prefill, decode = map(resolve_backend, _two_parts(name))
    cls = compose(prefill=prefill, decode=decode)
    _adopt(name, cls)
    return cls


def _load(name: str, entry: _Entry) -> type[AttentionBackend]:
    cls = entry.cls or _import_class(entry.path)
    _adopt(name, cls)
    return cls


def _import_class(path: str) -> Any:
    """The object at ``package.module.Class`` or ``package.module:Class.Inner``."""
    module, _, attributes = path.partition(":") if ":" in path else path.rpartition(".")
    found = importlib.import_module(module)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise ImportError(f"{attribute!r} of {path!r} does not exist in {found!r}")
        found = getattr(found, attribute)
    return found


def _adopt(name: str, cls: Any) -> None:
    """Checks that ``cls`` is a complete backend called ``name`` and generates its ops."""
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
        raise TypeError(f"{cls!r}, registered as {name!r}, is not a subclass of AttentionBackend")
    if cls.get_name() != name:
        raise TypeError(
            f"{cls.__qualname__}.get_name() returns {cls.get_name()!r} but it is registered as "
            f"{name!r}; ops and selection go by the name, so make the two agree"
        )
    check_parts(cls)
    from attnbackend.ops.generate import define_backend_ops

    define_backend_ops(cls)


def register_backend(
    name: BackendName | None = None, class_path: str | None = None, *, override: bool = False
) -> Callable[[B], B]:
    """Registers a backend class, as a decorator or by path.

    As a decorator, ``@register_backend()`` takes the class's own name. By path,
    ``register_backend("MY_ATTN", "my_package.attn.MyBackend")`` imports nothing until the backend
    is wanted. A built-in member may be given another class; `clear_override` gives it back its own.

    Args:
        name: the backend's name, of letters, digits, "_", "." and "-", or a member of an enum.
        class_path: ``package.module.Class``; None when used as a decorator.
        override: replace an earlier registration of the name.

    Raises:
        ValueError: the name is registered already and ``override`` is False, it differs from
            another in case alone, or the path has no dot.
        TypeError: the class is not a complete backend of that name.
    """
    if isinstance(name, type):
        raise TypeError("write @register_backend() with parentheses")
    key = None if name is None else backend_key(name)
    if class_path is not None:
        _register_path(key, class_path, override)

    def decorate(cls: B) -> B:
        own = _own_name(cls) if key is None else key
        _check_free(own, override)
        _adopt(own, cls)
        _STATE.entries[own] = _Entry(f"{cls.__module__}.{cls.__qualname__}", cls)
        _changed()
        return cls

    return decorate


def _own_name(cls: Any) -> str:
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
        raise TypeError(f"{cls!r} is not a subclass of AttentionBackend")
    return cls.get_name()


def _register_path(name: str | None, path: str, override: bool) -> None:
    if name is None or not path.replace(":", ".").rpartition(".")[0]:
        raise ValueError(
            f"register_backend(name={name!r}, class_path={path!r}): give a name and a path such as "
            "'my_package.module.MyBackend'"
        )
    _check_free(name, override)
    _STATE.entries[name] = _Entry(path)
    _changed()


def _check_free(name: str, override: bool) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"backend name {name!r} is not letters, digits, '_', '.' and '-'")
    taken = _entries().get(name)
    if taken is not None and not override:
        raise ValueError(
            f"attention backend {name!r} is registered already as {taken.path}; pass override=True "
            "to replace it, or clear_override() first"
        )
    if (other := _other_case(name)) is not None:
        raise ValueError(
            f"backend name {name!r} differs from {other!r} in case alone, which the environment "
            "variable ATTNBACKEND could not tell apart; take another name"
        )


def clear_override(name: BackendName) -> None:
    """Forgets a registration: a built-in name gets its own class back, another name is gone.

    Raises:
        ValueError: nothing is registered under ``name``.
    """
    key = backend_key(name)
    if _entries().pop(key, None) is None:
        raise ValueError(f"nothing is registered under {key!r}")
    _changed()


@contextmanager
def registry_scope() -> Iterator[None]:
    """Restores registrations and overrides when the ``with`` block ends; for tests.

    The generation moves on rather than back, so that nothing cached inside the block stays valid.
    """
    saved = dict(_entries())
    try:
        yield
    finally:
        _STATE.entries = saved
        _changed()
