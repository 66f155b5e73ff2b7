"""Small random models whose attention features decide their logits, and exact logits of them.

Shape legend: L tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCAB_SIZE = 96
WINDOW = 6
"""Smaller than every prompt of the tests."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_ONE_KV_HEAD = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""For those that derive the head size from the others: 32 here too."""


CHUNK = 5
"""Of chunked local attention; smaller than every prompt of the tests, and no divisor of a block."""


class Architecture(NamedTuple):
    """A causal language model of transformers: names of its classes, and what differs from `_SIZES`."""

    prefix: str
    changes: dict[str, Any]
    without: tuple[str, ...] = ()
    config: str | None = None
    """Name of the configuration's class; None: the prefix and "Config"."""
    needs: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    """Fields of a selector's configuration that not every backend serves."""


ZOO = {
    "llama": Architecture("Llama", {}),
    "qwen2": Architecture("Qwen2", _ONE_KV_HEAD, ("head_dim",)),
    "qwen2_window": Architecture(
        "Qwen2",
        _ONE_KV_HEAD | {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
        ("head_dim",),
    ),
    "qwen3": Architecture("Qwen3", {"head_dim": 64}),
    "mistral_window": Architecture("Mistral", {"sliding_window": WINDOW}),
    "gemma2": Architecture(
        "Gemma2", _ALTERNATING | {
            "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 20, "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": Architecture(
        "GptOss", _ALTERNATING | {
            "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "phi3": Architecture("Phi3", _ONE_KV_HEAD, ("head_dim",)),
    "gpt_neox": Architecture("GPTNeoX", {"num_attention_heads": 2}, ("head_dim", "num_key_value_heads")),
    "llama4_text": Architecture(
        "Llama4", {
            "intermediate_size_mlp": 96, "attention_chunk_size": CHUNK, "no_rope_layers": [1, 0],
            "moe_layers": [], "floor_scale": 4, "attn_scale": 0.5, "num_local_experts": 2,
        }, config="Llama4TextConfig", needs={"attention_chunk_size": CHUNK},
    ),
    "gemma3_text": Architecture(
        "Gemma3", {
            "num_hidden_layers": 6, "sliding_window": WINDOW, "query_pre_attn_scalar": 20,
            "tie_word_embeddings": False,
        }, config="Gemma3TextConfig",
    ),
    "gemma3n_text": Architecture(
        "Gemma3n", {
            "num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] + ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 5, "tie_word_embeddings": False,
        }, config="Gemma3nTextConfig",
    ),
    "gemma4_text": Architecture(
        "Gemma4", {
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": WINDOW,
            "global_head_dim": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16,
            "tie_word_embeddings": False,
        }, config="Gemma4TextConfig",
    ),
    "cohere2": Architecture(
        "Cohere2", _ONE_KV_HEAD | _ALTERNATING | {"tie_word_embeddings": False}, ("head_dim",)
    ),
    "olmo2": Architecture("Olmo2", _ONE_KV_HEAD, ("head_dim",)),
    "granite": Architecture(
        "Granite", _ONE_KV_HEAD | {"attention_multiplier": 0.4, "residual_multiplier": 0.7}, ("head_dim",)
    ),
    "glm": Architecture("Glm", {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "smollm3": Architecture(
        "SmolLM3", _ONE_KV_HEAD | _ALTERNATING | {"no_rope_layers": [1, 0], "use_sliding_window": True},
        ("head_dim",),
    ),
}  # fmt: skip


def make_model(name: str, **changes: Any) -> Any:
    """A float32 model in evaluation mode with eager attention and weights from a fixed seed."""
    import transformers

    prefix, own, without, config_name, _ = ZOO[name]
    sizes = {key: value for key, value in (_SIZES | own | changes).items() if key not in without}
    config = getattr(transformers, config_name or f"{prefix}Config")(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval().requires_grad_(False)
        for parameter_name, parameter in model.named_parameters():
            initialize(parameter_name, parameter)
    return model


def initialize(name: str, parameter: Tensor) -> None:
    """Large enough that attention is neither uniform nor one-hot, and that sinks and biases count."""
    if "embed" in name:
        nn.init.normal_(parameter, std=0.3)
    elif parameter.ndim >= 2:
        nn.init.normal_(parameter, std=0.2)
    elif "sinks" in name:
        nn.init.normal_(parameter, mean=2.0)
    elif name.endswith("bias"):
        nn.init.normal_(parameter, std=0.2)


class LogitsOf(NamedTuple):
    """What transformers' own eager attention gives, [L, V] each for one sequence."""

    exact: Tensor
    """float64 throughout, but for the rotary angles, which are those of the float32 model."""
    eager: Tensor
    """float32."""


class EagerReference:
    """transformers' eager attention in float64 and in float32, without a cache."""

    def __init__(self, model: Any) -> None:
        self._float32 = copy.deepcopy(model)
        self._float32.set_attn_implementation("eager")
        self._float32.set_experts_implementation("eager")  # grouped_mm has no float64
        self._float64 = copy.deepcopy(self._float32).double()
        for module in [m for m in self._float64.modules() if hasattr(m, "rotary_emb")]:
            module.rotary_emb = _Float32Rotary(copy.deepcopy(module.rotary_emb).float())

    def logits(self, token_ids: Sequence[int]) -> LogitsOf:
        """Of one whole sequence."""
        exact, eager = self.outputs("logits", input_ids=torch.tensor([token_ids]))
        return LogitsOf(exact[0], eager[0])

    def outputs(self, name: str, **inputs: Tensor) -> LogitsOf:
        """A field of the model's output, [B, L, V], for a batch."""
        wide = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
        with torch.no_grad():
            eager = getattr(self._float32(**inputs, **self._options), name)
            with _AlwaysDouble():
                exact = getattr(self._float64(**wide, **self._options), name)
        assert exact.dtype == torch.float64
        return LogitsOf(exact, eager)

    @property
    def _options(self) -> dict[str, Any]:
        return {"use_cache": False} if hasattr(self._float32.config, "use_cache") else {}


class _AlwaysDouble(TorchFunctionMode):
    """Models compute norms and softmax in float32 whatever their own type: here in float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()})


class _Float32Rotary(nn.Module):
    """The angles of a float32 model: their rounding is not attention's and must not set its tolerance."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = inner

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor] | Tensor:
        with torch._C.DisableTorchFunction():
            angles = self._inner(x.float(), *args, **kwargs)
            if isinstance(angles, Tensor):
                return angles.to(torch.complex128)
            cos, sin = angles
            return cos.double(), sin.double()
