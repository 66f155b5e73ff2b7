"""Stand-ins, in plain torch on any device, for the kernel libraries of latent attention, with their habits.

Shape legend: T tokens, N tokens of one request, K its keys, H heads, L kv_lora_rank, W = L + R.
"""

from __future__ import annotations

import math
import types
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbackend.backends.mla.flash_attn_mla import LatentCall, LatentProvider
from attnbackend.backends.mla.prefill_flash_attn import PrefillProvider
from attnbackend.mla_metadata import MLAPrefillMetadata

NAN, RANK = float("nan"), 512


def attend(q_NHD: Tensor, k_KHD: Tensor, v_KHV: Tensor, scale: float, causal: bool) -> tuple[Tensor, ...]:
    """Output [N, H, V], natural LSE [N, H], and which queries see a key."""
    scores = torch.einsum("nhd,khd->nhk", q_NHD.float(), k_KHD.float()) * scale
    own = torch.arange(len(q_NHD)) + len(k_KHD) - len(q_NHD)
    if causal:
        scores = scores.masked_fill((torch.arange(len(k_KHD)) > own[:, None])[:, None], -math.inf)
    seen = (own >= 0) if causal else torch.full((len(q_NHD),), len(k_KHD) > 0)
    if len(k_KHD) == 0:
        return (
            q_NHD.float()[..., : v_KHV.shape[-1]] * NAN,
            scores.new_full(scores.shape[:2], NAN),
            seen & False,
        )
    return torch.einsum("nhk,khv->nhv", scores.softmax(-1), v_KHV.float()), scores.logsumexp(-1), seen


def latent_rows(cache: Tensor, pages: Tensor, keys: int) -> Tensor:
    """[K, 1, W]"""
    return cache[pages.long()].flatten(0, 1)[:keys].unsqueeze(1)


