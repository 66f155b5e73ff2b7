"""`MLAAttention`: multi-head latent attention, for people who write models.

Shape legend: T tokens, E hidden size, H heads, L kv_lora_rank, R qk_rope_head_dim, P qk_nope_head_dim,
V v_head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from attnbackend.impl import MLADims
from attnbackend.layers.cpu_linear import CPULinear
from attnbackend.layers.paged import BatchTensors, BoundLayer, DecodeTensors
from attnbackend.layers.rotary import rotate
from attnbackend.ops import mla_attention, mla_kv_cache_update, mla_mixed_attention
from attnbackend.ops.mla_projections import absorb, up_project

__all__ = ["MLAAttention"]

_LATENT_QUERY = ("q_a_proj", "q_a_layernorm", "q_b_proj")
_KEYS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")


class MLAAttention(nn.Module):
    """Latent attention over a paged cache that the runtime binds, from hidden states to the heads' values.

    Its linear layers have the names that DeepSeek's checkpoints give them; the projection of the output,
    ``o_proj``, is left to the model. Steps in which every request brings one token run in the latent space:
    the products that move queries there and values back are the graph's own nodes.

    Args:
        hidden_size: E.
        num_heads: H.
        dims: the sizes of latents and heads, P and V given.
        q_lora_rank: rank of the queries' own latent; None: queries are projected at once.
        scale: factor of the logits; None: (P + R) ** -0.5.
        interleaved: rotated elements are pairs (2i, 2i + 1), as DeepSeek's; False: (i, i + R / 2).
        bias: of the two projections from hidden states to latents.
        rms_norm_eps: of the latents' norms.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        dims: MLADims,
        *,
        q_lora_rank: int | None = None,
        scale: float | None = None,
        interleaved: bool = True,
        bias: bool = False,
        rms_norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self._set_up(num_heads, dims, scale, interleaved)
        query_size = num_heads * self.qk_head_dim
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, query_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(q_lora_rank, eps=rms_norm_eps)
            self.q_b_proj = nn.Linear(q_lora_rank, query_size, bias=False)
        row = dims.kv_lora_rank + dims.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, row, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(dims.kv_lora_rank, eps=rms_norm_eps)
        rows = self.qk_nope_head_dim + self.v_head_dim
        self.kv_b_proj = nn.Linear(dims.kv_lora_rank, num_heads * rows, bias=False)

    @classmethod
    def from_projections(
        cls, projections: Mapping[str, nn.Module], num_heads: int, dims: MLADims, *, scale: float,
        interleaved: bool = True,
    ) -> Self:  # fmt: skip
        """A layer over linear layers and norms that exist, which it shares.

        Args:
            projections: by name: ``kv_a_proj_with_mqa``, ``kv_a_layernorm``, ``kv_b_proj`` and either
                ``q_proj`` or ``q_a_proj``, ``q_a_layernorm`` and ``q_b_proj``. Any modules that map as linear
                layers do will serve, quantised ones too.
            num_heads, dims, scale, interleaved: as the constructor's.

        Raises:
            ValueError: a projection is missing, or gives another number of elements than ``dims`` say.
        """
        query = ("q_proj",) if "q_proj" in projections else _LATENT_QUERY
        if missing := [name for name in (*query, *_KEYS) if name not in projections]:
            raise ValueError(f"projections lack {', '.join(missing)}; given: {', '.join(projections)}")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._set_up(num_heads, dims, scale, interleaved)
        for name in (*query, *_KEYS):
            setattr(layer, name, projections[name])
        layer._check_projections(query[-1])
        return layer

    def _check_projections(self, last_of_query: str) -> None:
        """Of those that say how many elements they give."""
        rows = self.dims.kv_lora_rank + self.dims.qk_rope_head_dim
        wanted = {
            last_of_query: (
                "num_heads * (qk_nope_head_dim + qk_rope_head_dim)",
                self.num_heads * self.qk_head_dim,
            ),
            _KEYS[0]: ("kv_lora_rank + qk_rope_head_dim", rows),
        }
        for name, (what, size) in wanted.items():
            found = getattr(getattr(self, name), "out_features", size)
            if found != size:
                raise ValueError(f"{name} gives {found} elements; expected {what} = {size}, for {self.dims}")

    def _set_up(self, num_heads: int, dims: MLADims, scale: float | None, interleaved: bool) -> None:
        if dims.qk_nope_head_dim is None or dims.v_head_dim is None:
            raise ValueError(f"{dims} lacks qk_nope_head_dim or v_head_dim, which a layer must know")
        for name, size in {"num_heads": num_heads, **vars(dims)}.items():
            if size != int(size) or size < 1:
                raise ValueError(f"{name} is {size}; expected a whole number above 0")
        if dims.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim is {dims.qk_rope_head_dim}; expected an even number: pairs turn"
            )
        self.num_heads, self.dims, self.interleaved = num_heads, dims, interleaved
        self.qk_nope_head_dim, self.v_head_dim = dims.qk_nope_head_dim, dims.v_head_dim
        self.qk_head_dim = dims.qk_nope_head_dim + dims.qk_rope_head_dim
        self.scale = self.qk_head_dim**-0.5 if scale is None else scale
        self.kv_cache_dtype, self.group = "auto", -1
        for name in ("kv_cache", "k_scale", "dequantized_kv_b"):
            self.register_buffer(name, None, persistent=False)

    def bind(self, layer: BoundLayer) -> None:
        """Gives the layer its cache; call it after loading, see `split_kv_b`."""
        self.kv_cache, self.k_scale = layer.kv_cache, layer.k_scale
        self.kv_cache_dtype, self.group = layer.kv_cache_dtype, layer.group
        self.split_kv_b()

    def split_kv_b(self) -> None:
        """Makes ready what splits the weight of ``kv_b_proj`` by heads: nothing for a plain linear layer,
        whose weight is viewed; any other is dequantised.

        Raises:
            ValueError: ``kv_b_proj`` has a bias, or other sizes than the layer.
        """
        if self._is_plain():
            biased = self.kv_b_proj.bias is not None
        else:
            self.dequantized_kv_b, biased = self._dequantized()
        if biased:
            raise ValueError("kv_b_proj has a bias, which keys and values of latent attention do not have")
        found, rows = tuple(self._whole_kv_b.shape), self.qk_nope_head_dim + self.v_head_dim
        if found != (self.num_heads * rows, self.dims.kv_lora_rank):
            raise ValueError(
                f"the weight of kv_b_proj is {found}; expected ({self.num_heads} * {rows}, "
                f"{self.dims.kv_lora_rank}): num_heads * (qk_nope_head_dim + v_head_dim) rows of kv_lora_rank"
            )

    def _is_plain(self) -> bool:
        """Whether the projection's weight is memory that can be viewed, not a tensor of quantised parts."""
        return type(self.kv_b_proj) in _PLAIN and not hasattr(self.kv_b_proj.weight, "__tensor_flatten__")

    def _dequantized(self) -> tuple[Tensor, bool]:
        """The weight [outputs, inputs] that the projection amounts to, what it makes of a unit matrix in the
        type of the norm before it; and whether it makes something of nothing."""
        like = getattr(self.kv_a_layernorm, "weight", None)
        tensors = [
            x for x in (like, *self.kv_b_proj.parameters(), *self.kv_b_proj.buffers()) if x is not None
        ]
        dtype = next((x.dtype for x in tensors if x.is_floating_point() and x.itemsize > 1), None)
        device = tensors[0].device if tensors else None
        with torch.no_grad():
            unit = torch.eye(self.dims.kv_lora_rank, dtype=dtype, device=device)
            biased = bool(self.kv_b_proj(torch.zeros_like(unit[:1])).any())
            return self.kv_b_proj(unit).t().contiguous(), biased

    @property
    def _whole_kv_b(self) -> Tensor:
        weight = self.kv_b_proj.weight if self.dequantized_kv_b is None else self.dequantized_kv_b
        assert isinstance(weight, Tensor)
        return weight

    @property
    def kv_b_weight(self) -> Tensor:
        """[H, P + V, L]: of each head W_UK, then W_UV."""
        return self._whole_kv_b.view(self.num_heads, -1, self.dims.kv_lora_rank)

    def forward(
        self, hidden_states: Tensor, cos: Tensor, sin: Tensor, batch: BatchTensors,
        topk_indices: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of the new tokens.

        Args:
            hidden_states: [T, E].
            cos, sin: [T, R / 2], of each token's angles.
            batch: where the tokens belong; `DecodeTensors` have the step run in the latent space.
            topk_indices: int32 [T, N], positions that each query may see, see `mla_attention`.

        Returns:
            [T, H * V].

        Raises:
            RuntimeError: no cache was bound.
        """
        if self.kv_cache is None:
            raise RuntimeError(
                "this MLAAttention layer has no cache; call bind(BoundLayer(kv_cache, ...)) first"
            )
        layer = BoundLayer(self.kv_cache, self.kv_cache_dtype, self.group, self.k_scale)
        return self.attend(hidden_states, cos, sin, batch, layer, topk_indices)

    def attend(
        self, hidden_states: Tensor, cos: Tensor, sin: Tensor, batch: BatchTensors, layer: BoundLayer,
        topk_indices: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As `forward`, over a cache that is given and not bound."""
        if hidden_states.ndim != 2:
            raise ValueError(
                f"shape of hidden_states is {tuple(hidden_states.shape)}; expected (tokens, hidden_size)"
            )
        self._check_angles(cos, sin, hidden_states.shape[0])
        query = self._query(hidden_states).view(-1, self.num_heads, self.qk_head_dim)
        q_nope, q_pe = query.split((self.qk_nope_head_dim, self.dims.qk_rope_head_dim), dim=-1)
        row = self.kv_a_proj_with_mqa(hidden_states)
        latent, k_pe = row.split((self.dims.kv_lora_rank, self.dims.qk_rope_head_dim), dim=-1)
        kv_c = self.kv_a_layernorm(latent)
        q_pe = rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1), interleaved=self.interleaved)
        k_pe = rotate(k_pe, cos, sin, interleaved=self.interleaved)
        own = _cache_arguments(layer)
        mla_kv_cache_update(kv_c, k_pe, layer.kv_cache, batch.slot_mapping, **own)
        if topk_indices is not None or isinstance(batch, DecodeTensors):
            attended = self._on_latents(
                q_nope, q_pe, layer.kv_cache, batch, {**own, "topk_indices": topk_indices}
            )
        else:
            attended = self._mixed(torch.cat([q_nope, q_pe], -1), kv_c, k_pe, layer.kv_cache, batch, own)
        return attended.flatten(1)

    def _check_angles(self, cos: Tensor, sin: Tensor, tokens: int) -> None:
        """Others might broadcast, and turn every token alike."""
        wanted = (tokens, self.dims.qk_rope_head_dim // 2)
        for name, x in (("cos", cos), ("sin", sin)):
            if x.shape != wanted:
                raise ValueError(
                    f"shape of {name} is {tuple(x.shape)}; expected {wanted}, (tokens, qk_rope_head_dim / 2)"
                )

    def _query(self, hidden_states: Tensor) -> Tensor:
        if hasattr(self, "q_proj"):
            return self.q_proj(hidden_states)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))

    def _on_latents(
        self, q_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, batch: BatchTensors, own: dict[str, Any]
    ) -> Tensor:
        query_latent = absorb(q_nope, self.kv_b_weight)
        output = q_pe.new_empty(query_latent.shape)
        mla_attention(
            query_latent, q_pe, kv_cache, output, batch.query_start_loc, batch.seq_lens, batch.block_table,
            scale=self.scale, **own,
        )  # fmt: skip
        return up_project(output, self.kv_b_weight, self.v_head_dim)

    def _mixed(
        self, query: Tensor, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, batch: BatchTensors,
        own: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        output = query.new_empty(*query.shape[:2], self.v_head_dim)
        mla_mixed_attention(
            query, kv_c, k_pe, kv_cache, self.kv_b_weight, output, batch.query_start_loc, batch.seq_lens,
            batch.block_table, scale=self.scale, **own,
        )  # fmt: skip
        return output

    kv_cache: Tensor | None
    k_scale: Tensor | None
    dequantized_kv_b: Tensor | None


_PLAIN = (nn.Linear, CPULinear)


def _cache_arguments(layer: BoundLayer) -> dict[str, Any]:
    return {"k_scale": layer.k_scale, "kv_cache_dtype": layer.kv_cache_dtype, "group": layer.group}
