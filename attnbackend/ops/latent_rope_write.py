"""`rope_mla_kv_cache_update`: queries and keys of latent attention rotated, and their rows cached, as one op.

Passes put it where a model does these one after another. It writes the latent cache as all writers do, so
any backend over that cache reads what it wrote.

Shape legend: T tokens, H query heads, L kv_lora_rank, R qk_rope_head_dim.
"""

from __future__ import annotations

from torch import Tensor

from attnbackend.kernels import triton as kernels
from attnbackend.ops import mla_checks as checks
from attnbackend.ops.binding import typed_cache
from attnbackend.ops.library import NAMESPACE, define_function
from attnbackend.ops.mla_calls import MLACacheUpdateCall

__all__ = ["rope_mla_kv_cache_update"]

_SCHEMA = (
    "(Tensor query_rope, Tensor latent, Tensor k_pe, Tensor cos, Tensor sin, Tensor(a!) kv_cache, "
    "Tensor slot_mapping, *, bool interleaved, Tensor? weight=None, float eps=0.0, Tensor? k_scale=None, "
    'str kv_cache_dtype="auto", int group=-1) -> (Tensor, Tensor, Tensor)'
)
"""query_rope [T, H, R], latent [T, L], k_pe [T, R], cos and sin [T, R / 2], weight [L] of the latent's RMS
norm, and the rest as `mla_kv_cache_update`. Pairs that turn are (2i, 2i + 1) where interleaved, else
(i, i + R / 2). Returns the rotated query and key, first elements of all pairs before second ones, and the
normalised latent, which is empty without a weight; all contiguous, of all rows, whatever the slot."""


def _check(
    query_rope: Tensor, latent: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor,
    slot_mapping: Tensor, weight: Tensor | None, k_scale: Tensor | None, kv_cache_dtype: str,
) -> None:  # fmt: skip
    call = MLACacheUpdateCall(latent, k_pe, kv_cache, slot_mapping, k_scale, kv_cache_dtype)
    checks.check_mla_update(call)
    checks.check_same_rows(call)
    if reason := kernels.unavailable_reason(latent.device.type):
        raise ValueError(f"rope_mla_kv_cache_update runs on Triton alone, and {reason}; leave its pass out")
    tokens, rope = k_pe.shape
    if query_rope.dim() != 3 or query_rope.shape[0] != tokens or query_rope.shape[2] != rope:
        allowed = f"({tokens}, num_heads, {rope}), as k_pe"
        raise ValueError(f"shape of query_rope is {tuple(query_rope.shape)}; expected {allowed}")
    for name, angle in (("cos", cos), ("sin", sin)):
        if angle.dim() != 2 or angle.shape[0] != tokens or angle.shape[1] * 2 != rope:
            raise ValueError(f"shape of {name} is {tuple(angle.shape)}; expected ({tokens}, {rope} / 2)")
    if weight is not None and weight.shape != latent.shape[1:]:
        raise ValueError(f"shape of weight is {tuple(weight.shape)}; expected {tuple(latent.shape[1:])}")


def _run(
    query_rope: Tensor, latent: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor,
    slot_mapping: Tensor, *, interleaved: bool, weight: Tensor | None = None, eps: float = 0.0,
    k_scale: Tensor | None = None, kv_cache_dtype: str = "auto", group: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q_out, k_out, kv_c = _fake(
        query_rope, latent, k_pe, cos, sin, kv_cache, slot_mapping, interleaved=interleaved, weight=weight,
        k_scale=k_scale, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    kernels.latent_rope_write(
        query_rope, latent, k_pe, cos, sin, q_out, k_out, None if weight is None else kv_c,
        typed_cache(kv_cache, kv_cache_dtype), slot_mapping, interleaved=interleaved, weight=weight, eps=eps,
        k_scale=k_scale,
    )  # fmt: skip
    return q_out, k_out, kv_c


def _fake(
    query_rope: Tensor, latent: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor,
    slot_mapping: Tensor, *, interleaved: bool, weight: Tensor | None = None, eps: float = 0.0,
    k_scale: Tensor | None = None, kv_cache_dtype: str = "auto", group: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check(query_rope, latent, k_pe, cos, sin, kv_cache, slot_mapping, weight, k_scale, kv_cache_dtype)
    kv_c = latent.new_empty(0 if weight is None else latent.shape)
    return query_rope.new_empty(query_rope.shape), k_pe.new_empty(k_pe.shape), kv_c


rope_mla_kv_cache_update = define_function(
    f"{NAMESPACE}::rope_mla_kv_cache_update", _SCHEMA, _run, _fake
)  # fmt: skip
