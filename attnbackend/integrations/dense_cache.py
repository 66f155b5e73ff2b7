"""Attention over the dense tensors that transformers keeps: encoders' own keys, or a temporary paged cache.

Decoders' caches are copied at every call, so that ``model.generate`` is right on any backend; a serving loop
uses paged caches instead. Padding is moved behind the batch's tokens, by index alone: no shape depends on
the mask, so a model that calls this compiles as a whole.

Shape legend: B sequences, N query tokens a sequence, L keys a sequence, T = B * N, P blocks a sequence,
S block_size, H query heads, K key-value heads, D head size, G ranges a sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbackend.ops import attention
from attnbackend.types import AttentionType

__all__ = ["attend_dense"]

_BLOCK_SIZE = 16


def attend_dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, features: dict[str, Any],
    attn_type: AttentionType = AttentionType.DECODER,
) -> Tensor:  # fmt: skip
    """Attention of the last N positions over all L, or of any N over L in cross attention.

    Args:
        query: [B, H, N, D].
        key: [B, K, L, D].
        value: [B, K, L, V]; latent attention's are narrower than the keys as a rule.
        mask: bool [B, L], False where padded, or int32 [B, 1 or 2, L], positions and numbers of ranges, -1
            for none; None where nothing is padded. Padding may be anywhere.
        features: keyword arguments of the attention op.
        attn_type: what the keys are to the queries.

    Returns:
        [B, N, H, V]; zeros at padded queries, except in cross attention.

    Raises:
        ValueError: padding between tokens together with a sliding window.
    """
    if key.shape[-1] != value.shape[-1]:
        width = max(key.shape[-1], value.shape[-1])
        q, k, v = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
        return attend_dense(q, k, v, mask, features, attn_type)[..., : value.shape[-1]]
    keys = _Keys.of(mask)
    keys.check_holes(features["sliding_window"])
    q_BNHD, k_BLKD, v_BLKD = (x.transpose(1, 2) for x in (query, key, value))
    features = {**features, "attn_type": str(attn_type)}
    if attn_type is AttentionType.ENCODER_DECODER:
        return _attend_paged(q_BNHD, k_BLKD, v_BLKD, _Packing.of(q_BNHD, None), keys, features)
    valid_BN = None if keys.valid_BL is None else keys.valid_BL[:, -query.shape[2] :]
    packing = _Packing.of(q_BNHD, valid_BN)
    if attn_type.keeps_no_cache:
        return _attend_own(q_BNHD, k_BLKD, v_BLKD, packing, features)
    return _attend_paged(q_BNHD, k_BLKD, v_BLKD, packing, keys, features)


class _Keys(NamedTuple):
    """Which keys count, and where they stand."""

    valid_BL: Tensor | None
    """bool; None: all do."""
    positions_BL: Tensor | None
    """int32; None: the valid ones count up from 0."""
    range_ids_BL: Tensor | None

    @classmethod
    def of(cls, mask: Tensor | None) -> _Keys:
        if mask is None or mask.dtype is torch.bool:
            return cls(mask, None, None)
        positions_BL = mask[:, 0]
        return cls(positions_BL >= 0, positions_BL, mask[:, 1] if mask.shape[1] > 1 else None)

    def check_holes(self, window: int | None) -> None:
        """A window counts positions, and padding between tokens is squeezed out."""
        if window is None or self.valid_BL is None:
            return
        begins_BL = self.valid_BL & ~torch.nn.functional.pad(self.valid_BL, (1, 0))[:, :-1]
        message = (
            f"padding between tokens together with a sliding window of {window} is not supported; pad on one "
            "side, or use attn_implementation='sdpa'"
        )
        in_one_piece = (begins_BL.sum(1) <= 1).all()
        if torch.compiler.is_compiling():
            torch._assert_async(in_one_piece, message)
        elif not bool(in_one_piece):
            raise ValueError(message)

    def slots(self, length: int, chunk: int | None) -> tuple[Tensor, Tensor, int]:
        """Place of each key in its sequence [B, L], sequence lengths [B], and places a sequence needs.

        Padded keys go to the last place, behind every length. In a cache that dropped its first keys, chunks
        begin where they did: as many places are left empty before the first key.
        """
        assert self.valid_BL is not None
        slots_BL, skipped = self.valid_BL.cumsum(1) - 1, 0
        if self.positions_BL is not None and chunk is not None:
            first_B1 = torch.where(self.valid_BL, self.positions_BL, 2**30).amin(1, keepdim=True)
            slots_BL, skipped = slots_BL + first_B1 % chunk, chunk - 1
        lens_B = torch.where(self.valid_BL, slots_BL + 1, 0).amax(1)
        return torch.where(self.valid_BL, slots_BL, length + skipped), lens_B, length + skipped + 1

    def ranges(self, slots_BL: Tensor) -> Tensor | None:
        """int32 [B, G, 2], first place and the one after the last."""
        if self.range_ids_BL is None or self.valid_BL is None:
            return None
        count = int(self.range_ids_BL.max()) + 1
        if count == 0:
            return None
        ids_G = torch.arange(count, device=slots_BL.device).view(-1, 1)
        member_BGL = (self.range_ids_BL.unsqueeze(1) == ids_G) & self.valid_BL.unsqueeze(1)
        start_BG = torch.where(member_BGL, slots_BL.unsqueeze(1), 2**30).amin(2)
        stop_BG = torch.where(member_BGL, slots_BL.unsqueeze(1) + 1, 0).amax(2)
        return torch.stack([start_BG.minimum(stop_BG), stop_BG], dim=-1).int()


class _Packing(NamedTuple):
    """Queries as one row of tokens, those that are padding behind all others."""

    place_T: Tensor | None
    """int64, each token's place; None: where they are."""
    lens_B: Tensor
    query_start_loc: Tensor

    @classmethod
    def of(cls, q_BNHD: Tensor, valid_BN: Tensor | None) -> _Packing:
        batch, length = q_BNHD.shape[:2]
        if valid_BN is None:
            place_T, lens_B = None, torch.full((batch,), length, dtype=torch.int32, device=q_BNHD.device)
        else:
            valid_T, lens_B = valid_BN.flatten(), valid_BN.sum(1, dtype=torch.int32)
            padded_T = lens_B.sum() + (~valid_T).cumsum(0) - 1
            place_T = torch.where(valid_T, valid_T.cumsum(0) - 1, padded_T)
        return cls(place_T, lens_B, torch.nn.functional.pad(lens_B.cumsum(0), (1, 0)).int())

    def pack(self, x_BNHD: Tensor) -> Tensor:
        x_THD = x_BNHD.flatten(0, 1)
        if self.place_T is None:
            return x_THD.contiguous()
        return torch.empty_like(x_THD, memory_format=torch.contiguous_format).index_copy(
            0, self.place_T, x_THD
        )

    def unpack(self, x_THD: Tensor, q_BNHD: Tensor) -> Tensor:
        x_THD = x_THD if self.place_T is None else x_THD.index_select(0, self.place_T)
        return x_THD.view(q_BNHD.shape)


