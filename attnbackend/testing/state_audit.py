"""Does an op write what its schema says, all of it and nothing else?

``torch.library.opcheck`` passes on ops that write hidden tensors and on ops that declare writes
they never make. The audit looks at memory instead: it takes the bytes of every tensor that Python
can reach, before and after one call, and compares what changed with the schema.

Limits: memory that no Python tensor refers to (a workspace owned by C++ code) is invisible, and so
are tensors alive at a ``gc.freeze()``; a write of the bytes that were already there goes unseen, so
poison outputs and use two seeds; so does hidden state that is only read. Every live tensor is
hashed twice a call: keep caches small and large models unloaded.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from attnbackend.testing.storages import (
    LiveStorage,
    byte_view,
    covered_bytes,
    hash_bytes,
    live_storages,
    owner_of,
    storage_of,
    wait_for_devices,
)

__all__ = ["AllowedWrite", "AuditReport", "Fault", "Finding", "audit_op"]


class Fault(enum.StrEnum):
    """What can be wrong with one call."""

    HIDDEN_WRITE = "hidden write"
    """Memory changed that belongs to no argument."""
    UNDECLARED_WRITE = "undeclared write"
    """Memory of an argument changed outside the elements of the arguments declared mutated."""
    UNDECLARED_ALIAS = "undeclared alias"
    """A returned tensor shares memory with an argument, or hidden state, and is not declared to."""


@dataclass(frozen=True)
class Finding:
    fault: Fault
    where: str
    """Argument name, or the owner of the memory."""
    detail: str

    def __str__(self) -> str:
        return f"{self.fault}: {self.where} ({self.detail})"


@dataclass(frozen=True, eq=False)
class AllowedWrite:
    """Hidden memory that an op may write (a workspace, say), with the reason."""

    where: str | Tensor
    """``module.attribute`` as findings name it, or any tensor over the memory."""
    reason: str

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError(f"allowing a write to {self.where!r} needs a reason, got none")


@dataclass(frozen=True)
class AuditReport:
    """What one call did, next to what the schema says."""

    op: OpOverload
    findings: tuple[Finding, ...]
    declared: frozenset[str]
    """Arguments the schema declares mutated that this call passed a tensor for."""
    written: frozenset[str]
    """Those of them whose elements changed."""
    exercised: frozenset[str]
    """Tensor arguments, optional ones too, that this call passed a tensor for."""

    @property
    def ok(self) -> bool:
        return not self.findings

    def assert_ok(self) -> None:
        """Raises AssertionError naming every finding."""
        if self.findings:
            lines = "\n  ".join(map(str, self.findings))
            raise AssertionError(f"{self.op} is not true to its schema {self.op._schema}\n  {lines}")


def audit_op(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    allow: Sequence[AllowedWrite] = (),
) -> AuditReport:
    """Call ``op`` once and compare the memory it changed with its schema.

    Args:
        op: an overload, such as ``torch.ops.attnbackend.attention.default``.
        args, kwargs: real tensors (CPU or CUDA) and the rest of its arguments.
        allow: hidden memory it may write, with reasons.

    Returns:
        The report; the result of the call is dropped.

    Raises:
        ValueError: ``op`` is no overload, or an argument is unknown.
    """
    if not isinstance(op, OpOverload):
        raise ValueError(f"op must be an OpOverload such as torch.ops.ns.name.default, got {op!r}")
    arguments = _bind(op, args, dict(kwargs or {}))
    wait_for_devices()
    memory = _ArgumentMemory(arguments)
    hidden = _HiddenMemory(memory)
    result = op(*args, **dict(kwargs or {}))
    wait_for_devices()
    declared = _declared_mutated(op) & arguments.keys()
    findings = [
        *memory.undeclared_writes(declared),
        *hidden.findings(allow),
        *_undeclared_aliases(op, result, arguments, hidden, allow),
    ]
    return AuditReport(
        op=op,
        findings=tuple(findings),
        declared=declared,
        written=frozenset(name for name in declared if memory.changed(name)),
        exercised=frozenset(arguments),
    )


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """One argument storage and its bytes before the call."""

    live: LiveStorage
    before: Tensor

    @cached_property
    def changed(self) -> Tensor:
        """Which bytes differ after the call, bool [num_bytes]; all of them after a resize."""
        if self.live.moved:
            return torch.ones_like(self.before, dtype=torch.bool)
        return self.before != byte_view(self.live)


class _ArgumentMemory:
    """The memory of the arguments, copied before the call so that single bytes can be compared."""

    def __init__(self, arguments: Mapping[str, list[Tensor]]) -> None:
        self._arguments = arguments
        self._snapshots: dict[tuple[torch.device, int], _Snapshot] = {}
        for tensor in (tensor for tensors in arguments.values() for tensor in tensors):
            live = storage_of(tensor)
            if live is not None and (live.device, live.address) not in self._snapshots:
                self._snapshots[live.device, live.address] = _Snapshot(live, byte_view(live).clone())
        self._places = {
            name: [(tensor, storage_of(tensor)) for tensor in tensors] for name, tensors in arguments.items()
        }

    def overlaps(self, live: LiveStorage) -> bool:
        return any(live.overlaps(snapshot.live) for snapshot in self._snapshots.values())

    def changed(self, name: str) -> bool:
        """Whether an element of the argument's own view changed."""
        for tensor, live in self._places[name]:
            if live is None:
                continue
            snapshot = self._snapshots[live.device, live.address]
            if bool((snapshot.changed & covered_bytes(tensor, snapshot.live)).any()):
                return True
        return False

    def undeclared_writes(self, declared: frozenset[str]) -> list[Finding]:
        findings = []
        for key, snapshot in self._snapshots.items():
            stray = snapshot.changed.clone()
            for name in declared:
                for tensor, live in self._places[name]:
                    if live is not None and (live.device, live.address) == key:
                        stray &= ~covered_bytes(tensor, snapshot.live)
            if bool(stray.any()):
                findings.append(self._stray_finding(key, snapshot, stray))
        return findings

    def _stray_finding(self, key: tuple[torch.device, int], snapshot: _Snapshot, stray: Tensor) -> Finding:
        sharing = [
            (name, tensor)
            for name, places in self._places.items()
            for tensor, live in places
            if live is not None and (live.device, live.address) == key
        ]
        inside = [
            name for name, tensor in sharing if bool((stray & covered_bytes(tensor, snapshot.live)).any())
        ]
        where = ", ".join(dict.fromkeys(inside or [name for name, _ in sharing]))
        place = "inside" if inside else "in its storage, outside its elements"
        return Finding(Fault.UNDECLARED_WRITE, where, f"{int(stray.sum())} bytes changed {place}")


