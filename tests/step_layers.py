"""Layers of a step that share a plan, for tests of calls that skip Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from op_cases import case as case_of
from op_cases import forward_op
from test_bad_input import NAMES
from torch import Tensor

from attnbackend import AttentionParams, CommonAttentionMetadata, ForwardContext, resolve_backend
from attnbackend.kv_cache import spec_of
from attnbackend.metadata import BatchLimits
from attnbackend.testing import PagedBatch, make_batch, op_kwargs, op_positional

__all__ = ["attend", "layer", "other_layer", "planned", "twin"]


def planned(
    batch: PagedBatch, backend: str = "FAKE_FLASH", *, captured: bool = False, **changes: Any
) -> ForwardContext:  # fmt: skip
    """The context of a step whose plan was made from the batch's tensors."""
    device = batch.query.device
    case = batch.case
    params = AttentionParams(
        num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_size=case.head_size, dtype=case.dtype,
        kv_cache_dtype=case.kv_cache_dtype, block_size=case.block_size, device_type=device.type,
        scale=case.softmax_scale, causal=case.causal, sliding_window=case.sliding_window,
        logits_soft_cap=case.logits_soft_cap,
    )  # fmt: skip
    limits = BatchLimits(16, 64, 256)
    builder = resolve_backend(backend).get_builder_cls()(params, spec_of(params), limits, device)
    common = CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc, seq_lens=batch.seq_lens, block_table=batch.block_table,
        num_reqs=len(batch.case.query_lens), num_actual_tokens=batch.query.shape[0],
        max_query_len=max(batch.case.query_lens), max_seq_len=max(batch.case.seq_lens),
        causal=batch.case.causal, query_start_loc_cpu=batch.query_start_loc.cpu(),
        seq_lens_cpu=batch.seq_lens.cpu(),
    ).replace(**changes)  # fmt: skip
    plan = builder.build_for_cudagraph_capture(common) if captured else builder.build(0, common)
    return ForwardContext({(0, backend): plan})


def attend(batch: PagedBatch, backend: str = "FAKE_FLASH", **changes: Any) -> Tensor:
    """A copy of what the op writes to poisoned memory."""
    batch.poison_outputs()
    arguments = dict(zip(NAMES, op_positional(batch), strict=True)) | op_kwargs(batch) | {"group": 0}
    forward_op(backend)(**arguments | changes)
    return batch.output.clone()


def layer(
    name: str = "no_lse", batch: str = "decode", device: str = "cpu", **changes: Any
) -> PagedBatch:  # fmt: skip
    return make_batch(case_of(name, batch, **{"lse": False, "dtype": torch.bfloat16, **changes}), device)


def twin(x: Tensor, factor: float) -> Tensor:
    """As x in memory of its own, all values times a factor."""
    storage = x.untyped_storage().clone()
    own = torch.empty(0, dtype=x.dtype, device=x.device).set_(
        storage, x.storage_offset(), x.shape, x.stride()
    )
    return own.mul_(factor)


def other_layer(batch: PagedBatch, factor: float) -> PagedBatch:
    """One of the same step: the batch's own tensors, all else elsewhere and with other values."""
    names = ("query", "key", "value", "kv_cache", "output")
    tensors: dict[str, Any] = {name: twin(getattr(batch, name), factor) for name in names}
    return replace(batch, **tensors)
