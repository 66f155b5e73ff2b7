"""The backend under test, with its ops, on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnbackend.backend import AttentionBackend
from attnbackend.config import set_config
from attnbackend.impl import AttentionParams
from attnbackend.ops.agnostic import kv_cache_update
from attnbackend.ops.generate import backend_op
from attnbackend.ops.library import ATTENTION, KV_CACHE_UPDATE
from attnbackend.registry import (
    any_case_name,
    backend_names,
    register_backend,
    registry_scope,
    require_implemented,
    resolve_backend,
)
from attnbackend.testing.batches import (
    PagedBatch,
    kv_update_kwargs,
    kv_update_positional,
    make_batch,
    op_kwargs,
    op_positional,
)
from attnbackend.testing.cases import AttentionCase
from attnbackend.testing.conformance.base_subject import BaseSubject, OpCall
from attnbackend.testing.conformance.cache_shape import cache_permutation
from attnbackend.testing.conformance.latent_subject import LatentSubject
from attnbackend.testing.judgement import assert_attention_within_rule

__all__ = ["BackendLike", "Subject", "open_subject"]

BackendLike = str | type[AttentionBackend]


@dataclass(frozen=True, kw_only=True)
class Subject(BaseSubject[AttentionCase, PagedBatch]):
    """What checks call. Inside `open_subject` the agnostic ops run on the backend too."""

    forward: torch._ops.OpOverload
    permutation: tuple[int, ...]
    """Dimensions of the standard cache in the order of the backend's."""
    roles = ("forward",)

    def batch(self, case: AttentionCase) -> PagedBatch:
        return make_batch(case, self.device)

    def params(self, case: AttentionCase) -> AttentionParams:
        return AttentionParams(
            num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_size=case.head_size,
            dtype=case.dtype, kv_cache_dtype=case.kv_cache_dtype, block_size=case.block_size,
            device_type=self.device.type, scale=case.softmax_scale, causal=case.causal,
            sliding_window=case.sliding_window, attention_chunk_size=case.attention_chunk_size,
            logits_soft_cap=case.logits_soft_cap, attn_type=case.attn_type,
        )  # fmt: skip

    def cache(self, kv_cache: Tensor) -> Tensor:
        """A standard cache as the backend wants to see it; the same memory."""
        return kv_cache.permute(self.permutation)

    def read_call(self, role: str, batch: PagedBatch) -> OpCall:
        call = OpCall.of(self.forward, op_positional(batch), op_kwargs(batch))
        return call.with_given(kv_cache=self.cache(batch.kv_cache))

    def write_call(self, batch: PagedBatch) -> OpCall:
        call = OpCall.of(self.write, kv_update_positional(batch), kv_update_kwargs(batch))
        return call.with_given(kv_cache=self.cache(batch.kv_cache))

    def results(self, role: str, batch: PagedBatch) -> dict[str, Tensor]:
        return {"output": batch.output} | ({} if batch.lse is None else {"LSE": batch.lse})

    def judge(self, role: str, batch: PagedBatch, *, factor: float = 2.0) -> None:
        assert_attention_within_rule(batch, factor=factor)

    def forward_args(self, batch: PagedBatch, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the op ``forward``; ``changes`` by name."""
        return self.read_call("forward", batch).with_given(**changes).arguments

    def write_args(self, batch: PagedBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.write_call(batch).arguments

    def run_forward(self, batch: PagedBatch, **changes: Any) -> None:
        self.run("forward", batch, **changes)


@contextmanager
def open_subject(
    backend: BackendLike, device: str = "cpu", *, slow: bool = False
) -> Iterator[Subject | LatentSubject]:
    """The subject of a name, class or path; registrations made for it end with the ``with`` block.

    Args:
        backend: a registered name in any case, a class, or ``package.module.Class``
            (``package.module:Outer.Class`` where it lies in another).
        device: "cpu" or "cuda".

    Raises:
        ValueError: an unknown name, a device that is not there, or a backend that cannot be checked.
        ImportError: the path leads nowhere.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch finds no CUDA device here; use device='cpu'")
    with registry_scope():
        try:
            name = _registered(backend)
            cls = resolve_backend(name)
        except TypeError as error:  # of a class whose parts are not what a backend's are
            raise ValueError(str(error)) from error
        _require_checkable(cls, device)
        where = torch.device(device)
        subject = LatentSubject.of(cls, where, slow) if cls.is_mla else _dense_subject(cls, where, slow)
        with set_config(backend=name), torch.no_grad():
            yield subject


def _dense_subject(cls: type[AttentionBackend], device: torch.device, slow: bool) -> Subject:
    name = cls.get_name()
    own_writer, forward = backend_op(name, KV_CACHE_UPDATE), backend_op(name, ATTENTION)
    assert forward is not None, "resolving a dense backend generates its op"
    return Subject(
        backend=cls, device=device, forward=forward, write=own_writer or kv_cache_update,
        permutation=cache_permutation(cls), slow=slow,
    )  # fmt: skip


def _registered(backend: BackendLike) -> str:
    """The registry's name of a name, class or path, registered now if need be."""
    if isinstance(backend, str):
        known = any_case_name(backend)
        if known in backend_names() or not ("." in backend or ":" in backend):
            require_implemented(known)
            return known
        backend = _import_backend(backend)
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise ValueError(f"{backend!r} is no attention backend; give a name, a class or its path")
    name = backend.get_name()
    if name not in backend_names() or resolve_backend(name) is not backend:
        register_backend(name, override=True)(backend)
    return name


def _import_backend(path: str) -> Any:
    import importlib

    module, _, attributes = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or module.startswith("."):
        raise ValueError(f"{path!r} is no path of a backend class; expected package.module.Class")
    found: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise ValueError(f"module {module!r} has no {attributes!r}; give the path of a backend class")
        found = getattr(found, attribute)
    return found


def _require_checkable(cls: type[AttentionBackend], device: str) -> None:
    name = cls.get_name()
    if cls.is_ssm:
        raise ValueError(f"{name} is a state-space backend; these checks are about attention")
    if device not in cls.supported_device_types:
        allowed = ", ".join(cls.supported_device_types) or "none"
        raise ValueError(f"{name} does not claim device_type={device!r}; claimed: {allowed}")
    if reason := cls.unavailable_reason(device):
        raise ValueError(f"{name} cannot run on {device} here: {reason}")