class _HiddenMemory:
    """Everything else that Python can reach, as hashes."""

    def __init__(self, arguments: _ArgumentMemory) -> None:
        self._before = [(live, hash_bytes(live)) for live in live_storages() if not arguments.overlaps(live)]

    def findings(self, allow: Sequence[AllowedWrite]) -> list[Finding]:
        changed = [live for live, digest in self._before if live.moved or hash_bytes(live) != digest]
        return [_hidden_finding(Fault.HIDDEN_WRITE, live) for live in changed if not _is_allowed(live, allow)]

    def holding(self, returned: LiveStorage) -> LiveStorage | None:
        """The storage, alive before the call, that a returned tensor lies in."""
        return next((live for live, _ in self._before if live.overlaps(returned)), None)


def _hidden_finding(fault: Fault, live: LiveStorage) -> Finding:
    example = live.example
    detail = f"{example.dtype} {tuple(example.shape)} on {live.device}, not an argument"
    return Finding(fault, owner_of(live), detail)


def _is_allowed(live: LiveStorage, allow: Sequence[AllowedWrite]) -> bool:
    for entry in allow:
        if isinstance(entry.where, Tensor):
            allowed = storage_of(entry.where)
            if allowed is not None and allowed.overlaps(live):
                return True
        elif entry.where == owner_of(live):
            return True
    return False


def _undeclared_aliases(
    op: OpOverload,
    result: object,
    arguments: Mapping[str, list[Tensor]],
    hidden: _HiddenMemory,
    allow: Sequence[AllowedWrite],
) -> list[Finding]:
    findings = []
    returns = result if isinstance(result, tuple) else (result,)
    for position, value in enumerate(returns):
        for tensor in tree_leaves(value):
            live = storage_of(tensor) if isinstance(tensor, Tensor) else None
            if live is None:
                continue
            findings += [
                Finding(Fault.UNDECLARED_ALIAS, name, f"return {position} shares its memory")
                for name in _names_sharing(live, arguments)
                if not _declares_alias(op, position, name)
            ]
            source = hidden.holding(live)
            if source is not None and not _is_allowed(source, allow):
                findings.append(_hidden_finding(Fault.UNDECLARED_ALIAS, source))
    return findings


def _names_sharing(live: LiveStorage, arguments: Mapping[str, list[Tensor]]) -> list[str]:
    return [
        name
        for name, tensors in arguments.items()
        if any(other is not None and other.overlaps(live) for other in map(storage_of, tensors))
    ]


def _declares_alias(op: OpOverload, position: int, name: str) -> bool:
    returned = op._schema.returns[position].alias_info
    argument = next(a.alias_info for a in op._schema.arguments if a.name == name)
    if returned is None or argument is None:
        return False
    return bool(set(returned.before_set) & set(argument.before_set))


def _declared_mutated(op: OpOverload) -> frozenset[str]:
    return frozenset(
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _bind(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Tensors of each argument by name, lists flattened; arguments without one are left out."""
    names = [argument.name for argument in op._schema.arguments]
    if len(args) > len(names) or not kwargs.keys() <= set(names):
        raise ValueError(
            f"{op} takes {len(names)} arguments ({', '.join(names)}), got {len(args)} positional "
            f"ones and {', '.join(kwargs) or 'no keywords'}"
        )
    bound = dict(zip(names, args, strict=False)) | dict(kwargs)
    tensors = {
        name: [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        for name, value in bound.items()
    }
    return {name: found for name, found in tensors.items() if found}
