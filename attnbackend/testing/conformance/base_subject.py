"""What every backend under test has, whatever its kind: ops that read a cache, and one that writes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from attnbackend.backend import AttentionBackend
from attnbackend.impl import AttentionParams
from attnbackend.ops.bind import run_attention, run_update
from attnbackend.ops.library import (
    ATTENTION,
    KV_CACHE_UPDATE,
    MLA_ATTENTION,
    MLA_CACHE_UPDATE,
    MLA_MIXED,
    OpRole,
    role_of,
)
from attnbackend.ops.mla_bind import run_mixed, run_mla_update, run_mqa
from attnbackend.testing.paging import PagedCase

__all__ = ["AnyBatch", "BaseSubject", "Batch", "Case", "OpCall"]

Op = torch._ops.OpOverload
_DIRECT: dict[str, Any] = {
    ATTENTION.suffix: run_attention, KV_CACHE_UPDATE.suffix: run_update, MLA_ATTENTION.suffix: run_mqa,
    MLA_MIXED.suffix: run_mixed, MLA_CACHE_UPDATE.suffix: run_mla_update,
}  # fmt: skip
"""What the ops of a role run."""


@dataclass(frozen=True)
class OpCall:
    """An op with its arguments by name."""

    op: Op
    given: dict[str, Any]

    @classmethod
    def of(cls, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpCall:
        names = (argument.name for argument in op._schema.arguments)
        return cls(op, {**dict(zip(names, args, strict=False)), **kwargs})

    @property
    def role(self) -> OpRole:
        role = role_of(self.op)
        assert role is not None, f"{self.op} is of no role"
        return role

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments."""
        names = [a.name for a in self.op._schema.arguments if not a.kwarg_only]
        return tuple(self.given[n] for n in names), {k: v for k, v in self.given.items() if k not in names}

    def with_given(self, **changes: Any) -> OpCall:
        return replace(self, given={**self.given, **changes})

    def __call__(self) -> None:
        args, kwargs = self.arguments
        self.op(*args, **kwargs)

    def directly(self, backend: str) -> None:
        """As the op runs it, past torch's dispatcher, under which modes see nothing."""
        _DIRECT[self.role.suffix](backend, self.role.call(**self.given))


class _Lengths(PagedCase, Protocol):
    @property
    def causal(self) -> bool: ...


class AnyBatch(Protocol):
    """What a `PagedBatch` and an `MLABatch` have in common."""

    @property
    def case(self) -> _Lengths: ...
    @property
    def kv_cache(self) -> Tensor: ...
    @property
    def kv_buffer(self) -> Tensor: ...
    @property
    def query(self) -> Tensor: ...
    @property
    def query_start_loc(self) -> Tensor: ...
    @property
    def seq_lens(self) -> Tensor: ...
    @property
    def block_table(self) -> Tensor: ...
    def poison_outputs(self) -> None: ...


Case = TypeVar("Case", bound=PagedCase)
Batch = TypeVar("Batch", bound=AnyBatch)


@dataclass(frozen=True, kw_only=True)
class BaseSubject(ABC, Generic[Case, Batch]):
    """What checks call that do not ask what kind of attention it is."""

    backend: type[AttentionBackend]
    device: torch.device
    write: Op
    """The backend's own writer, or the agnostic op where it has none."""
    slow: bool = False
    """Whether what takes minutes is checked too."""

    @property
    def name(self) -> str:
        return self.backend.get_name()

    @property
    @abstractmethod
    def roles(self) -> tuple[str, ...]:
        """Of the ops that attend to a cache."""

    @abstractmethod
    def batch(self, case: Case) -> Batch: ...

    @abstractmethod
    def params(self, case: Case) -> AttentionParams:
        """What a layer of the case is built with."""

    @abstractmethod
    def read_call(self, role: str, batch: Batch) -> OpCall: ...

    @abstractmethod
    def write_call(self, batch: Batch) -> OpCall: ...

    @abstractmethod
    def results(self, role: str, batch: Batch) -> dict[str, Tensor]:
        """What the role writes: "output" and, where the case has one, "LSE"."""

    @abstractmethod
    def judge(self, role: str, batch: Batch, *, factor: float = 2.0) -> None:
        """Raises AssertionError where the results are not right."""

    def run(self, role: str, batch: Batch, **changes: Any) -> None:
        self.read_call(role, batch).with_given(**changes)()

    def run_write(self, batch: Batch) -> None:
        self.write_call(batch)()

    def called(self, role: str) -> str:
        """How findings name what a role writes: nothing where there is one role alone."""
        return "" if len(self.roles) == 1 else f"{role}'s "