class FakeLatents(LatentProvider):
    """FlashAttention 3: leaves queries without keys unwritten, or writes zeros there."""

    module = "nowhere"
    fault: ClassVar[str] = ""
    writes_zeros: ClassVar[bool] = False

    def load(self) -> str | None:
        return None

    def attend(self, call: LatentCall) -> Tensor:
        query = torch.cat([call.query_latent, call.query_rope], -1)
        lse = torch.full(query.shape[:2], NAN)
        batch = call.batch
        starts, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        for row, (start, stop, keys) in enumerate(zip(starts, starts[1:], lens, strict=False)):
            assert stop - start <= call.max_query_len
            assert keys <= call.max_seq_len
            pages = batch.block_table[row, : -(-keys // call.kv_cache.shape[1])]
            k = latent_rows(call.kv_cache, pages, keys).expand(-1, query.shape[1], -1)
            out, own, seen = attend(query[start:stop], k, k[..., :RANK], call.scale, True)
            written = torch.arange(start, stop)[seen]
            if self.writes_zeros:
                call.output[start:stop][~seen] = 0
            lse[written] = own[seen] + (0.1 if self.fault == "wrong_lse" else 0.0)
            if self.fault != "writes_nothing":
                call.output[written] = out[seen].to(call.output.dtype)
        return lse


class _LatentWrapper:
    """FlashInfer: an LSE of base 2; without keys zeros and -inf on Hopper, a mean and -5e4 elsewhere."""

    made: ClassVar[list[_LatentWrapper]] = []
    kernels: ClassVar[str] = "fa2"

    def __init__(self, workspace: Tensor, backend: str, **buffers: Any) -> None:
        self._backend = self.kernels
        self.buffers, self.plans = buffers, 0
        type(self).made.append(self)

    def plan(
        self, qo: Tensor, starts: Tensor, indices: Tensor, lens: Tensor, heads: int, rank: int, rope: int,
        page: int, causal: bool, scale: float, q_dtype: torch.dtype, kv_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        assert {x.dtype for x in (qo, starts, indices, lens)} == {torch.int32}
        assert qo.device.type == starts.device.type == lens.device.type == "cpu"
        if self.buffers:
            assert len(self.buffers["qo_indptr"]) == len(qo), "the number of requests is the graph's"
            self.buffers["kv_indices"][: len(indices)] = indices
        assert causal == bool((qo.diff() > 1).any())
        self.qo, self.starts, self.indices, self.lens = qo.tolist(), starts.tolist(), indices, lens.tolist()
        self.scale, self.plans = scale, self.plans + 1

    def run(
        self, latent: Tensor, rope: Tensor, ckv: Tensor, kpe: Tensor, *, out: Tensor, lse: Tensor,
        return_lse: bool,
    ) -> None:  # fmt: skip
        assert out.is_contiguous()
        assert lse.is_contiguous()
        assert len(latent) == self.qo[-1]
        query, cache = torch.cat([latent, rope], -1), torch.cat([ckv, kpe], -1)
        for row, keys in enumerate(self.lens):
            tokens = slice(self.qo[row], self.qo[row + 1])
            pages = self.indices[self.starts[row] : self.starts[row + 1]]
            k = latent_rows(cache, pages, keys).expand(-1, query.shape[1], -1)
            found, own, seen = attend(query[tokens], k, k[..., :RANK], self.scale, True)
            unseen = (0.0, -math.inf) if self._backend == "fa3" else (7.0, -5e4)
            out[tokens] = torch.where(seen.view(-1, 1, 1), found, unseen[0]).to(out.dtype)
            lse[tokens] = torch.where(seen.view(-1, 1), own / math.log(2), unseen[1])


class _RaggedWrapper:
    """FlashInfer's for sequences with keys of their own."""

    def __init__(self, workspace: Tensor, layout: str, backend: str) -> None:
        assert layout == "NHD"

    def plan(
        self, qo: Tensor, kv: Tensor, heads: int, kv_heads: int, size: int, value_size: int, *, causal: bool,
        sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        self.qo, self.kv, self.causal, self.scale = qo.tolist(), kv.tolist(), causal, sm_scale

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, *, out: Tensor, lse: Tensor, return_lse: bool
    ) -> None:
        assert len(query) == self.qo[-1]
        for i in range(len(self.qo) - 1):
            rows, keys = slice(*self.qo[i : i + 2]), slice(*self.kv[i : i + 2])
            found, own, seen = attend(query[rows], key[keys], value[keys], self.scale, self.causal)
            out[rows] = torch.where(seen.view(-1, 1, 1), found, 7.0).to(out.dtype)
            lse[rows] = torch.where(seen.view(-1, 1), own / math.log(2), -5e4)


def fake_flashinfer() -> types.ModuleType:
    """What stands for the modules flashinfer and flashinfer.mla."""
    _LatentWrapper.made.clear()
    module = types.ModuleType("flashinfer")
    module.BatchMLAPagedAttentionWrapper = _LatentWrapper  # type: ignore[attr-defined]
    module.BatchPrefillWithRaggedKVCacheWrapper = _RaggedWrapper  # type: ignore[attr-defined]
    module.made = _LatentWrapper.made  # type: ignore[attr-defined]
    return module


class FakePrefill(PrefillProvider):
    """FlashAttention: leaves queries without keys unwritten; version 2 wants values as wide as keys."""

    module, pads, capabilities = "nowhere", True, (0,)

    def load(self) -> str | None:
        return None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: MLAPrefillMetadata, output: Tensor,
        scale: float,
    ) -> Tensor:  # fmt: skip
        assert value.shape == key.shape or not self.pads
        lse = torch.full(query.shape[:2], NAN)
        qo, kv = metadata.cu_seqlens_q.tolist(), metadata.cu_seqlens_k.tolist()
        for i in range(len(qo) - 1):
            rows, keys = slice(*qo[i : i + 2]), slice(*kv[i : i + 2])
            found, own, seen = attend(query[rows], key[keys], value[keys], scale, metadata.causal)
            written = torch.arange(rows.start, rows.stop)[seen]
            output[written], lse[written] = found[seen].to(output.dtype), own[seen]
        return lse


class _Schedule:
    """Made for one batch, checked by the calls that use it."""

    def __init__(self, lens: Tensor | None, queries: int) -> None:
        self.lens, self.queries = lens, queries


def _get_mla_metadata(lens: Tensor | None, queries: int, kv_heads: int, **more: Any) -> tuple[Any, None]:
    assert kv_heads == 1
    return _Schedule(lens, queries), None


def _flash_mla_with_kvcache(
    q: Tensor, cache: Tensor, table: Tensor | None, lens: Tensor | None, rank: int, schedule: _Schedule,
    splits: None, *, softmax_scale: float, causal: bool = False, is_fp8_kvcache: bool = False,
    indices: Tensor | None = None, out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert rank == RANK
    assert q.is_contiguous()
    if indices is not None:
        rows = _unpacked(cache.flatten(0, 2))
        found = [
            _selected(x, rows, i, softmax_scale) for x, i in zip(q.flatten(0, 1), indices[:, 0], strict=True)
        ]
        stacked, lse = (torch.stack(parts) for parts in zip(*found, strict=True))
        return stacked.to(q.dtype).unsqueeze(1), lse.unsqueeze(-1)
    assert table is not None
    assert lens is not None
    assert schedule.lens is lens
    assert schedule.queries == q.shape[1] * q.shape[2]
    lse = torch.full((len(q), q.shape[2], q.shape[1]), NAN)
    if out is None:
        out = torch.full((*q.shape[:3], RANK), NAN, dtype=q.dtype)
    elif out.shape != (len(q), 1, q.shape[1] * q.shape[2], RANK):
        raise RuntimeError("out must have shape (batch_size, num_heads, q_seq_per_hk, head_size_v)")
    out = out.view(*q.shape[:3], RANK)
    for row, keys in enumerate(lens.tolist()):
        k = latent_rows(cache[:, :, 0], table[row, : -(-keys // cache.shape[1])], keys).expand(
            -1, q.shape[2], -1
        )
        found_row, own, seen = attend(q[row], k, k[..., :RANK], softmax_scale, causal)
        out[row, seen], lse[row][:, seen] = found_row[seen].to(q.dtype), own[seen].T
    return out, lse


def _selected(q_HW: Tensor, rows_SW: Tensor, slots: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    rows = rows_SW[slots[slots >= 0].long()].unsqueeze(1).expand(-1, len(q_HW), -1)
    out, lse, _ = attend(q_HW.unsqueeze(0), rows, rows[..., :RANK], scale, False)
    return out[0], lse[0]


def _unpacked(rows: Tensor) -> Tensor:
    """[S, 656] bytes as [S, 576] numbers."""
    latent = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, 1)
    return torch.cat([latent * scales, rows[:, 528:].contiguous().view(torch.bfloat16).float()], 1)


def _flash_mla_sparse_fwd(q: Tensor, kv: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, ...]:
    assert indices.shape[2] % 128 == 0
    assert q.shape[1] % 64 == 0
    found = [_selected(x, kv[:, 0], i, scale) for x, i in zip(q, indices[:, 0], strict=True)]
    out, lse = (torch.stack(parts) for parts in zip(*found, strict=True))
    return out.to(q.dtype), lse, lse


def fake_flash_mla() -> types.ModuleType:
    """What stands for the module flash_mla."""
    module = types.ModuleType("flash_mla")
    module.get_mla_metadata = _get_mla_metadata  # type: ignore[attr-defined]
    module.flash_mla_with_kvcache = _flash_mla_with_kvcache  # type: ignore[attr-defined]
    module.flash_mla_sparse_fwd = _flash_mla_sparse_fwd  # type: ignore[attr-defined]
    return module


def _cutlass_decode(
    out: Tensor, lse: Tensor, latent: Tensor, rope: Tensor, cache: Tensor, lens: Tensor, table: Tensor,
    workspace: Tensor, scale: float, splits: int,
) -> None:  # fmt: skip
    assert out.shape[1] == lse.shape[1] == 128
    assert len(workspace) == table.shape[1] * cache.shape[1] + len(lens)
    assert (lens.dtype, table.dtype, splits) == (torch.int32, torch.int32, -1)
    query = torch.cat([latent, rope], -1)
    out.fill_(NAN)
    for token, keys in enumerate(lens.tolist()):
        pages = table[token, : -(-keys // cache.shape[1])]
        k = latent_rows(cache, pages, keys).expand(-1, query.shape[1], -1)
        found, own, seen = attend(query[token : token + 1], k, k[..., :RANK], scale, True)
        if bool(seen[0]):
            out[token, : query.shape[1]], lse[token, : query.shape[1]] = found[0].to(out.dtype), own[0]


def fake_vllm_ops() -> types.ModuleType:
    """What stands for the module vllm._custom_ops."""
    module = types.ModuleType("vllm._custom_ops")
    module.sm100_cutlass_mla_decode = _cutlass_decode  # type: ignore[attr-defined]
    module.sm100_cutlass_mla_get_workspace_size = (  # type: ignore[attr-defined]
        lambda longest, requests, processors, splits: longest + requests
    )
    return module
