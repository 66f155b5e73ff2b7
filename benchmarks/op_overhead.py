"""What a call through torch's dispatcher costs over a direct call of the same implementation.

Shape legend: T tokens, H query heads, K key-value heads, D head size, R requests, W block-table width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from attnbackend import (
    AttentionImpl,
    AttentionParams,
    AttentionSelectorConfig,
    CommonAttentionMetadata,
    ForwardContext,
    OptionalTensors,
    allocate_kv_cache,
    resolve_backend,
    select_backend,
    set_forward_context,
)
from attnbackend.kv_cache import spec_of
from benchmarks.timing import Spread, per_call_us

__all__ = ["OpOverhead", "measure_ops"]

_HEADS, _KV_HEADS, _HEAD_SIZE, _BLOCK_SIZE, _WIDTH, _SEQ_LEN = 4, 2, 32, 16, 4, 17
_SCALE = _HEAD_SIZE**-0.5


@dataclass(frozen=True)
class OpOverhead:
    """Microseconds a call on one token; ``overhead_us`` is op minus direct call, round by round.

    Attributes:
        runs_on: the backend that both sides run.
        inference_mode: measured inside ``torch.inference_mode()``.
        planned: a plan of the step was in the forward context; False: the op plans for itself.
    """

    op: str
    runs_on: str
    inference_mode: bool
    planned: bool
    op_us: Spread
    direct_us: Spread
    overhead_us: Spread

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Step:
    """One request of 17 tokens whose last one is new."""

    impl: AttentionImpl
    plan: Any
    arguments: tuple[Tensor, ...]
    write: tuple[Tensor, Tensor, Tensor, Tensor]


def measure_ops(*, rounds: int, calls: int) -> list[OpOverhead]:
    """Every op that runs here, in and out of inference mode, with and without a plan."""
    found = []
    for inference_mode in (True, False):
        with torch.inference_mode(inference_mode):
            for name, planned, op, backend in _ops():
                step = _step(backend)
                sides = _sides(name, op, step)
                with ExitStack() as stack:
                    if planned:
                        context = ForwardContext({(0, backend): step.plan})
                        stack.enter_context(set_forward_context(context))
                    timed = per_call_us(sides, rounds=rounds, calls=calls)
                found.append(_summarise(name, backend, inference_mode, planned, timed))
    return found


def _ops() -> Iterator[tuple[str, bool, Callable[..., None], str]]:
    """(op name, planned, op, backend that runs it)."""
    default = select_backend(_config()).name
    ops = torch.ops.attnbackend
    # A backend's ops exist once it is resolved.
    classes = [resolve_backend(name) for name in ("CPU_ATTN", "TORCH_SDPA")]
    backends = [c.get_name() for c in classes if c.unavailable_reason("cpu") is None]
    for planned in (True, False):
        yield "attention", planned, ops.attention.default, default
        for backend in backends:
            name = f"{backend.lower()}_forward"
            yield name, planned, getattr(ops, name).default, backend
    yield "kv_cache_update", False, ops.kv_cache_update.default, default


def _sides(name: str, op: Callable[..., None], step: _Step) -> dict[str, Callable[[], object]]:
    nothing = OptionalTensors()
    if name.endswith("kv_cache_update"):
        new = step.write
        return {
            "op": lambda: op(*new),
            "direct": lambda: step.impl.kv_cache_update(*new, tensors=nothing),
        }
    query, key, value, kv_cache, output = step.arguments[:5]
    return {
        "op": lambda: op(*step.arguments, scale=_SCALE, group=0),
        "direct": lambda: step.impl.forward(query, key, value, kv_cache, step.plan, output, nothing),
    }


def _summarise(
    name: str, backend: str, inference_mode: bool, planned: bool, timed: dict[str, list[float]]
) -> OpOverhead:
    extra = [a - b for a, b in zip(timed["op"], timed["direct"], strict=True)]
    spreads = (Spread.of(timed["op"]), Spread.of(timed["direct"]), Spread.of(extra))
    return OpOverhead(name, backend, inference_mode, planned, *spreads)


def _config() -> AttentionSelectorConfig:
    return AttentionSelectorConfig.dense(
        device_type="cpu", head_size=_HEAD_SIZE, num_heads=_HEADS, num_kv_heads=_KV_HEADS,
        dtype=torch.float32, kv_cache_dtype="auto", block_size=_BLOCK_SIZE,
    )  # fmt: skip


def _step(backend_name: str) -> _Step:
    backend = resolve_backend(backend_name)
    params = AttentionParams(
        num_heads=_HEADS, num_kv_heads=_KV_HEADS, head_size=_HEAD_SIZE, dtype=torch.float32,
        kv_cache_dtype="auto", block_size=_BLOCK_SIZE, device_type="cpu", scale=_SCALE,
    )  # fmt: skip
    cpu, spec = torch.device("cpu"), spec_of(params)
    kv_cache = allocate_kv_cache(backend, spec, _WIDTH + 1, cpu)
    query_1HD = torch.randn(1, _HEADS, _HEAD_SIZE)
    key_1KD, value_1KD = torch.randn(2, 1, _KV_HEADS, _HEAD_SIZE).unbind()
    starts, lens = _int32([0, 1]), _int32([_SEQ_LEN])
    table_1W = _int32([list(range(1, _WIDTH + 1))])
    common = CommonAttentionMetadata(
        query_start_loc=starts, seq_lens=lens, block_table=table_1W, num_reqs=1,
        num_actual_tokens=1, max_query_len=1, max_seq_len=_SEQ_LEN, query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
    )  # fmt: skip
    plan = backend.get_builder_cls()(params, spec, None, cpu).build(0, common)
    output_1HD = torch.empty_like(query_1HD)
    slot = torch.tensor([2 * _BLOCK_SIZE + (_SEQ_LEN - 1) % _BLOCK_SIZE])
    impl = backend.get_impl_cls()(params)
    assert isinstance(impl, AttentionImpl)
    arguments = (query_1HD, key_1KD, value_1KD, kv_cache, output_1HD, starts, lens, table_1W)
    return _Step(impl, plan, arguments, (key_1KD, value_1KD, kv_cache, slot))


def _int32(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
