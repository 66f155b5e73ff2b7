"""Reference attention, tolerances, test batches and audits: for this project's tests and others'.

Independent of every backend and kernel.
"""

from __future__ import annotations

from attnbackend.testing.audit_ledger import AllowedArgument, AuditLedger, LedgerVerdict
from attnbackend.testing.batches import (
    PagedBatch,
    expected_attention,
    expected_kv_cache,
    kv_update_kwargs,
    kv_update_positional,
    make_batch,
    op_kwargs,
    op_positional,
    yardstick_attention,
)
from attnbackend.testing.cases import AttentionCase
from attnbackend.testing.judgement import assert_attention_within_rule
from attnbackend.testing.reference import plain_torch_attention, reference_attention
from attnbackend.testing.reference_cache import reference_kv_cache_update, store_in_format
from attnbackend.testing.reference_merge import reference_merge_states
from attnbackend.testing.state_audit import AllowedWrite, AuditReport, Fault, Finding, audit_op
from attnbackend.testing.tolerance import RuleReport, assert_within_rule, assert_within_spread, ulp_at

__all__ = [
    "AllowedArgument",
    "AllowedWrite",
    "AttentionCase",
    "AuditLedger",
    "AuditReport",
    "Fault",
    "Finding",
    "LedgerVerdict",
    "PagedBatch",
    "RuleReport",
    "assert_attention_within_rule",
    "assert_within_rule",
    "assert_within_spread",
    "audit_op",
    "expected_attention",
    "expected_kv_cache",
    "kv_update_kwargs",
    "kv_update_positional",
    "make_batch",
    "op_kwargs",
    "op_positional",
    "plain_torch_attention",
    "reference_attention",
    "reference_kv_cache_update",
    "reference_merge_states",
    "store_in_format",
    "ulp_at",
    "yardstick_attention",
]
