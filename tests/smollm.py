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


def is_greedy(prompt: str, tokens: list[int], max_tokens: int) -> bool:
    """Whether these are transformers' own greedy tokens, going on after end-of-sequence tokens.

    One pass over all of them says so: each is what follows those before it, if those were right. Takes the
    model from the engine that served it last.
    """
    return len(tokens) == max_tokens and _followers(prompt, tuple(tokens)) == tokens


@cache
def _followers(prompt: str, tokens: tuple[int, ...]) -> list[int]:
    model, tokenizer = smollm()
    prompt_ids = tokenizer.encode(prompt)
    model.set_attn_implementation(REFERENCE_ATTENTION)
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + list(tokens)]), use_cache=False).logits[0]
    followers: list[int] = logits.argmax(-1)[len(prompt_ids) - 1 : -1].tolist()
    return followers
