"""One batch's contents in another's memory: what a later step finds, and what a graph replays on."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from attnbackend.testing.conformance.base_subject import Batch

__all__ = ["copy_bits", "put_in"]


def put_in(memory: Batch, contents: Batch, keep: tuple[str, ...] = ()) -> Batch:
    """``contents`` in the tensors of ``memory``; those named in ``keep`` stay where they are."""
    found: dict[str, Any] = {}
    source: Any = contents
    for name in (field.name for field in fields(source) if field.name not in keep):
        target, own = getattr(memory, name), getattr(contents, name)
        if isinstance(target, Tensor):
            copy_bits(target, own)
            found[name] = target
    exchanged: Batch = replace(source, **found)
    return exchanged


def copy_bits(target: Tensor, source: Tensor) -> None:
    """In place; through bytes where torch cannot copy the type everywhere."""
    if source.dtype.itemsize == 1:
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)
