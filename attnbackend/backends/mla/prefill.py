"""Libraries that attend to the prompts of latent attention, chosen apart from the backend that decodes.

Shape legend: T tokens, S keys, H heads, D head size of query and key, V that of values.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from attnbackend.config import mla_prefill_choice
from attnbackend.mla_metadata import MLAPrefillMetadata
from attnbackend.ops.binding import LN_2
from attnbackend.platforms import current_platform
from attnbackend.types import LSEBase, Reason, Unavailable

__all__ = ["MLA_PREFILLS", "MLAPrefill", "MLAPrefillConfig", "mla_prefill_reasons", "select_mla_prefill"]

_HERE = "attnbackend.backends.mla"
MLA_PREFILLS = {
    "FLASH_ATTN": f"{_HERE}.prefill_flash_attn.FlashAttentionPrefill",
    "FLASHINFER": f"{_HERE}.prefill_flashinfer.FlashInferPrefill",
    "CPU": f"{_HERE}.prefill_cpu.CPUPrefill",
    "TRITON": f"{_HERE}.prefill_triton.TritonPrefill",
    "TORCH": f"{_HERE}.prefill_torch.TorchPrefill",
}
"""Names and classes, in the order in which they are tried."""


@dataclass(frozen=True, kw_only=True)
class MLAPrefillConfig:
    """What a library is asked for."""

    device_type: str
    compute_capability: tuple[int, int] | None
    num_heads: int
    qk_head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, query: Tensor, value: Tensor) -> MLAPrefillConfig:
        """What these tensors ask for."""
        return cls(
            device_type=query.device.type,
            compute_capability=current_platform(query.device.type).compute_capability,
            num_heads=int(query.shape[1]), qk_head_dim=int(query.shape[2]), v_head_dim=int(value.shape[2]),
            dtype=query.dtype,
        )  # fmt: skip


class MLAPrefill(ABC):
    """One library's attention of sequences to keys and values of their own; see `run`."""

    name: ClassVar[str]
    lse_base: ClassVar[LSEBase]
    equal_head_sizes: ClassVar[bool] = False
    """The kernels want values as wide as keys: `__call__` pads them, and cuts the output back."""

    def __init__(self, config: MLAPrefillConfig, scale: float, device: torch.device) -> None:
        self.config, self.scale, self.device = config, scale, device

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        """Why the library cannot run here at all; ImportError and OSError mean the same."""
        return None

    @classmethod
    def reasons(cls, config: MLAPrefillConfig) -> list[Reason]:
        """Why it cannot serve such a layer."""
        return []

    def plan(self, metadata: MLAPrefillMetadata) -> Any:
        """Work on the host that is done once a step; it comes back as ``metadata.plan``."""
        return None

    @abstractmethod
    def run(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        """Attention of sequences.

        Args:
            query: [T, H, D], last stride 1.
            key: [S, H, D]; likewise.
            value: [S, H, V], or [S, H, D] where `equal_head_sizes`; likewise, a view as a rule.
            metadata: where the sequences begin; ``metadata.plan`` is None where nothing was planned.
            output: [T, H, V] (or D); every row must be written: zeros where no key is seen, which holds for
                sequences without keys and for tokens behind the last one's.
            lse: float32 [T, H], written in `lse_base`; -inf where no key is seen.
        """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: MLAPrefillMetadata, output: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        """`run` with padding where the kernels want it, and an LSE of natural logarithms."""
        padding = query.shape[-1] - value.shape[-1] if self.equal_head_sizes else 0
        if padding:
            wide = torch.empty(query.shape, dtype=output.dtype, device=output.device)
            self.run(query, key, F.pad(value, (0, padding)), metadata, wide, lse)
            output.copy_(wide[..., : value.shape[-1]])
        else:
            self.run(query, key, value, metadata, output, lse)
        if lse is not None and self.lse_base is LSEBase.TWO:
            lse.mul_(LN_2)

    def planned(self, metadata: MLAPrefillMetadata) -> MLAPrefillMetadata:
        """The same with the library's plan."""
        return replace(metadata, plan=self.plan(metadata))


def select_mla_prefill(config: MLAPrefillConfig) -> type[MLAPrefill]:
    """The library that serves ``config``: the one that is forced, or the first that can.

    Raises:
        ValueError: the forced one is unknown or cannot serve, or none can; reasons carry values.
    """
    return _select(config, mla_prefill_choice())


@lru_cache(maxsize=256)
def _select(config: MLAPrefillConfig, forced: str | None) -> type[MLAPrefill]:
    if forced is not None and forced not in MLA_PREFILLS:
        raise ValueError(f"mla_prefill={forced!r} is unknown; allowed: {', '.join(MLA_PREFILLS)}")
    refused = {}
    for name in [forced] if forced else MLA_PREFILLS:
        reasons = mla_prefill_reasons(name, config)
        if not reasons:
            return _class_of(name)
        refused[name] = reasons
    listed = "".join(f"\n  {name}: {'; '.join(map(str, why))}" for name, why in refused.items())
    raise ValueError(f"no library can attend to the prompts of {config}. Tried:{listed}")


def mla_prefill_reasons(name: str, config: MLAPrefillConfig) -> list[Reason]:
    """Every reason why the library of this name cannot serve ``config``; empty: it can."""
    if importlib.util.find_spec(MLA_PREFILLS[name].rpartition(".")[0]) is None:
        return [Unavailable(value="not implemented")]
    try:
        cls = _class_of(name)
        found = cls.unavailable_reason(config.device_type)
    except (ImportError, OSError) as error:
        return [Unavailable(value=f"{type(error).__name__}: {error}")]
    return [*([Unavailable(value=found)] if found else []), *cls.reasons(config)]


def _class_of(name: str) -> type[MLAPrefill]:
    module, _, cls = MLA_PREFILLS[name].rpartition(".")
    return getattr(importlib.import_module(module), cls)
