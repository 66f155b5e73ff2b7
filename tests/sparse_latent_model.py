"""A small model of sparse latent attention, built from `attnbackend.layers`.

Shape legend: T tokens, N positions that a query may see, R elements that are rotated, W rows of logits,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from latent_zoo import LIBRARY_SIZES
from model_zoo import VOCAB_SIZE
from torch import Tensor, nn

from attnbackend import AttentionSelectorConfig
from attnbackend.impl import MLADims
from attnbackend.layers import MLAAttention
from attnbackend.runtime.served_model import AttentionLayer, BatchTensors, BoundLayer

_NAMES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
DIMS = MLADims(**{name: LIBRARY_SIZES[name] for name in _NAMES})
_HEADS, _HIDDEN, _LAYERS, _SEEN = 16, 64, 2, 16


class SparseLatentModel(nn.Module):
    """Each query sees its own position and every other one before it, 16 at most: a `ServedModel`."""

    vocab_size, max_model_len = VOCAB_SIZE, 128

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.device, self.dtype = torch.device(device), dtype
        self.embed = nn.Embedding(VOCAB_SIZE, _HIDDEN)
        self.attention = nn.ModuleList(MLAAttention(_HIDDEN, _HEADS, DIMS) for _ in range(_LAYERS))
        self.out = nn.ModuleList(
            nn.Linear(_HEADS * LIBRARY_SIZES["v_head_dim"], _HIDDEN, bias=False) for _ in range(_LAYERS)
        )
        self.head = nn.Linear(_HIDDEN, VOCAB_SIZE, bias=False)
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.2, generator=generator)
        self.to(self.device, dtype).eval().requires_grad_(False)

    def attention_layers(self) -> Mapping[str, AttentionLayer]:
        config = AttentionSelectorConfig.dense(
            device_type=self.device.type, head_size=DIMS.kv_lora_rank + DIMS.qk_rope_head_dim,
            num_heads=_HEADS, num_kv_heads=1, dtype=self.dtype, use_mla=True, use_sparse=True,
            kv_lora_rank=DIMS.kv_lora_rank,
        )  # fmt: skip
        return {str(i): AttentionLayer(config, layer.scale, mla=DIMS) for i, layer in self._layers()}

    def bind(self, layers: Mapping[str, BoundLayer]) -> None:
        for i, layer in self._layers():
            layer.bind(layers[str(i)])

    def compile(self, backend: str | None, *, in_pieces: bool = False) -> None:  # type: ignore[override]
        raise NotImplementedError

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, batch: BatchTensors
    ) -> Tensor:
        """Logits [W, V]."""
        x = self.embed(input_ids)
        away_N = torch.arange(_SEEN, device=x.device) * 2
        seen_TN = (positions.unsqueeze(1) - away_N).clamp(min=-1).to(torch.int32)
        turns_R = 0.5 ** torch.arange(DIMS.qk_rope_head_dim // 2, device=x.device)
        angles_TR = positions.unsqueeze(1) * turns_R
        for i, layer in self._layers():
            x = x + self.out[i](layer(x, angles_TR.cos(), angles_TR.sin(), batch, seen_TN))
        return self.head(x[logits_indices])

    def _layers(self) -> list[tuple[int, MLAAttention]]:
        return list(enumerate(self.attention))  # type: ignore[arg-type]
