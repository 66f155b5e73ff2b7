"""What a backend of latent attention refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbackend._torch_compat import fake_mode
from attnbackend.kv_cache import KV_CACHE_DTYPES
from attnbackend.testing.conformance.base_subject import OpCall
from attnbackend.testing.conformance.batch_shapes import DECODE
from attnbackend.testing.conformance.latent.base import LatentCheck
from attnbackend.testing.conformance.latent.case import LatentCase, LatentRefusal
from attnbackend.testing.conformance.latent.cases import LatentCases, latent_config_of
from attnbackend.testing.conformance.latent_subject import LatentSubject
from attnbackend.types import AttentionType, describe

__all__ = ["Refusal"]

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
    for role, call in subject.calls(batch).items():
        if role == "forward_mixed" and case.field == "use_sparse":
            continue
        yield from _not_refused(role, call, case.field)
        with fake_mode() as mode:
            own = {k: mode.from_tensor(x) if isinstance(x, Tensor) else x for k, x in call.given.items()}
            yield from _not_refused(f"the fake of {role}", call.with_given(**own), case.field)
    if not bool(batch.latent_output.isnan().all() and batch.output.isnan().all()):
        yield "an op wrote to its output before it refused"


def _not_refused(who: str, call: OpCall, field: str) -> Iterator[str]:
    try:
        call()
    except ValueError as error:
        if f"{field}=" not in str(error) or "allowed" not in str(error):
            yield f"{who} refuses without saying '{field}=... (allowed: ...)': {error}"
    except Exception as error:
        yield f"{who} fails with {type(error).__name__} instead of a ValueError with reasons: {error}"
    else:
        yield f"{who} accepts a call with {field} that the class does not claim"
