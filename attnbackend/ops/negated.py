"""Views of numbers that lie in memory with the other sign, which torch makes of complex ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["resolve_negated"]


def resolve_negated(library: torch.library.Library, op: torch._ops.OpOverload) -> None:
    """Gives the op negated views as plain tensors, and refuses to write into one.

    Torch's own way takes the results of an op for what it wrote: of ours, that return nothing, it would read
    past the end. The kernel is asked for negated views only: other calls pay nothing.
    """
    library.impl(op, partial(_call_resolved, op), "Negative")


def _call_resolved(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    arguments = op._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    for argument in arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(x := given.get(argument.name), Tensor) and x.is_neg():
            raise ValueError(
                f"{argument.name} of {op.name()} is written, but is a view of numbers of the other sign "
                "(is_neg() is True); give a tensor of its own, such as torch.empty"
            )
    return op(**{name: _resolved(x) for name, x in given.items()})


def _resolved(x: Any) -> Any:
    if isinstance(x, list):
        return [y.resolve_neg() for y in x]
    return x.resolve_neg() if isinstance(x, Tensor) else x
