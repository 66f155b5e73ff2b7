"""`rope_kv_cache_update`: queries and keys normalised, rotated, and written to the cache, as one op.

Passes put it where a model does these one after another. It writes the standard cache, as all of the
project's writers do, so any backend over that cache reads what it wrote.

Shape legend: T tokens, H query heads, K key-value heads, D head size, R rotated elements of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnbackend._torch_compat import outside_fake_mode
from attnbackend.kernels import cpu, triton
from attnbackend.ops import checks
from attnbackend.ops.bind import cache_dims
from attnbackend.ops.binding import typed_cache
from attnbackend.ops.calls import KVCacheUpdateCall
from attnbackend.ops.library import NAMESPACE, define_function

__all__ = ["ROPE_SCHEMA", "rope_kv_cache_update", "rope_problem", "update"]

ROPE_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor(a!) kv_cache, "
    "Tensor slot_mapping, *, Tensor? q_weight=None, Tensor? k_weight=None, float q_eps=0.0, "
    'float k_eps=0.0, Tensor? k_scale=None, Tensor? v_scale=None, str kv_cache_dtype="auto", '
    "int group=-1) -> (Tensor, Tensor)"
)
"""query [T, H, D], key and value [T, K, D], cos and sin [T, R], weights [D] of the heads' RMS norms, and the
rest as `kv_cache_update`. Returns the rotated query and key, contiguous: all rows, whatever the slot."""


def rope_problem(device_type: str) -> str | None:
    """Why no kernel rotates and writes on such devices; None: one does, on CPUs in C++, on GPUs in Triton."""
    with outside_fake_mode():
        in_triton = triton.unavailable_reason(device_type)
        return cpu.unavailable_reason() if in_triton and device_type == "cpu" else in_triton


def _kernel(device_type: str) -> Callable[..., None]:
    in_cpp = device_type == "cpu" and cpu.unavailable_reason() is None
    return cpu.rope_cache_write if in_cpp else triton.rope_cache_write


def _check(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor,
    slot_mapping: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, k_scale: Tensor | None,
    v_scale: Tensor | None, kv_cache_dtype: str,
) -> None:  # fmt: skip
    call = KVCacheUpdateCall(key, value, kv_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype)
    checks.check_update(call, cache_dims(None, kv_cache, kv_cache_dtype))
    checks.check_update_tokens(call)
    if reason := rope_problem(query.device.type):
        raise ValueError(f"rope_kv_cache_update has no kernel here: {reason}; leave its pass out")
    if query.shape[0] != key.shape[0] or query.shape[2] != key.shape[2]:
        raise ValueError(f"shape of query is {tuple(query.shape)}; expected tokens and head size of key")
    for name, angle in (("cos", cos), ("sin", sin)):
        if angle.dim() != 2 or angle.shape[0] != key.shape[0] or angle.shape[1] > key.shape[2]:
            allowed = f"({key.shape[0]}, up to head size {key.shape[2]})"
            raise ValueError(f"shape of {name} is {tuple(angle.shape)}; expected {allowed}")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != key.shape[2:]:
            raise ValueError(f"shape of {name} is {tuple(weight.shape)}; expected {tuple(key.shape[2:])}")


def update(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor,
    slot_mapping: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None, q_eps: float = 0.0,
    k_eps: float = 0.0, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto", group: int = -1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op, in Python."""
    outputs = _fake(
        query, key, value, cos, sin, kv_cache, slot_mapping, q_weight, k_weight, q_eps, k_eps, k_scale,
        v_scale, kv_cache_dtype,
    )  # fmt: skip
    key_cache, value_cache = typed_cache(kv_cache, kv_cache_dtype).unbind(1)
    _kernel(query.device.type)(
        query, key, value, cos, sin, *outputs, key_cache, value_cache, slot_mapping, q_weight=q_weight,
        k_weight=k_weight, q_eps=q_eps, k_eps=k_eps, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    return outputs


def _fake(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor,
    slot_mapping: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None, q_eps: float = 0.0,
    k_eps: float = 0.0, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto", group: int = -1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(
        query, key, value, cos, sin, kv_cache, slot_mapping, q_weight, k_weight, k_scale, v_scale,
        kv_cache_dtype,
    )  # fmt: skip
    return query.new_empty(query.shape), key.new_empty(key.shape)


rope_kv_cache_update: torch._ops.OpOverload = define_function(
    f"{NAMESPACE}::rope_kv_cache_update", ROPE_SCHEMA, update, _fake
)
