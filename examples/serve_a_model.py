"""A serving loop: requests come and go while the engine steps. A tiny random model stands in for yours."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attnbackend import Engine, SamplingParams


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    engine = Engine(LlamaForCausalLM(config).eval(), num_blocks=64, compile=False)

    engine.add_request([1, 2, 3], SamplingParams(max_tokens=6))
    for _ in range(3):
        engine.step()
    engine.add_request([4, 5, 6, 7, 8], SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, seed=1))
    while engine.has_unfinished():
        for update in engine.step():
            if update.output is not None:
                print(update.request_id, update.output.token_ids, update.output.finish_reason)


if __name__ == "__main__":
    main()
