"""Small random models beyond causal decoders: encoders, two-part models, prefixes and images, alibi.

Each is judged by a whole forward pass over a padded batch, through ``attn_implementation="attnbackend"``.

Shape legend: B sequences, L tokens of the longest, V outputs a token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from model_zoo import VOCAB_SIZE, WINDOW, EagerReference, initialize
from torch import Tensor

from attnbackend.integrations.dense_cache import attend_dense
from attnbackend.integrations.transformers import ATTN_IMPLEMENTATION
from attnbackend.types import AttentionType

LENGTHS = (5, 17, 11)
SOURCE_LENGTHS = (13, 7, 19)
"""Of the encoder, where a decoder with `LENGTHS` reads it."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip
_GEMMA = _SIZES | {
    "num_key_value_heads": 1, "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False,
}  # fmt: skip
_TWO_PARTS = {
    "vocab_size": VOCAB_SIZE, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "attn_implementation": "eager",
}  # fmt: skip
_VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 2,
}  # fmt: skip


class Family(NamedTuple):
    """A model of transformers and one batch of it."""

    model: Callable[[], Any]
    inputs: Callable[[], dict[str, Tensor]]
    output: str = "logits"
    needs: tuple[dict[str, Any], ...] = ()
    """What layers ask of a backend, as fields of a selector's configuration."""
    compiles: bool = True
    """Whether the forward pass compiles as a whole."""
    prepare: Callable[[Any], Any] | None = None
    """Puts the ops into a copy of the model; None: ``set_attn_implementation``."""


def tokens(lengths: tuple[int, ...] = LENGTHS, seed: int = 5, *, left: bool = False) -> dict[str, Tensor]:
    """Sequences of several lengths, filled up with the padding token 0."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.zeros(2, len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        own = slice(width - length, None) if left else slice(0, length)
        ids[row, own] = torch.randint(3, VOCAB_SIZE - 1, (length,), generator=generator)
        mask[row, own] = 1
    return {"input_ids": ids, "attention_mask": mask}


def two_parts() -> dict[str, Tensor]:
    target = {f"decoder_{name}": value for name, value in tokens().items()}
    return tokens(SOURCE_LENGTHS, 6) | target


def sounds() -> dict[str, Tensor]:
    """Whisper pads sounds to one length, so that only the decoder's side is ragged."""
    features = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(7))
    target = {f"decoder_{name}": value for name, value in tokens().items()}
    return {"input_features": features} | target


def images() -> dict[str, Tensor]:
    """Two runs of image tokens in the second sequence, one in the third, of at most a window's length."""
    inputs = tokens()
    kinds = torch.zeros_like(inputs["input_ids"])
    kinds[1, 3 : 3 + WINDOW] = kinds[1, 12:15] = kinds[2, 4:8] = 1
    return inputs | {"token_type_ids": kinds}


def prefixes() -> dict[str, Tensor]:
    """The first part of each sequence sees all of itself."""
    inputs = tokens()
    kinds = torch.ones_like(inputs["input_ids"])
    for row, length in enumerate(LENGTHS):
        kinds[row, : length - 4] = 0
    return inputs | {"token_type_ids": kinds}


