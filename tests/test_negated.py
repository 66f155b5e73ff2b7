"""Views whose numbers lie in memory with the other sign, as parts of conjugates: read, not written."""

from __future__ import annotations

import pytest
import torch
from op_cases import case, forward_op, require
from torch import Tensor

from attnbackend.ops.merged_linear import merged_linear
from attnbackend.testing import make_batch, op_kwargs, op_positional


def negated(x: Tensor) -> Tensor:
    """The same numbers as ``x``."""
    return torch._neg_view(-x)


@pytest.mark.parametrize("name", ["CPU_ATTN", "TORCH_SDPA"])
def test_they_are_read_and_written_ones_are_refused(name: str) -> None:
    require(name, device_type="cpu")
    batch, op = make_batch(case("plain", "decode"), "cpu"), forward_op(name)
    arguments, more = op_positional(batch), op_kwargs(batch)
    with torch.no_grad():
        op(*arguments, **more)
        expected = batch.output.clone()
        batch.poison_outputs()
        op(negated(batch.query), *arguments[1:], **more)
        assert torch.equal(batch.output, expected)
        for written in ({"output": negated(batch.output)}, {"lse": negated(batch.lse)}):
            arguments_by_name = dict(zip((a.name for a in op._schema.arguments), arguments, strict=False))
            with pytest.raises(ValueError, match=f"{next(iter(written))} of attnbackend::.* is written"):
                op(**arguments_by_name | more | written)
        assert torch.equal(batch.output, expected)


def test_they_are_read_from_lists() -> None:
    x, weight = torch.ones(2, 8), torch.ones(3, 8)
    with torch.no_grad():
        assert torch.equal(merged_linear(x, [negated(weight)], []), torch.full((2, 3), 8.0))
