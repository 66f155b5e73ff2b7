"""The ops that models emit: run on the backend selected for their arguments, or swapped for its own."""

from __future__ import annotations

from functools import partial

from attnbackend.ops.bind import check_attention_call, check_update_call, run_attention, run_update
from attnbackend.ops.library import ATTENTION, KV_CACHE_UPDATE, define_op

__all__ = ["attention", "kv_cache_update"]

attention = define_op(
    "attention", ATTENTION, partial(run_attention, None), partial(check_attention_call, None)
)
kv_cache_update = define_op(
    "kv_cache_update", KV_CACHE_UPDATE, partial(run_update, None), partial(check_update_call, None)
)
