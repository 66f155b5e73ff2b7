"""Eager calls that are told by one comparison from those before: what counts as another call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnbackend import resolve_backend, set_config
from attnbackend.ops import bind
from attnbackend.ops.generate import backend_op
from attnbackend.ops.library import ATTENTION


class Calls:
    """Calls of one op on two requests, and how many of them were found among recent ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        resolve_backend("TORCH_SDPA")
        self.op = backend_op("TORCH_SDPA", ATTENTION)
        self.cache = torch.randn(6, 2, 16, 2, 32)
        self.table = torch.arange(1, 5, dtype=torch.int32).view(2, 2)
        self.found = 0
        find = bind._RECENT.find

        def counted(*args: Any) -> Any:
            bound = find(*args)
            self.found += bound is not None
            return bound

        monkeypatch.setattr(bind._RECENT, "find", counted)

    def run(self, tokens: int = 2, dtype: torch.dtype = torch.float32, **changes: Any) -> Tensor:
        output = torch.full((tokens, 4, 32), float("nan"), dtype=dtype)
        starts = torch.tensor([0, tokens - 1, tokens], dtype=torch.int32)
        given: dict[str, Any] = {
            "query": torch.randn(tokens, 4, 32).to(dtype), "key": None, "value": None,
            "kv_cache": self.cache.to(dtype), "output": output, "query_start_loc": starts,
            "seq_lens": torch.tensor([20, 9], dtype=torch.int32), "block_table": self.table, "scale": 0.25,
        } | changes  # fmt: skip
        assert self.op is not None
        self.op(**given)
        assert given["output"].isfinite().all()
        return output


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_the_same_call_on_other_data_is_found(calls: Calls) -> None:
    calls.run()
    before = calls.found
    calls.run()
    with torch.inference_mode():
        calls.run()
        calls.run()
    calls.run(query=torch.randn(2, 4, 2, 32)[:, :, 0], output=torch.empty(4, 4, 32)[::2].fill_(float("nan")))
    assert calls.found == before + 3, "tensors of inference mode are of another kind once"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 3}, {"dtype": torch.float16}, {"scale": 0.5}, {"causal": False}, {"sliding_window": 3},
        {"logits_soft_cap": 9.0}, {"lse": torch.empty(2, 4)}, {"sinks": torch.zeros(4)},
        {"key": torch.zeros(2, 2, 32), "value": torch.zeros(2, 2, 32)},
    ],
    ids=lambda changes: ", ".join(changes),
)  # fmt: skip
def test_another_call_is_not(calls: Calls, changes: dict[str, Any]) -> None:
    bind._RECENT.forget()
    calls.run()
    before = calls.found
    calls.run(**changes)
    assert calls.found == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output": torch.empty(3, 4, 32)}, "rows of output is 3"),
        ({"query": torch.randn(2, 4, 64)[..., ::2]}, "query"),
        ({"query": torch.randn(2, 4, 32).double()}, "dtype"),
        ({"seq_lens": torch.tensor([20, 9, 1], dtype=torch.int32)}, "block_table"),
        ({"value": torch.randn(2, 2, 32)}, "only one of the two"),
        ({"query": torch.randn(2, 4, 32, requires_grad=True)}, "grad"),
    ],
    ids=["rows", "strides", "type", "requests", "no key", "gradients"],
)
def test_what_is_refused_is_refused_after_a_call_like_it(
    calls: Calls, changes: dict[str, Any], words: str
) -> None:
    calls.run()
    calls.run()
    with pytest.raises((ValueError, RuntimeError), match=words):
        calls.run(**changes)


def test_choices_hold_at_once(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = torch.full((2, 2), 99, dtype=torch.int32)
    calls.run()
    calls.run()
    with set_config(debug=True), pytest.raises(ValueError, match="block_table"):
        calls.run(block_table=bad)
    monkeypatch.setenv("ATTNBACKEND_DEBUG", "1")
    with pytest.raises(ValueError, match="block_table"):
        calls.run(block_table=bad)
    monkeypatch.delenv("ATTNBACKEND_DEBUG")
    before = calls.found
    calls.run()
    calls.run()
    assert calls.found == before + 2, "all is chosen as at first"
