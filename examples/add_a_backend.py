"""A backend of your own: one class. Its op, fake and place in the selection come by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnbackend import AttentionImpl, MultipleOf, OptionalTensors, register_backend
from attnbackend.backends.standard import StandardCacheBackend
from attnbackend.testing import (
    AttentionCase,
    assert_attention_within_rule,
    make_batch,
    op_kwargs,
    op_positional,
)


class LoopImpl(AttentionImpl):
    """Attention of one token after the other, as plainly as it can be said."""

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, tensors: OptionalTensors,
    ) -> None:  # fmt: skip
        output.zero_()
        batch, size = attn_metadata.common, self.params.block_size
        groups = self.params.num_heads // self.params.num_kv_heads
        starts, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        for row, length in enumerate(lens):
            for token in range(starts[row], starts[row + 1]):
                seen = length - (starts[row + 1] - token) + 1
                if seen <= 0:
                    continue
                pages = kv_cache[batch.block_table[row, : -(-seen // size)]]
                k, v = (pages[:, side].flatten(0, 1)[:seen].repeat_interleave(groups, 1) for side in (0, 1))
                weights = (torch.einsum("hd,lhd->hl", query[token], k) * self.params.scale).softmax(-1)
                output[token] = torch.einsum("hl,lhd->hd", weights, v)


@register_backend()
class LoopBackend(StandardCacheBackend):
    supported_dtypes = (torch.float32,)
    supported_head_sizes = (MultipleOf(8),)
    supported_block_sizes = (MultipleOf(16),)
    supported_device_types = ("cpu",)

    @staticmethod
    def get_name() -> str:
        return "LOOP"

    @staticmethod
    def get_impl_cls() -> type[LoopImpl]:
        return LoopImpl


def main() -> None:
    case = AttentionCase(query_lens=(1, 5, 0), context_lens=(20, 0, 3), num_padded_rows=2, lse=False)
    batch = make_batch(case)
    op = torch.ops.attnbackend.loop_forward.default
    op(*op_positional(batch), **op_kwargs(batch))
    (report, *_) = assert_attention_within_rule(batch)
    print(report)
    torch.library.opcheck(op, *without_nan(case))
    print("opcheck passed:", op)


def without_nan(case: AttentionCase) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The kit poisons what must not be read; opcheck compares by value, which NaN would break."""
    batch = make_batch(case)
    for tensor in (batch.kv_cache, batch.output):
        tensor.nan_to_num_(0.0)
    return op_positional(batch), op_kwargs(batch)


if __name__ == "__main__":
    main()
