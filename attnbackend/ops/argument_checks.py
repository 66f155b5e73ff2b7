"""Checks of single arguments, shared by all roles of op: what is wrong, its value, what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from attnbackend.kv_cache import resolve_kv_cache_dtype

__all__ = [
    "check_cache",
    "check_contiguous_rows",
    "check_device",
    "check_factor",
    "check_has_dimensions",
    "check_no_grad",
    "check_query_start_loc",
    "check_scale",
    "check_tensor",
    "check_without_gaps",
    "fail",
    "first_place",
    "wants_grad",
]


def fail(what: str, got: Any, allowed: str) -> NoReturn:
    raise ValueError(f"{what} is {got}; expected {allowed}")


def check_tensor(
    what: str, x: Tensor | None, shape: Sequence[int | str], dtypes: Sequence[torch.dtype], like: Tensor
) -> None:  # fmt: skip
    """Checks an optional tensor; a string in ``shape`` names a dimension of any size."""
    if x is None:
        return
    if x.dim() != len(shape) or any(
        s != n for s, n in zip(x.shape, shape, strict=True) if not isinstance(n, str)
    ):
        fail(f"shape of {what}", tuple(x.shape), f"({', '.join(map(str, shape))})")
    if x.dtype not in dtypes:
        fail(f"dtype of {what}", x.dtype, " or ".join(map(str, dtypes)))
    if x.device != like.device:
        fail(f"device of {what}", x.device, f"{like.device}, where query and cache are")


def check_scale(what: str, scale: Tensor | None, num_kv_heads: int, like: Tensor) -> None:
    if scale is None:
        return
    if scale.numel() not in (1, num_kv_heads):
        fail(f"number of elements of {what}", scale.numel(), f"1 or num_kv_heads={num_kv_heads}")
    if scale.dtype != torch.float32 or scale.device != like.device:
        fail(what, f"{scale.dtype} on {scale.device}", f"torch.float32 on {like.device}")


def check_device(op: str, x: Tensor, others: Iterable[Tensor | None]) -> None:
    """Of fakes, which torch also runs where one tensor of several is on "meta": it would hold no numbers."""
    for other in others:
        if other is not None and other.device != x.device:
            fail(f"device of what {op} multiplies by", other.device, f"{x.device}, as its input")


def check_has_dimensions(call: Any) -> None:
    """Of all tensors of a call but scales of a cache, which may be numbers."""
    for what, x in call._asdict().items():
        if isinstance(x, Tensor) and not x.dim() and what not in ("k_scale", "v_scale"):
            fail(f"shape of {what}", (), "at least one dimension")


def check_contiguous_rows(what: str, x: Tensor | None) -> None:
    if x is not None and x.stride(-1) != 1:
        fail(f"last stride of {what}", x.stride(-1), f"1; call {what}.contiguous()")


def check_without_gaps(call: Any, names: Sequence[str]) -> None:
    """Kernels read these as they lie in memory; rows of a matrix may lie apart."""
    for what in names:
        x = getattr(call, what)
        if x is not None and x.dim() and x.stride(-1) != 1 and x.shape[-1] > 1:
            fail(f"last stride of {what}", x.stride(-1), f"1; call {what}.contiguous()")


def check_cache(kv_cache: Tensor, kv_cache_dtype: str, model_dtype: torch.dtype) -> None:
    """A float8 cache may come as the bytes that it consists of, which more of torch's own ops can take."""
    wanted = resolve_kv_cache_dtype(kv_cache_dtype, model_dtype)
    allowed = (wanted, torch.uint8) if wanted.itemsize == 1 else (wanted,)
    if kv_cache.dtype not in allowed:
        names = " or ".join(map(str, allowed))
        fail("dtype of kv_cache", kv_cache.dtype, f"{names} for kv_cache_dtype={kv_cache_dtype!r}")


def check_factor(scale: float) -> None:
    """Libraries' kernels mask keys before they multiply: a factor below 0 would let masked keys win."""
    if not 0 < scale < math.inf:
        fail("scale", scale, "a finite number above 0; multiply the query by any other")


def wants_grad(arguments: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


def check_no_grad(arguments: Iterable[Any]) -> None:
    if wants_grad(arguments):
        raise RuntimeError(
            "attnbackend's ops serve inference and have no backward, but an input requires grad; run the "
            "model under torch.inference_mode() or torch.no_grad()"
        )


def check_query_start_loc(
    starts: Tensor, tokens: int, name: str = "query_start_loc", rows: str = "query"
) -> None:
    """Debug: ``starts``, on the host, cuts ``tokens`` rows of ``rows`` in sequences."""
    if int(starts[0]) != 0:
        fail(f"{name}[0]", int(starts[0]), "0")
    if row := first_place(starts.diff() < 0):
        fail(f"{name}[{row[0] + 1}]", int(starts[row[0] + 1]), "no less than the one before it")
    if int(starts[-1]) > tokens:
        fail(f"{name}[-1]", int(starts[-1]), f"at most {tokens}, the rows of {rows}")


def first_place(wrong: Tensor) -> tuple[int, ...] | None:
    """Index of the first True, or None."""
    found = wrong.nonzero()
    return tuple(found[0].tolist()) if len(found) else None
