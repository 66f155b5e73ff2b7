"""Latent attention, written to be read: what every backend of it is judged against.

Nothing here is shared with a backend or a kernel. Shape suffixes: T tokens of the batch, N tokens of one
request, J keys of one request, S keys of all, H heads, L kv_lora_rank, R qk_rope_head_dim,
P qk_nope_head_dim, V v_head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "LatentAttention",
    "LatentRequest",
    "latent_rows",
    "pack_rows",
    "plain_torch_mla",
    "reference_mla",
    "store_rows",
]

_GROUP = 128


def pack_rows(kv_c_TL: Tensor, k_pe_TR: Tensor) -> Tensor:
    """Bytes of "fp8_ds_mla": e4m3 latents, a float32 scale for each 128 of them, bfloat16 rotated keys."""
    rows = []
    for latent, rope in zip(kv_c_TL.float(), k_pe_TR, strict=True):
        groups = latent.split(_GROUP)
        scales = [max(float(group.abs().max()), 1e-12) / 448.0 for group in groups]
        scale_G = torch.tensor(scales, dtype=torch.float32)
        stored = [
            (g / s).clamp(-448.0, 448.0).to(torch.float8_e4m3fn) for g, s in zip(groups, scale_G, strict=True)
        ]
        parts = [torch.cat([x.view(torch.uint8) for x in stored]), scale_G, rope.bfloat16().contiguous()]
        rows.append(torch.cat([part.view(torch.uint8) for part in parts]))
    return torch.stack(rows) if rows else kv_c_TL.new_empty(0, 656, dtype=torch.uint8)


def store_rows(
    kv_c_TL: Tensor, k_pe_TR: Tensor, kv_cache_dtype: str, dtype: torch.dtype, k_scale: float | None
) -> Tensor:
    """New rows in a cache's form: what a write must leave behind, bit for bit.

    Args:
        kv_c_TL, k_pe_TR: latents and rotated keys.
        kv_cache_dtype: the cache's name.
        dtype: the cache's type.
        k_scale: stored = real / k_scale; None: 1.

    Returns:
        [T, W] of ``dtype``.
    """
    if kv_cache_dtype == "fp8_ds_mla":
        return pack_rows(kv_c_TL, k_pe_TR)
    rows = torch.cat([kv_c_TL, k_pe_TR], -1)
    if dtype == rows.dtype:
        return rows
    limits = torch.finfo(dtype)
    scaled = rows.float() / torch.tensor(1.0 if k_scale is None else k_scale)
    return scaled.clamp(limits.min, limits.max).to(dtype)


def latent_rows(
    kv_cache: Tensor, block_ids: list[int], length: int, kv_lora_rank: int, kv_cache_dtype: str,
    k_scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """float64 latents [J, L] and rotated keys [J, R] of a request's pages, cut at its length."""
    stored = kv_cache
    raw = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored
    rows = raw[block_ids].flatten(0, 1)[:length]
    if kv_cache_dtype == "fp8_ds_mla":
        scales_end = kv_lora_rank + 4 * (kv_lora_rank // _GROUP)
        latent = rows[:, :kv_lora_rank].contiguous().view(torch.float8_e4m3fn).double()
        scale = rows[:, kv_lora_rank:scales_end].contiguous().view(torch.float32).double()
        rope = rows[:, scales_end:].contiguous().view(torch.bfloat16).double()
        return latent * scale.repeat_interleave(_GROUP, dim=1), rope
    real = rows.view(stored.dtype).double() * (1.0 if k_scale is None else k_scale)
    return real[:, :kv_lora_rank], real[:, kv_lora_rank:]


@dataclass(frozen=True)
class LatentRequest:
    """One request's place in the batch and what the cache holds of it, in float64."""

    rows: slice
    kv_c_JL: Tensor
    k_pe_JR: Tensor


@dataclass(frozen=True)
class LatentAttention:
    """Latent attention in one arithmetic.

    Two instances are public: ``reference_mla`` (float64 throughout) and ``plain_torch_mla`` (matrix products
    in the query's dtype with their results rounded to it, everything between them in float32), the yardstick
    of the relative error rule.
    """

    exact: bool

    def mqa(
        self, query_latent: Tensor, query_rope: Tensor, requests: list[LatentRequest], *, scale: float,
        topk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Absorbed queries against latents.

        Args:
            query_latent: [T, H, L].
            query_rope: [T, H, R].
            requests: those that have a query and a key.
            scale: factor of the logits.
            topk_indices: [T, N], the positions that a query sees, of those up to its own; -1: none.

        Returns:
            ``(output [T, H, L], lse [T, H])``; (0, -inf) for tokens that see no key.
        """
        query = torch.cat([query_latent, query_rope], -1)
        out, lse = self._empty(query, query_latent.shape[-1])
        for request in requests:
            k_J1D = torch.cat([request.kv_c_JL, request.k_pe_JR], -1).unsqueeze(1)
            visible_NJ = _causal(request)
            if topk_indices is not None:
                visible_NJ = visible_NJ & _chosen(topk_indices[request.rows], visible_NJ.shape[1])
            state = self._attend(query[request.rows], k_J1D, request.kv_c_JL.unsqueeze(1), visible_NJ, scale)
            out[request.rows], lse[request.rows] = state
        return out, lse

    def whole(
        self, query: Tensor, kv_b_weight: Tensor, requests: list[LatentRequest], *, v_head_dim: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Queries [T, H, P + R] against the keys that every head makes of the latents: output [T, H, V].

        ``kv_b_weight`` is [H, P + V, L]; the other arguments and the result are as `mqa`'s.
        """
        nope = kv_b_weight.shape[1] - v_head_dim
        out, lse = self._empty(query, v_head_dim)
        weight_HNL = kv_b_weight.to(self._work(query))
        for request in requests:
            latent_JL = request.kv_c_JL.to(weight_HNL.dtype)
            both_HJN = torch.stack([latent_JL @ w_NL.t() for w_NL in weight_HNL])
            k_HJP, v_HJV = both_HJN[..., :nope], both_HJN[..., nope:]
            rope_HJR = request.k_pe_JR.to(weight_HNL.dtype).expand(len(weight_HNL), -1, -1)
            k_JHD, v_JHV = (x.transpose(0, 1) for x in (torch.cat([k_HJP, rope_HJR], -1), v_HJV))
            state = self._attend(query[request.rows], k_JHD, v_JHV, _causal(request), scale)
            out[request.rows], lse[request.rows] = state
        return out, lse

    def mha(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
        scale: float, causal: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Sequences of queries [T, H, D] with keys [S, H, D] and values [S, H, V] of their own."""
        out, lse = self._empty(query, value.shape[-1])
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for i in range(len(starts_q) - 1):
            rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
            if rows.start == rows.stop or keys.start == keys.stop:
                continue
            visible_NJ = _bottom_right(rows.stop - rows.start, keys.stop - keys.start)
            if not causal:
                visible_NJ = torch.ones_like(visible_NJ)
            out[rows], lse[rows] = self._attend(query[rows], key[keys], value[keys], visible_NJ, scale)
        return out, lse

    def _attend(
        self, q_NHD: Tensor, k_JHD: Tensor, v_JHV: Tensor, visible_NJ: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Heads of keys and values are one or as many as of queries."""
        work, between = self._work(q_NHD), torch.float64 if self.exact else torch.float32
        q_HND, k_HDJ = q_NHD.to(work).transpose(0, 1), k_JHD.to(work).permute(1, 2, 0)
        s_HNJ = (q_HND @ k_HDJ).to(between) * scale
        s_HNJ = s_HNJ.masked_fill(~visible_NJ, -torch.inf)
        lse_HN = torch.logsumexp(s_HNJ, -1)
        p_HNJ = torch.exp(s_HNJ - lse_HN.masked_fill(lse_HN == -torch.inf, 0.0)[..., None])
        out_HNV = p_HNJ.to(work) @ v_JHV.to(work).transpose(0, 1)
        return out_HNV.transpose(0, 1), lse_HN.t()

    def _empty(self, query: Tensor, width: int) -> tuple[Tensor, Tensor]:
        between = torch.float64 if self.exact else torch.float32
        out = query.new_zeros(*query.shape[:2], width, dtype=self._work(query))
        return out, query.new_full(query.shape[:2], -torch.inf, dtype=between)

    def _work(self, query: Tensor) -> torch.dtype:
        return torch.float64 if self.exact else query.dtype


reference_mla = LatentAttention(exact=True)
plain_torch_mla = LatentAttention(exact=False)


def _causal(request: LatentRequest) -> Tensor:
    return _bottom_right(request.rows.stop - request.rows.start, len(request.kv_c_JL))


def _bottom_right(queries: int, keys: int) -> Tensor:
    """bool [N, J]: the last query sees every key."""
    own_N1 = torch.arange(queries).unsqueeze(1) + keys - queries
    return torch.arange(keys) <= own_N1


def _chosen(topk_NK: Tensor, keys: int) -> Tensor:
    chosen = torch.zeros(len(topk_NK), keys, dtype=torch.bool)
    for row, positions in enumerate(topk_NK.tolist()):
        chosen[row, [j for j in positions if 0 <= j < keys]] = True
    return chosen