def make(name: str, config: Any) -> Any:
    """A float32 model in evaluation mode with weights from a fixed seed."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = getattr(transformers, name)(config).eval().requires_grad_(False)
        for parameter_name, parameter in model.named_parameters():
            initialize(parameter_name, parameter)
    return model


def plain(name: str, config_name: str, **sizes: Any) -> Callable[[], Any]:
    def build() -> Any:
        import transformers

        return make(name, getattr(transformers, config_name)(**sizes))

    return build


def gemma3_with_images() -> Any:
    from transformers import Gemma3Config

    config = Gemma3Config(
        text_config={k: v for k, v in _GEMMA.items() if k != "attn_implementation"}, vision_config=_VISION,
        image_token_index=VOCAB_SIZE - 1, mm_tokens_per_image=4, attn_implementation="eager",
        tie_word_embeddings=False,
    )  # fmt: skip
    return make("Gemma3ForConditionalGeneration", config)


def paligemma() -> Any:
    from transformers import PaliGemmaConfig

    own = ("layer_types", "sliding_window", "query_pre_attn_scalar", "attn_implementation")
    text = {k: v for k, v in _GEMMA.items() if k not in own} | {"model_type": "gemma"}
    config = PaliGemmaConfig(
        text_config=text, vision_config=_VISION | {"model_type": "siglip_vision_model"}, projection_dim=64,
        image_token_index=VOCAB_SIZE - 1, attn_implementation="eager", tie_word_embeddings=False,
    )  # fmt: skip
    return make("PaliGemmaForConditionalGeneration", config)


def t5gemma() -> Any:
    from transformers import T5GemmaConfig

    part = {k: v for k, v in _GEMMA.items() if k != "attn_implementation"} | {"attn_logit_softcapping": 3.0}
    return make(
        "T5GemmaForConditionalGeneration",
        T5GemmaConfig(encoder=part, decoder=part, vocab_size=VOCAB_SIZE, attn_implementation="eager",
                      tie_word_embeddings=False),
    )  # fmt: skip


def with_alibi(model: Any) -> Any:
    """MPT has attention of its own, with alibi, behind no interface: here they call the op."""
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    heads = model.config.n_heads
    # The bias of the last position but one, which is one away, is minus the slope.
    slopes = -build_mpt_alibi_tensor(heads, 2, model.config.attn_config.alibi_bias_max)[:, 0, 0].float()
    for block in model.transformer.blocks:
        block.attn.forward = _AlibiForward(block.attn, slopes)
    return model


class _AlibiForward:
    def __init__(self, module: Any, slopes: Tensor) -> None:
        self.module, self.slopes = module, slopes

    def __call__(
        self, hidden_states: Tensor, position_bias: Tensor, cache: Any = None,
        attention_mask: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        module = self.module
        q_BHND, k_BHND, v_BHND = (
            x.unflatten(-1, (module.n_heads, -1)).transpose(1, 2)
            for x in module.Wqkv(hidden_states).chunk(3, dim=2)
        )
        # bool [B, 1, N, L], True where hidden: what the last query sees is what is not padded.
        valid_BL = None if attention_mask is None else ~attention_mask[:, 0].all(1)
        features = {
            "scale": module.softmax_scale, "causal": True, "sliding_window": None,
            "attention_chunk_size": None, "logits_soft_cap": 0.0, "sinks": None, "alibi_slopes": self.slopes,
        }  # fmt: skip
        out_BNHD = attend_dense(q_BHND, k_BHND, v_BHND, valid_BL, features, AttentionType.DECODER)
        return module.out_proj(out_BNHD.flatten(2)), None


_ENCODER = {"attn_type": AttentionType.ENCODER_ONLY, "causal": False}
_ENCODER_PART = {"attn_type": AttentionType.ENCODER, "causal": False}
_CROSS = {"attn_type": AttentionType.ENCODER_DECODER, "causal": False}
_RANGES = {"has_bidirectional_ranges": True}

FAMILIES: dict[str, Family] = {
    "bert": Family(plain("BertForMaskedLM", "BertConfig", **_SIZES), tokens, needs=(_ENCODER,)),
    "modernbert": Family(
        plain(
            "ModernBertForMaskedLM", "ModernBertConfig", **_SIZES, local_attention=2 * WINDOW,
            global_attn_every_n_layers=2, attention_bias=True,
        ),
        tokens, needs=(_ENCODER | {"sliding_window": WINDOW + 1},),
    ),
    "embedding_gemma": Family(
        plain("Gemma3TextModel", "Gemma3TextConfig", **_GEMMA | {"use_bidirectional_attention": True}),
        tokens, "last_hidden_state", needs=(_ENCODER | {"sliding_window": WINDOW // 2 + 1},),
    ),
    "bart": Family(
        plain("BartForConditionalGeneration", "BartConfig", **_TWO_PARTS, max_position_embeddings=64),
        two_parts, needs=(_ENCODER_PART, _CROSS),
    ),
    "whisper": Family(
        plain(
            "WhisperForConditionalGeneration", "WhisperConfig", **_TWO_PARTS, num_mel_bins=8,
            max_source_positions=12, max_target_positions=32,
        ),
        sounds, needs=(_ENCODER_PART, _CROSS),
    ),
    "t5gemma": Family(
        t5gemma, two_parts,
        needs=(_ENCODER | {"sliding_window": WINDOW + 1, "logits_soft_cap": 3.0}, _CROSS),
    ),
    "gemma3_images": Family(gemma3_with_images, images, needs=(_RANGES,), compiles=False),
    "paligemma": Family(paligemma, prefixes, needs=(_RANGES,), compiles=False),
    "mpt": Family(
        plain(
            "MptForCausalLM", "MptConfig", d_model=64, n_heads=2, n_layers=2, vocab_size=VOCAB_SIZE,
            max_seq_len=64,
        ),
        tokens, needs=({"has_alibi": True},), prepare=with_alibi,
    ),
}  # fmt: skip


class Truth(NamedTuple):
    exact: Tensor
    """float64, [valid tokens, V]."""
    eager: Tensor
    """float32."""


def truth(model: Any, family: Family) -> Truth:
    """What transformers' own eager attention gives for the family's batch, at tokens that are not padding."""
    reference = EagerReference(model)
    both = reference.outputs(family.output, **family.inputs())
    return Truth(*(at_tokens(x, family) for x in both))


def at_tokens(output_BLV: Tensor, family: Family) -> Tensor:
    inputs = family.inputs()
    mask = inputs["decoder_attention_mask" if "decoder_attention_mask" in inputs else "attention_mask"]
    return output_BLV[mask.bool()]


def on_ops(model: Any, family: Family) -> Any:
    """A copy of the model that runs on the agnostic ops."""
    twin = copy.deepcopy(model)
    if family.prepare is not None:
        return family.prepare(twin)
    twin.set_attn_implementation(ATTN_IMPLEMENTATION)
    return twin