def _attend_own(
    q_BNHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, packing: _Packing, features: dict[str, Any]
) -> Tensor:
    """An encoder's attention: the keys are the call's own."""
    q_THD, k_TKD, v_TKD = (packing.pack(x) for x in (q_BNHD, k_BLKD, v_BLKD))
    no_cache = k_TKD.new_empty(0, 2, _BLOCK_SIZE, *k_TKD.shape[1:])
    no_blocks = packing.query_start_loc.new_zeros(len(packing.lens_B), 1)
    out_THD = torch.empty_like(q_THD)
    attention(
        q_THD, k_TKD, v_TKD, no_cache, out_THD, packing.query_start_loc, packing.lens_B, no_blocks,
        **features,
    )  # fmt: skip
    return packing.unpack(out_THD, q_BNHD)


def _attend_paged(
    q_BNHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, packing: _Packing, keys: _Keys, features: dict[str, Any]
) -> Tensor:  # fmt: skip
    batch, length = k_BLKD.shape[:2]
    ranges = None
    if keys.valid_BL is None:
        seq_lens = torch.full((batch,), length, dtype=torch.int32, device=k_BLKD.device)
    else:
        slots_BL, seq_lens, places = keys.slots(length, features["attention_chunk_size"])
        ranges = keys.ranges(slots_BL)
        k_BLKD, v_BLKD = (_put(x, slots_BL, places) for x in (k_BLKD, v_BLKD))
    kv_cache, block_table = _as_pages(k_BLKD, v_BLKD)
    q_THD = packing.pack(q_BNHD)
    out_THD = torch.empty_like(q_THD)
    attention(
        q_THD, None, None, kv_cache, out_THD, packing.query_start_loc, seq_lens.int(), block_table,
        bidirectional_ranges=ranges, **features,
    )  # fmt: skip
    return packing.unpack(out_THD, q_BNHD)


def _put(x_BLKD: Tensor, slots_BL: Tensor, places: int) -> Tensor:
    """Each key at its place, zeros elsewhere."""
    batch, _, heads, size = x_BLKD.shape
    index_BLKD = slots_BL[..., None, None].expand(x_BLKD.shape)
    return x_BLKD.new_zeros(batch, places, heads, size).scatter(1, index_BLKD, x_BLKD)


def _as_pages(k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, kv_heads, head_size = k_BLKD.shape
    pages = -(-length // _BLOCK_SIZE)
    padding = (0, 0, 0, 0, 0, pages * _BLOCK_SIZE - length)
    both_BL2KD = torch.stack([torch.nn.functional.pad(x, padding) for x in (k_BLKD, v_BLKD)], dim=2)
    cache = both_BL2KD.view(batch * pages, _BLOCK_SIZE, 2, kv_heads, head_size).transpose(1, 2)
    cache = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, 0, 0, 0, 1, 0))
    table = torch.arange(1, batch * pages + 1, dtype=torch.int32, device=k_BLKD.device)
    return cache, table.view(batch, pages)
