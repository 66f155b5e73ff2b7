"""Small random models with latent attention."""

from __future__ import annotations

from typing import Any

import torch
from model_zoo import VOCAB_SIZE, initialize

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 40, "v_head_dim": 24, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
_GROUPS = {"n_group": 2, "topk_group": 1}

LATENT_ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2_lite": ("DeepseekV2", {"q_lora_rank": None}),
    "deepseek_v2": ("DeepseekV2", {"q_lora_rank": 24, "rope_parameters": _YARN}),
    "deepseek_v3": ("DeepseekV3", {"q_lora_rank": 24, **_GROUPS, "rope_parameters": _YARN}),
    "deepseek_v3_halves": ("DeepseekV3", {"q_lora_rank": 24, **_GROUPS, "rope_interleave": False}),
}
"""Name -> prefix of its classes in transformers, and what differs from the common sizes."""

LIBRARY_SIZES = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 16,
    "first_k_dense_replace": 2,  # a rounding that sends a token to another expert says nothing of attention
}  # fmt: skip
"""Those that libraries' kernels take."""


def make_latent_model(name: str, **changes: Any) -> Any:
    """A float32 model in evaluation mode with eager attention and weights from a fixed seed."""
    import transformers

    prefix, own = LATENT_ZOO[name]
    config = getattr(transformers, f"{prefix}Config")(**{**_SIZES, **own, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval().requires_grad_(False)
        for parameter_name, parameter in model.named_parameters():
            initialize(parameter_name, parameter)
    return model
