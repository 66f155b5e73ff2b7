"""A Llama of the 8B model's shape with random weights."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["SHAPE", "random_llama"]

SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip


def random_llama(layers: int) -> Any:
    """The model with random weights, made on the GPU."""
    import transformers

    config = transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": layers}, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return model.eval().requires_grad_(False)
