"""torch's own checks of every op, and the state audit that they lack."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from op_cases import DENSE_BACKENDS, DEVICE, case, forward_op, require, update_op

from attnbackend.testing import (
    AllowedArgument,
    AttentionCase,
    AuditLedger,
    PagedBatch,
    kv_update_kwargs,
    kv_update_positional,
    make_batch,
    op_kwargs,
    op_positional,
)

OPCHECK_CASES = {
    "everything_given": case("window_cap_and_sinks", use_alibi=True),
    "nothing_given": case("no_lse"),
    "one_token": case("plain", "one_token"),
    "padded": case("plain", "padded"),
    "zero_length_rows": case("plain", "empty_row_first"),
    "hnd": case("hnd", "decode"),
    "layers_interleaved": case("hnd_layers_interleaved", "decode"),
    "strided_tensors": case("strided_tensors", "decode"),
    "fp8_scales": case("fp8_per_head_scales", "decode"),
    "float16": case("plain", "decode", dtype=torch.float16),
    "chunks": case("chunks"),
    "ranges": case("ranges_over_window"),
    "encoder": case("encoder_window"),
    "cross": case("cross"),
}
EXCUSED = [
    AllowedArgument(name, "test_ops_quantization.py audits calls with it")
    for name in ("q_scale", "output_scale", "output_block_scale")
]
OPS = ("agnostic", *DENSE_BACKENDS)


def _for_opcheck(attention_case: AttentionCase) -> PagedBatch:
    """opcheck compares tensors by value, so none may hold NaN, nor be float8, which torch cannot compare."""
    batch = make_batch(attention_case, DEVICE)
    if batch.kv_cache.dtype.itemsize == 1:
        batch = replace(batch, kv_cache=batch.kv_cache.view(torch.uint8))
        batch.kv_cache.clamp_(max=0x70)
    for x in (batch.kv_cache, batch.query, batch.key, batch.value, batch.output, batch.lse):
        if x is not None and x.is_floating_point():
            x.copy_(x.nan_to_num(0.5))
    return batch


@pytest.mark.parametrize("name", OPCHECK_CASES)
@pytest.mark.parametrize("backend", OPS)
def test_opcheck_passes_for_forward(backend: str, name: str) -> None:
    if backend != "agnostic":
        require(backend)
    batch = _for_opcheck(OPCHECK_CASES[name])
    torch.library.opcheck(forward_op(backend), op_positional(batch), op_kwargs(batch))


@pytest.mark.parametrize(
    "name", ["nothing_given", "padded", "hnd", "layers_interleaved", "fp8_scales", "one_token"]
)
@pytest.mark.parametrize("backend", OPS)
def test_opcheck_passes_for_cache_writes(backend: str, name: str) -> None:
    if backend != "agnostic":
        require(backend)
    batch = _for_opcheck(OPCHECK_CASES[name])
    torch.library.opcheck(update_op(backend), kv_update_positional(batch), kv_update_kwargs(batch))


@pytest.mark.parametrize("backend", OPS)
def test_state_audit_passes_for_forward(backend: str) -> None:
    if backend != "agnostic":
        require(backend)
    ledger, op = AuditLedger(excuse=EXCUSED), forward_op(backend)
    for attention_case in OPCHECK_CASES.values():
        batch = make_batch(attention_case, DEVICE)
        ledger.audit(op, op_positional(batch), op_kwargs(batch))
    ledger.verdict(op).assert_ok()


@pytest.mark.parametrize("backend", OPS)
def test_state_audit_passes_for_cache_writes(backend: str) -> None:
    if backend != "agnostic":
        require(backend)
    ledger, op = AuditLedger(), update_op(backend)
    for name in ("nothing_given", "padded", "layers_interleaved", "fp8_scales"):
        unwritten = replace(OPCHECK_CASES[name], new_tokens_written=False)
        batch = make_batch(unwritten, DEVICE)
        ledger.audit(op, kv_update_positional(batch), kv_update_kwargs(batch))
    ledger.verdict(op).assert_ok()
