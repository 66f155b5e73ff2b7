"""What is run: a real model with prompts, or a tiny random one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch

__all__ = ["Subject", "load_subject", "share_weights", "tiny_subject"]

_PROMPTS = (
    "The capital of France is",
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "A list of things to pack for a week in the mountains in October:",
    "What is the difference between a virus and a bacterium?",
    "Translate to German: I would like a table for two, please.",
    "def fibonacci(n):",
    "The three laws of thermodynamics say, in plain words, that",
)


@dataclass(frozen=True)
class Subject:
    """A causal language model in evaluation mode and prompts for it.

    Attributes:
        model: a transformers model on the CPU.
        name: for people.
        prompts: token ids, of different lengths.
        pad_token_id: what transformers pads a batch with.
    """

    model: Any
    name: str
    prompts: tuple[tuple[int, ...], ...]
    pad_token_id: int

    def take(self, count: int) -> list[list[int]]:
        """``count`` prompts, from the beginning again where there are fewer."""
        return [list(prompt) for prompt in islice(cycle(self.prompts), count)]


def load_subject(path: str | None) -> Subject:
    """The model at ``path``, or the packaged one; errors as `attnbackend.integrations.loading`."""
    from attnbackend.integrations.loading import load_model

    loaded = load_model(path, dtype=torch.float32, device="cpu")
    prompts = tuple(tuple(loaded.tokenizer.encode(text)) for text in _PROMPTS)
    pad = loaded.tokenizer.pad_token_id
    return Subject(loaded.model, loaded.name, prompts, 0 if pad is None else int(pad))


def tiny_subject() -> Subject:
    """Two layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        prompts = tuple(tuple(torch.randint(3, 512, (5 + n,)).tolist()) for n in range(8))
    return Subject(model.eval(), "tiny random Llama", prompts, 0)


def share_weights(model: Any) -> Any:
    """A copy of the modules over the same weights: engines and compilers change modules in place."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})
