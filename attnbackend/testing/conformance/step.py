"""A write and a read of one cache as a module, for tracing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnbackend.testing.conformance.base_subject import BaseSubject, Batch, OpCall

__all__ = ["Step", "StepTensors"]

StepTensors = dict[str, Tensor]


class Step(nn.Module):
    """Writes the new tokens with the subject's writer, attends with one of its ops.

    Args:
        subject: has the ops.
        role: of the op that attends.
        batch: whose arguments that are no tensors are the module's constants.
        writes: whether there are tokens to write.
    """

    def __init__(
        self, subject: BaseSubject[Any, Batch], role: str, batch: Batch, writes: bool = True
    ) -> None:
        super().__init__()
        self.write = _plainly(subject.write_call(batch)) if writes else None
        self.attend = _plainly(subject.read_call(role, batch))
        self.shape = subject.results(role, batch)["output"].shape

    @staticmethod
    def tensors(subject: BaseSubject[Any, Batch], role: str, batch: Batch) -> StepTensors:
        """The inputs of `forward`, the cache a copy with the strides of the batch's."""
        given = {**subject.write_call(batch).given, **subject.read_call(role, batch).given}
        found: StepTensors = {n: x for n, x in given.items() if isinstance(x, Tensor) and n != "output"}
        cache, buffer = given["kv_cache"], batch.kv_buffer.clone()
        found["kv_cache"] = buffer.as_strided(cache.shape, cache.stride(), cache.storage_offset())
        return found

    def forward(self, x: dict[str, Any]) -> Tensor:
        """Output as the role's; the cache in ``x`` is written."""
        if self.write is not None:
            _call(self.write, x)
        output: Tensor = x[self.attend[1][0]].new_zeros(self.shape)
        _call(self.attend, {**x, "output": output})
        return output


_Plain = tuple[Any, tuple[str, ...], tuple[str, ...], dict[str, Any]]
"""Op, names of positional and of keyword arguments, and those arguments that are no tensors."""


def _plainly(call: OpCall) -> _Plain:
    """As torch.compile can look into it."""
    positional = tuple(a.name for a in call.op._schema.arguments if not a.kwarg_only)
    keyword = tuple(name for name in call.given if name not in positional)
    return call.op, positional, keyword, {k: v for k, v in call.given.items() if not isinstance(v, Tensor)}


def _call(plain: _Plain, tensors: dict[str, Any]) -> None:
    op, positional, keyword, constants = plain
    given = {**constants, **tensors}
    op(*[given[name] for name in positional], **{name: given[name] for name in keyword})
