"""A broken backend of latent attention, and the check that must see it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from attnbackend.backend import AttentionBackend
from attnbackend.backends.mla.torch_mla import TorchMLABackend, TorchMLAImpl, TorchMLAMetadataBuilder
from attnbackend.ops import mla_mixed

__all__ = ["LatentMutant"]


@dataclass(frozen=True)
class LatentMutant:
    """`TORCH_MLA` with one fault."""

    name: str
    fault: str
    caught_by: str
    """Name of the check that must reject it, whatever other checks do."""
    impl: type[Any] = TorchMLAImpl
    builder: type[Any] = TorchMLAMetadataBuilder
    claims: dict[str, Any] = field(default_factory=dict, hash=False)
    base: type[AttentionBackend] = TorchMLABackend
    patch: tuple[str, Callable[..., Any]] | None = None
    """A function of the step around the backend, by its name in `attnbackend.ops.mla_mixed`, gone wrong."""

    def backend(self) -> type[AttentionBackend]:
        """The class, not registered."""
        own = {"get_impl_cls": staticmethod(lambda: self.impl)}
        if self.base is TorchMLABackend:
            own["get_builder_cls"] = staticmethod(lambda: self.builder)
        body = {
            "get_name": staticmethod(lambda: f"LATENT_MUTANT_{self.name.upper()}"),
            **own, **self.claims, "__module__": __name__, "__doc__": self.fault,
        }  # fmt: skip
        return types.new_class(f"Mutant_{self.name}", (self.base,), {}, lambda ns: ns.update(body))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The fault that lies outside of the class is there inside the ``with`` block."""
        if self.patch is None:
            yield
            return
        name, wrong = self.patch
        with mock.patch.object(mla_mixed, name, wrong):
            yield
