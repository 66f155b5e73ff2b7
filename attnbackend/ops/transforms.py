"""Derivatives and transforms, which torch takes of any op: of ours, that have none, it would give zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnbackend._torch_compat import (
    TRANSFORMS_KEY,
    in_forward_mode,
    is_transformed,
    may_have_tangent,
    outside_transforms,
)
from attnbackend.ops.argument_checks import check_no_grad

__all__ = ["check_no_tangents", "refuse_transforms", "without_derivatives"]


def without_derivatives(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` of op ``name``; on arguments whose derivatives are wanted it raises RuntimeError."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or in_forward_mode():
            arguments = (*args, *kwargs.values())
            check_no_grad(_tensors_among(arguments))
            check_no_tangents(name, arguments)
        return run(*args, **kwargs)

    return checked


def check_no_tangents(name: str, arguments: Iterable[Any]) -> None:
    """Raises RuntimeError on an argument of op ``name`` with a derivative of forward-mode AD."""
    if in_forward_mode() and any(map(may_have_tangent, _tensors_among(arguments))):
        raise RuntimeError(
            f"{name} serves inference and has no derivative, but an input has a tangent of forward-mode AD; "
            "call it on the primal, as torch.autograd.forward_ad.unpack_dual gives it"
        )


def refuse_transforms(library: torch.library.Library, op: torch._ops.OpOverload) -> None:
    """Lets calls of the op inside of ``torch.func``'s transforms raise, but those on plain tensors alone.

    The kernel that does so is asked inside of transforms only: other calls pay nothing.
    """
    library.impl(op, partial(_call_inside_transform, op), TRANSFORMS_KEY)


def _call_inside_transform(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    names = (argument.name for argument in op._schema.arguments)
    for name, x in {**dict(zip(names, args, strict=False)), **kwargs}.items():
        if any(map(is_transformed, _tensors_among((x,)))):
            raise RuntimeError(
                f"{op.name()} serves inference and has no rule for torch.func's transforms (grad, jvp, vmap, "
                f"...), but its {name} comes from inside of one; call the op outside of the transform"
            )
    with outside_transforms():
        return op(*args, **kwargs)


def _tensors_among(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Those in lists too."""
    for x in arguments:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list):
            yield from x
