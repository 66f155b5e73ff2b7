"""What the caller has set in torch does not reach into an engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from model_zoo import make_model

from attnbackend import Engine, SamplingParams
from attnbackend.kernels.cpu._probe import unavailable_reason
from attnbackend.ops import cpu_linear

PROMPTS = [[3, 4, 5], [7], [9] * 20]
PARAMS = [SamplingParams(max_tokens=9, temperature=t, seed=1, ignore_eos=True) for t in (0.0, 0.8, 0.0)]


def tokens(engine: Engine) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    "setting",
    [lambda: torch.device("meta"), lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["default device", "autocast"],
)
@pytest.mark.parametrize("torch_multiplies", [False, True])
def test_settings_change_no_token(
    setting: Callable[[], AbstractContextManager[object]],
    torch_multiplies: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch_multiplies:
        monkeypatch.setattr(cpu_linear, "WHEN_USED", [])
    model = make_model("llama")
    engine = Engine(model, num_blocks=50, compile=False)
    expected = tokens(engine)
    with setting():
        assert tokens(engine) == expected
        assert tokens(Engine(model, num_blocks=50, compile=False)) == expected


def test_the_kernels_trial_is_made_on_the_cpu() -> None:
    with torch.device("meta"):
        assert unavailable_reason.__wrapped__() == unavailable_reason()
