"""A tiny random Llama with a word-level tokenizer, as people keep models: in folders and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = ("the", "capital", "of", "france", "is", "paris", "one", "two", "three", "four")
SPECIAL = ("<unk>", "<s>", "</s>")
VOCAB = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
CHAT_TEMPLATE = (
    "{% for message in messages %}the {{ message['content'] }} is {% endfor %}"
    "{% if add_generation_prompt %}one{% endif %}"
)
MAX_POSITIONS = 64


def tiny_tokenizer(chat_template: str | None = None) -> Any:
    """Words apart by spaces; adds no special token, so that an empty text has no tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel(VOCAB, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": len(VOCAB), "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": MAX_POSITIONS, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return LlamaConfig(**(sizes | changes))


def tiny_model(**changes: Any) -> Any:
    """Random weights from a fixed seed, large enough that greedy answers are not all one token."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = LlamaForCausalLM(tiny_config(**changes)).eval()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.5)
    return model


def save_tiny_model(folder: Path, chat_template: str | None = None, **changes: Any) -> Path:
    """A folder as `save_pretrained` writes it."""
    tiny_model(**changes).save_pretrained(folder)
    tiny_tokenizer(chat_template).save_pretrained(folder)
    return folder


def greedy_tokens(model: Any, token_ids: list[int], count: int) -> list[int]:
    """The likeliest tokens one after the other, by plain forward passes over the whole text."""
    import torch

    known = list(token_ids)
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([known]), use_cache=False).logits[0, -1]
        known.append(int(logits.argmax()))
    return known[len(token_ids) :]


def write_tiny_gguf(file: Path) -> Path:
    """A whole GGUF file with one tensor; enough for the checks of the header, not for loading."""
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(str(file), "llama")
    writer.add_block_count(1)
    writer.add_token_list(list(VOCAB))
    writer.add_tensor("token_embd.weight", np.zeros((len(VOCAB), 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
