"""`TORCH`: attention of sequences in torch's own ops, on any device, one sequence at a time.

Shape legend: N queries of a sequence, J its keys, H heads, D head size of query and key, V that of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnbackend.backends.mla.prefill import MLAPrefill
from attnbackend.backends.mla.softmax import attend_explicitly, query_chunks
from attnbackend.mla_metadata import MLAPrefillMetadata
from attnbackend.types import LSEBase

__all__ = ["TorchPrefill"]


class TorchPrefill(MLAPrefill):
    name = "TORCH"
    lse_base = LSEBase.E

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        starts_q, starts_k = (_on_host(x, cpu) for x, cpu in _starts(metadata))
        for i in range(len(starts_q) - 1):
            rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
            for part in query_chunks(rows, keys.stop - keys.start, query.shape[1]):
                visible = _visible(part, rows, keys, query.device) if metadata.causal else None
                out, own_lse = _attend(query[part], key[keys], value[keys], self.scale, visible)
                output[part] = out
                if lse is not None:
                    lse[part] = own_lse
        output[starts_q[-1] :] = 0
        if lse is not None:
            lse[starts_q[-1] :] = -torch.inf


def _starts(metadata: MLAPrefillMetadata) -> list[tuple[Tensor, Tensor | None]]:
    return [
        (metadata.cu_seqlens_q, metadata.cu_seqlens_q_cpu),
        (metadata.cu_seqlens_k, metadata.cu_seqlens_k_cpu),
    ]


def _on_host(starts: Tensor, starts_cpu: Tensor | None) -> list[int]:
    if starts_cpu is None and starts.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the TORCH library needs lengths on the host, which a CUDA graph capture cannot wait for; attend "
            "to prompts outside graphs, or choose another with set_config(mla_prefill=...)"
        )
    return (starts if starts_cpu is None else starts_cpu).tolist()


def _visible(part: slice, rows: slice, keys: slice, device: torch.device) -> Tensor:
    """bool [N, J], bottom-right aligned."""
    shift = (keys.stop - keys.start) - (rows.stop - rows.start)
    own = torch.arange(part.start - rows.start, part.stop - rows.start, device=device) + shift
    return torch.arange(keys.stop - keys.start, device=device) <= own.unsqueeze(1)


def _attend(
    q_NHD: Tensor, k_JHD: Tensor, v_JHV: Tensor, scale: float, visible_NJ: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits_HNJ = torch.matmul(q_NHD.float().transpose(0, 1), k_JHD.float().permute(1, 2, 0)) * scale
    weights_HNJ, lse_HN = attend_explicitly(logits_HNJ, visible_NJ)
    out_HNV = torch.matmul(weights_HNJ, v_JHV.float().transpose(0, 1))
    return out_HNV.transpose(0, 1).to(q_NHD.dtype), lse_HN.t()
