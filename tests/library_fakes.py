"""Stand-ins for kernel libraries, in plain torch on any device, with the habits that the real ones have.

They let the project's own side of a library backend be tested without a GPU: resolution, plans, splits of a
batch, and what is left to write after a kernel.

Shape legend: T tokens, N queries of one request, L its keys, H query heads, K key-value heads, D head size,
S block_size.
"""

from __future__ import annotations

import ctypes
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnbackend.backends.flash_attn.backend import FlashAttentionBackend
from attnbackend.backends.flash_attn.call import FlashCall, ScheduleRequest
from attnbackend.backends.flash_attn.impl import FlashAttentionImpl
from attnbackend.backends.flash_attn.providers import Provider
from attnbackend.backends.flashinfer.backend import FlashInferBackend

__all__ = [
    "FakeFlashBackend",
    "FakeFlashInferBackend",
    "FakeFunction",
    "FakeObject",
    "FakeProvider",
    "fake_ffi",
    "fake_flashinfer",
]

NAN = float("nan")


def attend_rows(
    q_NHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, *, scale: float, causal: bool, left: int, cap: float = 0.0,
    slopes: Tensor | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output [N, H, D] and natural LSE [N, H] in float32, and which queries see a key."""
    n, keys = len(q_NHD), len(k_LKD)
    group = q_NHD.shape[1] // k_LKD.shape[1]
    k_HLD, v_HLD = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k_LKD, v_LKD))
    s_HNL = q_NHD.float().transpose(0, 1) @ k_HLD.transpose(1, 2) * scale
    if cap:
        s_HNL = cap * torch.tanh(s_HNL / cap)
    distance_NL = torch.arange(keys, device=q_NHD.device) - (
        torch.arange(n, device=q_NHD.device) + (keys - n)
    ).unsqueeze(1)
    seen_NL = distance_NL <= 0 if causal else torch.ones_like(distance_NL, dtype=torch.bool)
    if left >= 0:
        seen_NL = seen_NL & (distance_NL >= -left)
    if slopes is not None:
        s_HNL = s_HNL + slopes.view(-1, 1, 1) * distance_NL
    s_HNL = s_HNL.masked_fill(~seen_NL, -torch.inf)
    lse_HN = s_HNL.logsumexp(-1)
    if sinks is not None:
        lse_HN = torch.logaddexp(lse_HN, sinks.float().view(-1, 1).expand_as(lse_HN))
    p_HNL = (s_HNL - lse_HN.masked_fill(lse_HN == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return (p_HNL @ v_HLD).transpose(0, 1), lse_HN.transpose(0, 1), seen_NL.any(-1)


def gather(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first ``length`` keys or values of some pages of [B, S, K, D]."""
    bits = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return bits[pages.long()].view(cache.dtype).flatten(0, 1)[:length]


class FakeProvider(Provider):
    """As version 3 with splits and schedules; leaves unwritten whatever sees no key."""

    key, version, module = "fake_fa3", 3, "nowhere"
    splits = schedules = True
    fault: ClassVar[str] = ""
    calls: ClassVar[list[FlashCall]] = []

    def load(self) -> str | None:
        return None

    def schedule(self, request: ScheduleRequest) -> Tensor:
        rows = request.seq_lens.shape[0]
        return torch.full((1 + -(-rows // 4) * 4,), request.num_splits, dtype=torch.int32)

    def attend(self, call: FlashCall) -> Tensor | None:
        type(self).calls.append(call)
        assert call.schedule is None or int(call.schedule[0]) == call.num_splits
        lse_HT = torch.full((call.query.shape[1], call.query.shape[0]), NAN, dtype=torch.float32)
        starts, lens = call.query_start_loc.tolist(), call.seq_lens.tolist()
        if self.fault == "refuses_empty_rows" and 0 in lens:
            raise RuntimeError("no keys")
        for row, (start, stop, length) in enumerate(zip(starts[:-1], starts[1:], lens, strict=True)):
            assert stop - start <= call.max_query_len
            assert length <= call.max_seq_len
            self._attend_row(call, row, slice(start, stop), length, lse_HT)
        return lse_HT.t()

    def _attend_row(self, call: FlashCall, row: int, tokens: slice, length: int, lse_HT: Tensor) -> None:
        if call.block_table is None:
            k, v = call.key[tokens], call.value[tokens]
        else:
            pages = call.block_table[row, : -(-length // call.key.shape[1])]
            k, v = (gather(x, pages, length) for x in (call.key, call.value))
            if self._reads_whole_pages(call) and length:
                v = v + 0 * gather(call.value, pages, len(pages) * call.value.shape[1]).sum(0)
        left = -1 if self.fault == "ignores_windows" else call.window[0]
        out, lse, seen = attend_rows(
            call.query[tokens], k, v, scale=call.scale, causal=call.causal, left=left, cap=call.soft_cap,
            slopes=call.alibi_slopes, sinks=call.sinks,
        )  # fmt: skip
        written = torch.arange(tokens.start, tokens.stop)[seen]
        lse_HT[:, written] = lse[seen].t()
        if self.fault != "writes_nothing":
            call.output[written] = out[seen].to(call.output.dtype)

    def _reads_whole_pages(self, call: FlashCall) -> bool:
        """As version 3 does where pages are as its tiles: for prompts, and by the kernel without a window."""
        queries = call.max_query_len * call.query.shape[1] // call.key.shape[-2]
        seen = call.window[0] < 0 or call.window[0] >= call.max_seq_len - 1
        return self.fault == "multiplies_whole_pages" or (
            self.fault == "multiplies_whole_pages_of_prompts" and queries > 128 and seen
        )


class FakeFlashBackend(FlashAttentionBackend):
    supported_device_types = ("cpu",)
    min_compute_capability = None

    @staticmethod
    def get_name() -> str:
        return "FAKE_FLASH"

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return FlashAttentionImpl

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        return None


class FakeFlashInferBackend(FlashInferBackend):
    supported_device_types = ("cpu",)
    min_compute_capability = None

    @staticmethod
    def get_name() -> str:
        return "FAKE_FLASHINFER"

    @classmethod
    def unavailable_reason(cls, device_type: str) -> str | None:
        return None


class FakeFunction:
    """As a compiled function that is called by tvm-ffi: a header in memory, and a call."""

    known: ClassVar[weakref.WeakValueDictionary[int, FakeFunction]] = weakref.WeakValueDictionary()

    class Header(ctypes.Structure):
        _fields_ = (("references", ctypes.c_int64), ("type_index", ctypes.c_int32), ("more", ctypes.c_int64))

    def __init__(self, run: Callable[..., None] | None, type_index: int = 68) -> None:
        self.run, self.header = run, self.Header(1, type_index)
        self.known[self.__chandle__()] = self

    def __chandle__(self) -> int:
        return ctypes.addressof(self.header)

    def __call__(self, *arguments: object) -> None:
        assert self.run is not None
        self.run(*arguments)


class FakeObject(FakeFunction):
    """As the library's object for the memory of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(None, 70)
        self.tensor = tensor


class _FfiValue(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("padding", ctypes.c_uint32), ("bits", ctypes.c_int64))


class _FfiTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("device_index", ctypes.c_int32),
        ("rank", ctypes.c_int32), ("kind", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64),
    )  # fmt: skip

    def as_tensor(self) -> Tensor:
        dtypes = {(0, 32): torch.int32, (1, 8): torch.uint8, (2, 16): torch.float16, (2, 32): torch.float32,
                  (4, 16): torch.bfloat16}  # fmt: skip
        assert (self.device, self.device_index, self.lanes, self.offset) == (1, 0, 1, 0)
        dtype, sizes = dtypes[self.kind, self.bits], self.sizes[: self.rank]
        strides = self.strides[: self.rank]
        extent = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        memory = (ctypes.c_uint8 * (extent * dtype.itemsize)).from_address(self.data)
        return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)


def _as_python(value: _FfiValue) -> object:
    if value.type == 0:
        return None
    if value.type == 7:
        return _FfiTensor.from_address(value.bits).as_tensor()
    if value.type == 3:
        return ctypes.c_double.from_buffer(ctypes.c_int64(value.bits)).value
    if value.type >= 64:
        known = FakeFunction.known[value.bits]
        return known.tensor if isinstance(known, FakeObject) else known
    return bool(value.bits) if value.type == 2 else value.bits


def fake_ffi() -> tuple[Any, ...]:
    """The functions of tvm-ffi that C++ calls, in the order of its structure."""

    def call(function: int, values: Any, count: int, result: Any) -> int:
        try:
            FakeFunction.known[function](*map(_as_python, values[:count]))
        except Exception:
            return -1
        return 0

    def count(by: int) -> Callable[[int], int]:
        def change(address: int) -> int:
            FakeFunction.Header.from_address(address).references += by
            return 0

        return change

    values = ctypes.POINTER(_FfiValue)
    made = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, values, ctypes.c_int32, values)
    counted = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    return made(call), None, counted(count(1)), counted(count(-1)), None


def _module(paged_run_func: FakeFunction) -> types.SimpleNamespace:
    def paged_run(*arguments: object) -> None:
        paged_run_func(*arguments)

    return types.SimpleNamespace(paged_run=paged_run)


class _Wrapper:
    """Plans and runs; empty rows get zeros and an LSE of -5e4, rows before their first key a mean."""

    made: ClassVar[list[_Wrapper]] = []

    def __init__(self, workspace: Tensor, **options: Any) -> None:
        self.workspace, self.options, self.plans = workspace, options, 0
        type(self).made.append(self)
        self._function = FakeFunction(self._attend)
        self._cached_module = _module(self._function)

    def _keep(
        self, starts: Tensor, indices: Tensor, last: Tensor, shape: tuple[int, ...], **more: Any
    ) -> None:
        assert starts.device.type == last.device.type == "cpu"
        assert {x.dtype for x in (starts, indices, last)} == {torch.int32}
        self.starts, self.indices, self.last, self.shape = starts.clone(), indices, last.clone(), shape
        self.more, self.plans = more, self.plans + 1

    def reset_workspace_buffer(self, workspace: Tensor, plan: Tensor) -> None:
        self.workspace = workspace

    def run(
        self, q: Tensor, sides: tuple[Tensor, Tensor], *, out: Tensor, lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> None:  # fmt: skip
        assert out.is_contiguous()
        assert lse is None or lse.is_contiguous()
        assert return_lse == (lse is not None)
        assert q.dtype == self.more["q_data_type"]
        assert sides[0].dtype == self.more["kv_data_type"]
        assert q.shape[0] == int(self.query_starts[-1]), "as the library checks"
        constants = (3, True, 0.25, self._function)
        self._cached_module.paged_run(self.workspace, q, *sides, self.indices, out, lse, *constants)

    def _attend(
        self, workspace: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, out: Tensor,
        lse: Tensor | None, *constants: object,
    ) -> None:  # fmt: skip
        assert constants == (3, True, 0.25, self._function)
        assert isinstance(constants[1], bool)
        assert workspace.data_ptr() == self.workspace.data_ptr()
        sides = k_cache, v_cache
        for row in range(len(self.last)):
            tokens = slice(int(self.query_starts[row]), int(self.query_starts[row + 1]))
            pages = indices[int(self.starts[row]) : int(self.starts[row + 1])]
            length = max(len(pages) - 1, 0) * self.shape[3] + int(self.last[row])
            k, v = (gather(x, pages, length) for x in sides)
            self._write(q, k, v, tokens, out, lse)

    def _write(self, q: Tensor, k: Tensor, v: Tensor, tokens: slice, out: Tensor, lse: Tensor | None) -> None:
        if len(k) == 0:
            out[tokens] = 0
            if lse is not None:
                lse[tokens] = -5e4
            return
        exact, natural, seen = attend_rows(
            q[tokens], k, v, scale=self.more["sm_scale"], causal=self.causal, left=self.more["window_left"],
            cap=self.more["logits_soft_cap"],
        )  # fmt: skip
        out[tokens] = torch.where(seen.view(-1, 1, 1), exact, v.float().mean()).to(out.dtype)
        if lse is not None:
            lse[tokens] = torch.where(seen.view(-1, 1), natural / torch.tensor(2.0).log(), -5e4)


class _Prefill(_Wrapper):
    def plan(
        self, qo: Tensor, starts: Tensor, indices: Tensor, last: Tensor, heads: int, kv_heads: int, size: int,
        page: int, *, causal: bool, max_token_per_sequence: int, **more: Any,
    ) -> None:  # fmt: skip
        assert qo.device.type == "cpu"
        assert max_token_per_sequence == int(qo.diff().max())
        self.query_starts, self.causal = qo.clone(), causal
        self._keep(starts, indices, last, (heads, kv_heads, size, page), **more)


class _Decode(_Wrapper):
    causal = False

    def plan(self, starts: Tensor, indices: Tensor, last: Tensor, *shape: int, **more: Any) -> None:
        assert len(indices) <= len(self.options["paged_kv_indices_buffer"])
        self.query_starts = torch.arange(len(last) + 1)
        self._keep(starts, indices, last, shape, **more)


def _fast_decode_plan(
    wrapper: _Decode, starts: Tensor, indices: Tensor, last: Tensor, *shape: int,
    global_override_indptr_cpu: Tensor, **more: Any,
) -> None:  # fmt: skip
    assert wrapper.plans > 0, "the first plan is a full one"
    assert torch.equal(global_override_indptr_cpu, starts)
    assert torch.equal(wrapper.options["paged_kv_indptr_buffer"], starts), "the caller's to fill"
    assert torch.equal(wrapper.options["paged_kv_last_page_len_buffer"], last)
    _Decode.plan(wrapper, starts, indices, last, *shape, **more)


def fake_flashinfer() -> types.SimpleNamespace:
    """What stands for the module ``flashinfer``."""
    _Wrapper.made.clear()
    return types.SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=_Prefill, BatchDecodeWithPagedKVCacheWrapper=_Decode,
        fast_decode_plan=_fast_decode_plan, __version__="0.0", made=_Wrapper.made,
    )  # fmt: skip
