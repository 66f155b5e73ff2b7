"""What a graph reads, checked at every replay: it holds addresses, and cannot notice that one is stale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from itertools import cycle, islice
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = [
    "LongLivedTensors",
    "TensorRecord",
    "check_unmoved",
    "module_tensors",
    "plan_tensors",
    "record_tensors",
]

_LOOKED_AT_EACH_TIME = 4
"""Long-lived tensors checked at a replay, whatever the number of layers."""


@dataclass(frozen=True)
class TensorRecord:
    """Where a tensor was at capture. It keeps the memory, so a stale address is never a freed one."""

    tensor: Tensor
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorRecord:
        return cls(tensor, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())

    def difference(self, now: Tensor | None) -> str | None:
        """What of a tensor is not as it was; None: nothing."""
        if now is self.tensor:
            return None
        if now is None:
            return "is gone"
        for what, old, new in (
            ("address", self.address, now.data_ptr()),
            ("shape", self.shape, tuple(now.shape)),
            ("stride", self.stride, now.stride()),
        ):
            if old != new:
                return f"has {what} {new}, {old} when the graph was captured"
        return None


def record_tensors(tensors: Mapping[str, Tensor]) -> dict[str, TensorRecord]:
    """Records by name."""
    return {name: TensorRecord.of(tensor) for name, tensor in tensors.items()}


def check_unmoved(graph: object, records: Mapping[str, TensorRecord], now: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError, naming every tensor that is not where the graph reads it."""
    moved = [
        f"{name} {difference}"
        for name, record in records.items()
        if (difference := record.difference(now.get(name))) is not None
    ]
    added = sorted(now.keys() - records.keys())
    if moved or added:
        found = "; ".join([*moved, *(f"{name} was not there when the graph was captured" for name in added)])
        raise RuntimeError(
            f"the graph of {graph} cannot be replayed: {found}. Whoever makes this tensor must write into "
            "one that it keeps, of the largest size"
        )


def plan_tensors(plan: Any, name: str = "plan") -> Iterator[tuple[str, Tensor]]:
    """Every tensor on a device that a plan holds, by its path; fields named ``*_cpu`` are the host's."""
    if isinstance(plan, Tensor):
        yield name, plan
    elif is_dataclass(plan):
        kind: Any = type(plan)
        for field in _device_fields(kind):
            if (value := getattr(plan, field)) is not None and not isinstance(value, (int, float)):
                yield from plan_tensors(value, f"{name}.{field}")
    elif isinstance(plan, (tuple, list)):
        for i, item in enumerate(plan):
            yield from plan_tensors(item, f"{name}[{i}]")
    elif isinstance(plan, dict):
        for key, item in plan.items():
            yield from plan_tensors(item, f"{name}[{key!r}]")


@cache
def _device_fields(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if not f.name.endswith("_cpu") and f.name != "is_prefilling")


class _Looked(NamedTuple):
    name: str
    get: Callable[[], Tensor | None]
    record: TensorRecord


class LongLivedTensors:
    """Weights and caches: too many to look at in a step, so each replay looks at some of them in turn.

    Args:
        named: looks each tensor up where its owner has it now, by name.
    """

    def __init__(self, named: Mapping[str, Callable[[], Tensor | None]]) -> None:
        now = [(name, get, get()) for name, get in named.items()]
        self._records = [_Looked(name, get, TensorRecord.of(x)) for name, get, x in now if x is not None]
        self._turn = cycle(self._records)

    def check_some(self, graph: object) -> None:
        """As `check_unmoved`, for the next few; after enough calls, for all."""
        self._check(graph, islice(self._turn, min(_LOOKED_AT_EACH_TIME, len(self._records))))

    def check_all(self, graph: object) -> None:
        self._check(graph, self._records)

    def _check(self, graph: object, records: Iterable[_Looked]) -> None:
        for name, get, record in records:
            now = get()
            if now is not record.tensor and (difference := record.difference(now)) is not None:
                raise RuntimeError(
                    f"the graph of {graph} cannot be replayed: {name} {difference}. Weights and caches are "
                    "written in place while an engine serves, or a new engine is made"
                )


def module_tensors(module: nn.Module) -> dict[str, Callable[[], Tensor | None]]:
    """Look-ups of a module's parameters and buffers, where the module has them now."""
    found: dict[str, Callable[[], Tensor | None]] = {}
    for path, owner in module.named_modules():
        for store in (owner._parameters, owner._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    found[f"{path}.{name}".lstrip(".")] = _getter(store, name)
    return found


def _getter(store: Mapping[str, Tensor | None], name: str) -> Callable[[], Tensor | None]:
    return partial(store.get, name)
