"""The only place that touches private torch APIs. ``tests/test_torch_compat.py`` fails when one moves."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

__all__ = ["FakeTensor", "FUNCTIONALIZED", "outside_fake_mode"]

FUNCTIONALIZED = (auto_functionalized, auto_functionalized_v2)
"""Wrappers that AOTAutograd and export put around an op that writes its arguments."""


def outside_fake_mode() -> AbstractContextManager[object]:
    """Real tensors inside the ``with`` block, also while a model is being traced."""
    return unset_fake_temporarily()
