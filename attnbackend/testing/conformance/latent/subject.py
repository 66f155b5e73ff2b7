"""The backend of latent attention under test, with its ops, on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnbackend.backend import AttentionBackend
from attnbackend.ops.agnostic import mla_kv_cache_update
from attnbackend.ops.generate import backend_op
from attnbackend.ops.library import MLA_ATTENTION, MLA_CACHE_UPDATE, MLA_MIXED, MLA_PREFILL
from attnbackend.testing.mla_batches import (
    MLABatch,
    make_mla_batch,
    mixed_arguments,
    mqa_arguments,
    update_arguments,
)
from attnbackend.testing.mla_cases import MLACase

__all__ = ["Arguments", "LatentSubject"]

Op = torch._ops.OpOverload
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class LatentSubject:
    """What checks call. Inside `open_subject` the agnostic ops run on the backend too."""

    backend: type[AttentionBackend]
    device: torch.device
    mqa: Op
    mixed: Op | None
    """None: a sparse backend, which has none."""
    mha: Op | None
    write: Op
    """The backend's own writer, or the agnostic op where it has none."""

    @classmethod
    def of(cls, backend: type[AttentionBackend], device: torch.device) -> LatentSubject:
        name = backend.get_name()
        mqa = backend_op(name, MLA_ATTENTION)
        assert mqa is not None, "resolving a backend of latent attention generates its op"
        return cls(
            backend=backend, device=device, mqa=mqa, mixed=backend_op(name, MLA_MIXED),
            mha=backend_op(name, MLA_PREFILL),
            write=backend_op(name, MLA_CACHE_UPDATE) or mla_kv_cache_update,
        )  # fmt: skip

    @property
    def name(self) -> str:
        return self.backend.get_name()

    def batch(self, case: MLACase) -> MLABatch:
        return make_mla_batch(case, self.device)

    def calls(self, batch: MLABatch) -> dict[str, tuple[Op, Arguments]]:
        """The ops that attend to a cache, with their arguments, by the name of their role."""
        found = {"forward_mqa": (self.mqa, mqa_arguments(batch))}
        if self.mixed is not None:
            found["forward_mixed"] = (self.mixed, mixed_arguments(batch))
        return found

    def run_mqa(self, batch: MLABatch) -> None:
        positional, keyword = mqa_arguments(batch)
        self.mqa(*positional, **keyword)

    def run_mixed(self, batch: MLABatch) -> None:
        assert self.mixed is not None
        positional, keyword = mixed_arguments(batch)
        self.mixed(*positional, **keyword)

    def run_write(self, batch: MLABatch) -> None:
        positional, keyword = update_arguments(batch)
        self.write(*positional, **keyword)
