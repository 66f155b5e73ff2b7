"""The libraries that bring FlashAttention kernels, behind one interface.

None is imported before it is asked about. What each can do is stated here as far as its interface says it;
`attnbackend.backends.flash_attn.probe` finds out by trying.

Shape legend: T tokens, R rows, H query heads.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbackend.backends.flash_attn.call import FlashCall, ScheduleRequest
from attnbackend.backends.flash_attn.forward_op import ForwardOp
from attnbackend.native_calls import LibraryCall
from attnbackend.ops.library_calls import serve_library_calls

__all__ = ["PROVIDERS", "FlashAttn2", "FlashAttn3", "FlashAttn4", "Provider", "TorchFlash", "VllmFlash"]

_CAPABILITIES = {2: (8, 9, 10, 11, 12), 3: (9,), 4: (9, 10, 11)}
"""Version -> major compute capabilities that its kernels are written for."""


class Provider(ABC):
    """One library with kernels of one version of FlashAttention."""

    key: ClassVar[str]
    """What a person forces it by."""
    version: ClassVar[int]
    module: ClassVar[str]
    has_alibi: ClassVar[bool] = False
    has_fp8: ClassVar[bool] = False
    has_soft_cap: ClassVar[bool] = True
    native_sinks: ClassVar[bool] = False
    splits: ClassVar[bool] = False
    """Takes a bound of the splits."""
    schedules: ClassVar[bool] = False
    """Takes a schedule made ahead of time."""
    reads_new_tokens: ClassVar[bool] = True
    """Can read the new tokens' own keys and values instead of the cache."""

    def __str__(self) -> str:
        return f"FlashAttention {self.version} of {self.module}"

    def problem_of_installation(self, capability: tuple[int, int]) -> str | None:
        """Why it cannot run on a device of this compute capability; None when it is worth trying."""
        majors = _CAPABILITIES[self.version]
        if capability[0] not in majors:
            needed = " or ".join(f"{major}.x" for major in majors)
            return f"needs compute capability {needed}, this is {capability[0]}.{capability[1]}"
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"{self.module.partition('.')[0]} is not installed"
        try:
            return self.load()
        except (ImportError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    @abstractmethod
    def load(self) -> str | None:
        """Imports the library; a reason where its kernels of this version are not in it."""

    @abstractmethod
    def attend(self, call: FlashCall) -> Tensor | None:
        """Runs a call: output written, natural-log LSE [T, H] (any strides) returned where there is one."""

    def op_call(self, call: FlashCall) -> LibraryCall | None:
        """The one call of an op that `attend` makes, if it does nothing else. Tensors are passed on unread,
        and may be something else."""
        return None

    def how_called(self) -> str:
        """For people, after the name: whether known calls go to the library without Python."""
        return ""

    def schedule(self, request: ScheduleRequest) -> Tensor:
        raise AssertionError(f"{self} claims no schedules")


class VllmFlash(Provider):
    """vLLM's fork, which takes an output tensor and sinks."""

    module = "vllm.vllm_flash_attn"
    native_sinks = False

    def load(self) -> str | None:
        interface = importlib.import_module(f"{self.module}.flash_attn_interface")
        self._attend, self._schedule = interface.flash_attn_varlen_func, interface.get_scheduler_metadata
        if getattr(interface, f"FA{self.version}_AVAILABLE", False):
            return None
        return str(getattr(interface, f"FA{self.version}_UNAVAILABLE_REASON", "built without it"))

    def attend(self, call: FlashCall) -> Tensor | None:
        paged = call.block_table is not None
        q_descale, k_descale, v_descale = call.descales or (None, None, None)
        _, lse_HT = self._attend(
            call.query, call.key, call.value, out=call.output,
            cu_seqlens_q=call.query_start_loc, max_seqlen_q=call.max_query_len,
            seqused_k=call.seq_lens if paged else None,
            cu_seqlens_k=None if paged else call.query_start_loc, max_seqlen_k=call.max_seq_len,
            block_table=call.block_table, softmax_scale=call.scale, causal=call.causal,
            window_size=call.window, softcap=call.soft_cap, alibi_slopes=call.alibi_slopes,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, s_aux=call.sinks,
            scheduler_metadata=call.schedule, num_splits=call.num_splits, return_softmax_lse=True,
            fa_version=self.version,
        )  # fmt: skip
        return lse_HT.t()


class VllmFlash3(VllmFlash):
    """Its op is called past its function in Python, which takes longer and allocates what nobody reads."""

    key, version = "vllm_fa3", 3
    has_fp8 = splits = schedules = native_sinks = True
    _op: ForwardOp | None = None

    def load(self) -> str | None:
        reason = super().load()
        op = getattr(torch.ops._vllm_fa3_C, "fwd", None)
        self._op = None if op is None else ForwardOp.of(op.default)
        return reason

    def op_call(self, call: FlashCall) -> LibraryCall | None:
        return None if self._op is None else self._op.call(call)

    def how_called(self) -> str:
        other = "its op takes other arguments than those known here"
        reason = serve_library_calls("FLASH_ATTN", "cuda") if self._op is not None else other
        return ", called without Python" if reason is None else f", called through Python: {reason}"

    def attend(self, call: FlashCall) -> Tensor | None:
        own = self.op_call(call)
        if own is None:
            return super().attend(call)
        return own.function(*own.arguments)[1].t()

    def schedule(self, request: ScheduleRequest) -> Tensor:
        return _schedule(self._schedule, request)


class VllmFlash2(VllmFlash):
    key, version, has_alibi = "vllm_fa2", 2, True


class VllmFlash4(VllmFlash):
    """Vendored with vLLM where its CuTe sources are."""

    key, version = "vllm_fa4", 4


class FlashAttn3(Provider):
    """FlashAttention 3 as its authors ship it, from the folder ``hopper``."""

    key, version, module = "flash_attn_3", 3, "flash_attn_interface"
    has_fp8 = splits = schedules = True
    reads_new_tokens = False
    """Its function for variable lengths without a cache takes no output tensor."""

    def load(self) -> str | None:
        interface = importlib.import_module(self.module)
        self._attend = interface.flash_attn_with_kvcache
        self._schedule = getattr(interface, "get_scheduler_metadata", None)
        return None

    def attend(self, call: FlashCall) -> Tensor | None:
        q_descale, k_descale, v_descale = call.descales or (None, None, None)
        out, lse_HT, *_ = self._attend(
            call.query, call.key, call.value, cache_seqlens=call.seq_lens, page_table=call.block_table,
            cu_seqlens_q=call.query_start_loc, max_seqlen_q=call.max_query_len,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, softmax_scale=call.scale,
            causal=call.causal, window_size=call.window, softcap=call.soft_cap,
            scheduler_metadata=call.schedule, num_splits=call.num_splits, return_softmax_lse=True,
        )  # fmt: skip
        call.output.copy_(out)
        return lse_HT.t()

    def schedule(self, request: ScheduleRequest) -> Tensor:
        return _schedule(self._schedule, request)


def _schedule(function: Any, request: ScheduleRequest) -> Tensor:
    return function(
        batch_size=request.seq_lens.shape[0], max_seqlen_q=request.max_query_len,
        max_seqlen_k=request.max_seq_len, num_heads_q=request.num_heads,
        num_heads_kv=request.num_kv_heads, headdim=request.head_size, cache_seqlens=request.seq_lens,
        qkv_dtype=request.dtype, cu_seqlens_q=request.query_start_loc, page_size=request.block_size,
        causal=request.causal, window_size=request.window, has_softcap=request.soft_cap > 0,
        num_splits=request.num_splits,
    )  # fmt: skip


class FlashAttn2(Provider):
    """The package flash-attn; its paged form wants block sizes that are multiples of 256."""

    key, version, module, has_alibi = "flash_attn_2", 2, "flash_attn", True

    def load(self) -> str | None:
        self._attend = importlib.import_module(self.module).flash_attn_varlen_func
        return None

    def attend(self, call: FlashCall) -> Tensor | None:
        key_starts = call.query_start_loc
        if call.block_table is not None:
            key_starts = torch.zeros_like(call.query_start_loc)
            torch.cumsum(call.seq_lens, 0, dtype=torch.int32, out=key_starts[1:])
        out, lse_HT, _ = self._attend(
            call.query, call.key, call.value, call.query_start_loc, key_starts, call.max_query_len,
            call.max_seq_len, softmax_scale=call.scale, causal=call.causal, window_size=call.window,
            softcap=call.soft_cap, alibi_slopes=call.alibi_slopes, return_attn_probs=True,
            block_table=call.block_table,
        )  # fmt: skip
        call.output.copy_(out)
        return lse_HT.t()


class FlashAttn4(Provider):
    """FlashAttention 4, compiled by CuTe DSL on first use."""

    key, version, module = "flash_attn_4", 4, "flash_attn.cute"
    reads_new_tokens = False

    def load(self) -> str | None:
        interface = importlib.import_module(f"{self.module}.interface")
        self._attend = interface.flash_attn_varlen_func
        self._takes_lse = "return_lse" in inspect.signature(self._attend).parameters
        return None if self._takes_lse else "this release gives no LSE"

    def attend(self, call: FlashCall) -> Tensor | None:
        left, right = (None if side < 0 else side for side in call.window)
        out, lse_HT, *_ = self._attend(
            call.query, call.key, call.value, cu_seqlens_q=call.query_start_loc, seqused_k=call.seq_lens,
            max_seqlen_q=call.max_query_len, max_seqlen_k=call.max_seq_len, page_table=call.block_table,
            softmax_scale=call.scale, causal=call.causal, window_size=(left, right),
            softcap=call.soft_cap, return_lse=True,
        )  # fmt: skip
        call.output.copy_(out)
        return lse_HT.t()


class TorchFlash(Provider):
    """torch's built-in FlashAttention 2, where its function for variable lengths takes a block table."""

    key, version, module, has_soft_cap = "torch", 2, "torch.nn.attention.varlen", False

    def load(self) -> str | None:
        varlen = importlib.import_module(self.module)
        self._attend = getattr(varlen, "varlen_attn_out", None)
        if self._attend is None or "block_table" not in inspect.signature(self._attend).parameters:
            return f"torch {torch.__version__} reads no pages in varlen_attn_out"
        self._aux = varlen.AuxRequest(lse=True)
        return None

    def attend(self, call: FlashCall) -> Tensor | None:
        assert self._attend is not None
        left, right = call.window
        paged = call.block_table is not None
        _, lse = self._attend(
            call.output, call.query, call.key, call.value, call.query_start_loc,
            None if paged else call.query_start_loc, call.max_query_len, call.max_seq_len,
            return_aux=self._aux, scale=call.scale, window_size=(left, 0 if call.causal else right),
            enable_gqa=call.query.shape[1] != call.key.shape[-2],
            seqused_k=call.seq_lens if paged else None, block_table=call.block_table,
        )  # fmt: skip
        # Torch 2.13 documents tokens first, and gives heads first; where both counts are equal, as it gives.
        return lse.t() if lse.shape[0] == call.query.shape[1] else lse


PROVIDERS: tuple[Provider, ...] = (
    VllmFlash3(), FlashAttn3(), VllmFlash4(), FlashAttn4(), VllmFlash2(), FlashAttn2(), TorchFlash(),
)  # fmt: skip
"""In the order of preference within a version."""
