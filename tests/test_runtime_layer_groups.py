"""How a runner groups a model's layers: shared caches, and kinds of attention that it does not serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from attnbackend import AttentionSelectorConfig, kv_cache
from attnbackend.layers import BoundLayer
from attnbackend.runtime import cache_memory, model_runner
from attnbackend.runtime.model_runner import build_runner
from attnbackend.runtime.served_model import AttentionLayer
from attnbackend.selector import Selection, select_backend


class Layers:
    """As much of a `ServedModel` as a runner asks for before it runs."""

    vocab_size, max_model_len, dtype, device = 10, 64, torch.float32, torch.device("cpu")

    def __init__(self, **layers: AttentionLayer) -> None:
        self.layers, self.bound = layers, dict[str, BoundLayer]()

    def attention_layers(self) -> Mapping[str, AttentionLayer]:
        return self.layers

    def bind(self, layers: Mapping[str, BoundLayer]) -> None:
        self.bound = dict(layers)

    def compile(self, backend: str | None, *, in_pieces: bool = False) -> None: ...

    def forward(self, *args: Any) -> None: ...


def layer(target: str | None = None, scale: float = 1.0, **features: Any) -> AttentionLayer:
    config = AttentionSelectorConfig.dense(
        device_type="cpu", head_size=32, num_heads=2, num_kv_heads=2, dtype=torch.float32, **features
    )
    return AttentionLayer(config, scale, target)


def runner_of(model: Layers, **options: Any) -> Any:
    return build_runner(model, **{"backend": "TORCH_SDPA", "num_blocks": 8, "compile": False} | options)


def test_layers_that_share_have_one_cache_which_the_owner_alone_writes() -> None:
    """The third shares by way of the second, and with another scale it is in a group of its own."""
    model = Layers(a=layer(), b=layer("a"), c=layer("b", scale=2.0), d=layer())
    runner = runner_of(model)
    assert [group.layers for group in runner.groups] == [("a", "b", "d"), ("c",)]
    assert [group.owning_layers for group in runner.groups] == [("a", "d"), ()]
    caches = {name: bound.kv_cache.data_ptr() for name, bound in model.bound.items()}
    assert caches["a"] == caches["b"] == caches["c"] != caches["d"]
    assert {name: bound.writes_cache for name, bound in model.bound.items()} == {
        "a": True, "b": False, "c": False, "d": True
    }  # fmt: skip


def test_memory_is_counted_for_caches_and_not_for_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    page = 16 * 2 * 2 * 32 * 4
    monkeypatch.setattr(cache_memory, "free_memory", lambda device: 4 * 10 * page)
    alone, shared = Layers(a=layer(), b=layer()), Layers(a=layer(), b=layer("a"))
    assert runner_of(alone, num_blocks=None).num_blocks == 5
    assert runner_of(shared, num_blocks=None).num_blocks == 10
    monkeypatch.setattr(kv_cache, "most_memory", lambda device: 10 * page)
    assert runner_of(alone, num_blocks=5).num_blocks == 5
    with pytest.raises(ValueError, match=rf"num_blocks=6 of {2 * page} bytes take .*at most 5 blocks"):
        runner_of(alone, num_blocks=6)


CHAINS = {
    "a circle": ({"a": layer("b"), "b": layer("a")}, r"share caches in a circle: a -> b -> a"),
    "an unknown layer": ({"a": layer("z")}, r"unknown layer 'z'"),
    "another spec": ({"a": layer(), "b": layer("a", sliding_window=4)}, r"'b' cannot share the cache of 'a'"),
    "an encoder's layer": (
        {"a": layer(attn_type="encoder_only", causal=False)},
        r"layer 'a' has attn_type=encoder_only; the engine serves layers of attn_type=decoder alone",
    ),
    "cross attention": (
        {"a": layer(attn_type="encoder_decoder", causal=False)},
        r"attn_type=encoder_decoder",
    ),
    "a decoder that looks ahead": ({"a": layer(causal=False)}, r"layer 'a' has causal=False"),
    "ranges": ({"a": layer(has_bidirectional_ranges=True)}, r"has_bidirectional_ranges=True"),
}


@pytest.mark.parametrize("what", CHAINS)
def test_layers_that_cannot_be_served_are_refused(what: str) -> None:
    layers, message = CHAINS[what]
    with pytest.raises(ValueError, match=message):
        runner_of(Layers(**layers))


def test_layers_on_two_backends_share_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_scale(config: AttentionSelectorConfig, *, backend: str | None = None) -> Selection:
        return select_backend(config, backend="TRITON_ATTN" if config.logits_soft_cap else "TORCH_SDPA")

    monkeypatch.setattr(model_runner, "select_backend", by_scale)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = Layers(a=layer(), b=layer("a", logits_soft_cap=3.0))
    with pytest.raises(ValueError, match=r"on different backends, TRITON_ATTN and TORCH_SDPA; name one"):
        runner_of(model, backend=None)
