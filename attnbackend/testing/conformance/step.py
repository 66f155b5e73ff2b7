"""A write and a read of one cache as a module, for tracing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnbackend.testing.batches import PagedBatch, op_positional
from attnbackend.testing.conformance.subject import Subject

__all__ = ["Step", "StepTensors"]

StepTensors = dict[str, Tensor | None]


class Step(nn.Module):
    """Writes the new tokens with the subject's writer, attends with its forward op."""

    def __init__(self, subject: Subject, batch: PagedBatch) -> None:
        super().__init__()
        self.writes = batch.case.writes_new_tokens
        self.write, self.attend = subject.write, subject.forward
        kwargs = subject.forward_args(batch)[1]
        self.constants = {k: v for k, v in kwargs.items() if v is not None and not isinstance(v, Tensor)}

    @staticmethod
    def tensors(subject: Subject, batch: PagedBatch) -> StepTensors:
        """The inputs of `forward`, the cache a copy with the strides of the batch's."""
        buffer = batch.kv_buffer.clone()
        layer = batch.case.num_layers // 2
        names = ("query", "key", "value", "query_start_loc", "seq_lens", "block_table", "slot_mapping")
        optional = ("alibi_slopes", "sinks", "bidirectional_ranges", "k_scale", "v_scale")
        found: StepTensors = {name: getattr(batch, name) for name in (*names, *optional)}
        blocks = batch.kv_cache.shape[0]
        found["key"], found["value"] = op_positional(batch)[1:3]
        return {**found, "kv_cache": subject.cache(buffer[:blocks, layer])}

    def forward(self, x: dict[str, Any]) -> Tensor:
        """Output [T, H, D]; the cache in ``x`` is written."""
        scales = {name: x[name] for name in ("k_scale", "v_scale")}
        dtype = self.constants["kv_cache_dtype"]
        if self.writes:
            self.write(x["key"], x["value"], x["kv_cache"], x["slot_mapping"], **scales, kv_cache_dtype=dtype)
        query = x["query"]
        output = query.new_zeros(query.shape)
        self.attend(
            query, x["key"], x["value"], x["kv_cache"], output, x["query_start_loc"], x["seq_lens"],
            x["block_table"], alibi_slopes=x["alibi_slopes"], sinks=x["sinks"],
            bidirectional_ranges=x["bidirectional_ranges"], **scales, **self.constants,
        )  # fmt: skip
        return output
