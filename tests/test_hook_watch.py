"""Hooks and projections that change while an engine serves are noticed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from latent_zoo import make_latent_model
from tiny_models import greedy_tokens, tiny_model

from attnbackend import Engine, SamplingParams
from attnbackend.compiler import make_compiler
from attnbackend.integrations import transformers as integration
from attnbackend.integrations.hook_watch import HookWatch

PROMPT = [3, 4, 5, 6, 7]


def negative(module: nn.Module, args: Any, output: Any) -> Any:
    return -output


def tokens(engine: Engine) -> list[int]:
    return engine.generate([PROMPT], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids


def test_hooks_that_come_or_go_are_noticed_until_they_are_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    known = model[0].register_forward_pre_hook(lambda module, args: None)
    watch = HookWatch(model, model[:2])
    model[2].register_forward_hook(negative)
    assert watch.changed() is None
    for register in (model[1].register_forward_hook, model[1].register_forward_pre_hook):
        new = register(negative)
        assert watch.changed() is watch.changed() is model[1]
        new.remove()
        assert watch.changed() is None
    known.remove()
    assert watch.changed() is model[0]


def test_a_compiled_engine_refuses_hooks_that_it_would_not_run(
    monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    """Hidden states may be asked for at any time, which has transformers add hooks of its own."""
    monkeypatch.setattr(integration, "make_compiler", partial(make_compiler, compiler="aot_eager"))
    model = tiny_model().requires_grad_(False)
    expected = greedy_tokens(model, PROMPT, 6)
    ask = partial(model, input_ids=torch.tensor([PROMPT]), output_hidden_states=True)
    assert len(ask().hidden_states) == 3
    engine = Engine(model, num_blocks=12)
    for _ in range(2):
        assert tokens(engine) == expected
        assert len(ask().hidden_states) == 3
    hook = model.model.layers[0].mlp.register_forward_hook(negative)
    with pytest.raises(RuntimeError, match=r"forward hooks of model\.layers\.0\.mlp changed"):
        tokens(engine)
    hook.remove()
    assert tokens(engine) == expected


def test_replaced_projections_of_latent_attention_are_refused() -> None:
    model = make_latent_model("deepseek_v2")
    engine, attention = Engine(model, num_blocks=12, compile=False), model.model.layers[1].self_attn
    expected, before = tokens(engine), attention.q_b_proj
    attention.q_b_proj = nn.Sequential(before)
    with pytest.raises(RuntimeError, match=r"q_b_proj of model\.layers\.1\.self_attn was replaced"):
        tokens(engine)
    attention.q_b_proj = before
    hook = attention.kv_b_proj.register_forward_hook(negative)
    with pytest.raises(RuntimeError, match=r"forward hooks of model\.layers\.1\.self_attn\.kv_b_proj"):
        tokens(engine)
    hook.remove()
    assert tokens(engine) == expected
