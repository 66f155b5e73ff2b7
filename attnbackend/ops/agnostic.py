"""The ops that models emit: run on the backend selected for their arguments, or swapped for its own."""

from __future__ import annotations

from functools import partial

from attnbackend.ops.bind import check_attention_call, check_update_call, run_attention, run_update
from attnbackend.ops.library import (
    ATTENTION,
    KV_CACHE_UPDATE,
    MLA_ATTENTION,
    MLA_CACHE_UPDATE,
    MLA_MIXED,
    define_op,
)
from attnbackend.ops.mla_bind import (
    check_mixed_call,
    check_mla_update_call,
    check_mqa_call,
    run_mixed,
    run_mla_update,
    run_mqa,
)

__all__ = ["attention", "kv_cache_update", "mla_attention", "mla_kv_cache_update", "mla_mixed_attention"]

attention = define_op(
    "attention", ATTENTION, partial(run_attention, None), partial(check_attention_call, None)
)
kv_cache_update = define_op(
    "kv_cache_update", KV_CACHE_UPDATE, partial(run_update, None), partial(check_update_call, None)
)
mla_attention = define_op(
    "mla_attention", MLA_ATTENTION, partial(run_mqa, None), partial(check_mqa_call, None)
)
mla_mixed_attention = define_op(
    "mla_mixed_attention", MLA_MIXED, partial(run_mixed, None), partial(check_mixed_call, None)
)
mla_kv_cache_update = define_op(
    "mla_kv_cache_update",
    MLA_CACHE_UPDATE,
    partial(run_mla_update, None),
    partial(check_mla_update_call, None),
)
