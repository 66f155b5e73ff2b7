"""The real language model of slow tests, loaded once a process, and what transformers makes of a prompt."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

REFERENCE_ATTENTION = "eager"


class LanguageModel(NamedTuple):
    model: Any
    tokenizer: Any


@cache
def smollm() -> LanguageModel:
    """SmolLM2-135M-Instruct in float32; skips the test where its package is not installed."""
    pytest.importorskip("transformers")
    from attnbackend.integrations.loading import load_model

    try:
        loaded = load_model(None, device="cpu", dtype="float32")
    except (FileNotFoundError, ImportError) as error:
        pytest.skip(str(error))
    return LanguageModel(loaded.model, loaded.tokenizer)


@cache
def greedy_reference(prompt: str, max_tokens: int) -> list[int]:
    """transformers' own greedy tokens for one prompt, going on after end-of-sequence tokens.

    Takes the model from the engine that served it last.
    """
    model, tokenizer = smollm()
    prompt_ids = tokenizer.encode(prompt)
    model.set_attn_implementation(REFERENCE_ATTENTION)
    ids = torch.tensor([prompt_ids])
    stop, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    finally:
        model.generation_config.eos_token_id = stop
    generated: list[int] = tokens[0, len(prompt_ids) :].tolist()
    assert len(generated) == max_tokens
    return generated
