"""What a backend of latent attention refuses, and what its plans change: nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attnbackend._torch_compat import fake_mode
from attnbackend.config import set_config
from attnbackend.forward_context import ForwardContext, set_forward_context
from attnbackend.impl import AttentionParams, MLADims
from attnbackend.kv_cache import KV_CACHE_DTYPES, spec_of
from attnbackend.metadata import BatchLimits, CommonAttentionMetadata
from attnbackend.mla_metadata import MLAMetadataBuilder
from attnbackend.ops.mla_bind import run_mixed, run_mqa
from attnbackend.ops.mla_calls import MLAAttentionCall, MLAMixedCall
from attnbackend.testing.conformance.batch_shapes import BATCHES, DECODE, MIXED
from attnbackend.testing.conformance.bits import differing, same_bits
from attnbackend.testing.conformance.latent.base import LatentCheck
from attnbackend.testing.conformance.latent.case import LatentCase, LatentRefusal
from attnbackend.testing.conformance.latent.cases import LatentCases, latent_config_of
from attnbackend.testing.conformance.latent.subject import LatentSubject
from attnbackend.testing.conformance.sync_watch import watched
from attnbackend.testing.mla_batches import MLABatch, mixed_arguments, mqa_arguments
from attnbackend.testing.mla_judgement import assert_mixed_within_rule, assert_mqa_within_rule
from attnbackend.types import AttentionCGSupport, AttentionType, describe

__all__ = ["Plan", "Refusal"]

_NEVER: dict[str, Any] = {
    "use_mla": False, "num_kv_heads": 2, "has_alibi": True, "sliding_window": 7, "attention_chunk_size": 8,
    "logits_soft_cap": 5.0, "has_sinks": True, "causal": False, "has_bidirectional_ranges": True,
    "attn_type": AttentionType.ENCODER_ONLY, "device_type": "nowhere",
}  # fmt: skip
"""What no layer of latent attention has: the ops have no argument for it, so selection must refuse it."""


class Refusal(LatentCheck):
    name = "refusal"
    proves = (
        "Whatever is not claimed, and all that latent attention never has, is refused with field and value."
    )

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        (plain,) = generate.case("plain", DECODE)
        mla = replace(plain.mla, lse=False)

        def refusal(field: str, value: Any, changes: dict[str, Any], asked: dict[str, Any]) -> LatentRefusal:
            return LatentRefusal(
                id=f"{field}-{describe(value)}", feature="unclaimed", mla=replace(mla, **changes),
                field=field, asked=asked,
            )  # fmt: skip

        for field, value in _NEVER.items():
            yield refusal(field, value, {}, {field: value})
        sparse = generate.backend.is_sparse
        yield refusal("use_sparse", not sparse, {"top_k": None if sparse else 4}, {"use_sparse": not sparse})
        for field, value, changes in _values(generate):
            yield refusal(field, value, changes, {})

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        assert isinstance(case, LatentRefusal)
        config = latent_config_of(case.mla, subject.device.type, **case.asked)
        reasons = subject.backend.validate_configuration(config)
        findings = []
        if not any(reason.field == case.field for reason in reasons):
            given = list(map(str, reasons))
            findings.append(f"validate_configuration gives no reason against {case.field}: {given}")
        if not case.asked or case.field == "use_sparse":
            findings += _accepted_calls(subject, case)
        return findings


def _values(generate: LatentCases) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """One value of each field that is not claimed, with the changes of the case that ask for it."""
    backend = generate.backend
    for size in (1, 7, 8, 24, 48, 96):
        if not backend.supports_block_size(size):
            yield "block_size", size, {"block_size": size}
            break
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if not backend.supports_dtype(dtype):
            yield "dtype", dtype, {"dtype": dtype}
            break
    for rank in (24, 33, 100, 2048):
        size = rank + generate.base["qk_rope_head_dim"]
        if not backend.supports_head_size(size):
            yield "head_size", size, {"kv_lora_rank": rank}
            break
    for name in KV_CACHE_DTYPES:
        if not backend.supports_kv_cache_dtype(name):
            packed = {"kv_lora_rank": 512, "qk_rope_head_dim": 64} if name == "fp8_ds_mla" else {}
            yield "kv_cache_dtype", name, {"kv_cache_dtype": name, **packed}


def _accepted_calls(subject: LatentSubject, case: LatentRefusal) -> Iterator[str]:
    batch = subject.batch(case.mla)
    for role, (op, (positional, keyword)) in subject.calls(batch).items():
        if role == "forward_mixed" and case.field == "use_sparse":
            continue
        yield from _not_refused(f"{role}", op, positional, keyword, case.field)
        with fake_mode() as mode:
            args = [mode.from_tensor(x) for x in positional]
            own = {k: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for k, x in keyword.items()}
            yield from _not_refused(f"the fake of {role}", op, args, own, case.field)
    if not bool(batch.latent_output.isnan().all() and batch.output.isnan().all()):
        yield "an op wrote to its output before it refused"


def _not_refused(who: str, op: Any, args: Sequence[Any], kwargs: dict[str, Any], field: str) -> Iterator[str]:
    try:
        op(*args, **kwargs)
    except ValueError as error:
        if f"{field}=" not in str(error) or "allowed" not in str(error):
            yield f"{who} refuses without saying '{field}=... (allowed: ...)': {error}"
    except Exception as error:
        yield f"{who} fails with {type(error).__name__} instead of a ValueError with reasons: {error}"
    else:
        yield f"{who} accepts a call with {field} that the class does not claim"


class Plan(LatentCheck):
    name = "plan"
    proves = (
        "With a step's plan from one builder, batch after batch, the answers are as right as without; a "
        "second call waits for nothing and gives equal bits where graphs and determinism are claimed."
    )

    def cases(self, generate: LatentCases) -> Iterator[LatentCase]:
        for batch in BATCHES:
            yield from generate.case("plain", batch)
        yield from generate.some(("layers_interleaved", MIXED), ("cache_fp8_scaled", MIXED))

    def run(self, subject: LatentSubject, case: LatentCase) -> Sequence[str]:
        """Another batch goes first: what a builder keeps of it must not be seen in the next."""
        builder, findings = _builder(subject, case), list[str]()
        other = {"query_lens": (1, 1, 20), "context_lens": (60, 3, 31), "num_padded_rows": 2, "seed": 99}
        for mla in (replace(case.mla, **other), case.mla):  # type: ignore[arg-type]
            batch = subject.batch(mla)
            with set_config(mla_context_tokens=32):
                plan = builder.build(0, _common(batch))
            with set_forward_context(ForwardContext({(0, subject.name): plan})):
                for op, (positional, keyword) in subject.calls(batch).values():
                    op(*positional, **keyword, group=0)
                findings += _called_again(
                    subject, batch, builder.get_cudagraph_support(builder.kv_cache_spec)
                )
            assert_mqa_within_rule(batch)
            if subject.mixed is not None:
                assert_mixed_within_rule(batch)
        return findings


def _called_again(subject: LatentSubject, batch: MLABatch, level: AttentionCGSupport) -> Iterator[str]:
    """A model calls `forward_mixed` in steps with prompts alone, which graphs hold at the highest level."""
    for role, call in _direct_calls(subject, batch).items():
        output = batch.output if role == "forward_mixed" else batch.latent_output
        needed = AttentionCGSupport.ALWAYS if role == "forward_mixed" else _least_support(batch)
        first, in_graphs = output.clone(), level >= needed
        with watched(subject.device) if in_graphs else nullcontext(list[str]()) as seen:
            call()
        yield from (f"{role}, claimed for graphs: {where}" for where in seen)
        if subject.backend.is_deterministic and not seen and not same_bits(output, first):
            yield f"{role}: equal calls, other bits: {differing(output, first)}"


def _direct_calls(subject: LatentSubject, batch: MLABatch) -> dict[str, Callable[[], None]]:
    """As the ops run them, by role."""
    args: Any
    kwargs: Any
    args, kwargs = mqa_arguments(batch)
    on_latents = MLAAttentionCall(*args, **kwargs)._replace(group=0)
    calls: dict[str, Callable[[], None]] = {"forward_mqa": partial(run_mqa, subject.name, on_latents)}
    if subject.mixed is not None:
        args, kwargs = mixed_arguments(batch)
        step = MLAMixedCall(*args, **kwargs)._replace(group=0)
        calls["forward_mixed"] = partial(run_mixed, subject.name, step)
    return calls


def _least_support(batch: MLABatch) -> AttentionCGSupport:
    """With which a graph may hold the batch."""
    lengths = set(batch.case.query_lens)
    if lengths == {1}:
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return AttentionCGSupport.UNIFORM_BATCH if len(lengths) == 1 else AttentionCGSupport.ALWAYS


def _builder(subject: LatentSubject, case: LatentCase) -> MLAMetadataBuilder:
    mla = case.mla
    dims = MLADims(
        kv_lora_rank=mla.kv_lora_rank, qk_rope_head_dim=mla.qk_rope_head_dim,
        qk_nope_head_dim=mla.qk_nope_head_dim, v_head_dim=mla.v_head_dim,
    )  # fmt: skip
    params = AttentionParams(
        num_heads=mla.num_heads, num_kv_heads=1, head_size=mla.head_size, dtype=mla.dtype,
        kv_cache_dtype=mla.kv_cache_dtype, block_size=mla.block_size, device_type=subject.device.type,
        scale=mla.softmax_scale, mla=dims,
    )  # fmt: skip
    limits = BatchLimits(max_num_seqs=64, max_num_tokens=512, max_model_len=2048)
    builder = subject.backend.get_builder_cls()(params, spec_of(params), limits, subject.device)
    assert isinstance(builder, MLAMetadataBuilder)
    return builder


def _common(batch: MLABatch) -> CommonAttentionMetadata:
    """As a runner gives it, with its copies on the host."""
    return CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc, seq_lens=batch.seq_lens, block_table=batch.block_table,
        slot_mapping=batch.slot_mapping, num_reqs=len(batch.case.query_lens),
        num_actual_tokens=len(batch.slot_mapping), max_query_len=max(batch.case.query_lens),
        max_seq_len=max(batch.case.seq_lens), query_start_loc_cpu=batch.query_start_loc.cpu(),
        seq_lens_cpu=batch.seq_lens.cpu(),
    )  # fmt: skip
