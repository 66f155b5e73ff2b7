"""What is not claimed must be refused, with reasons that carry values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from attnbackend._torch_compat import fake_mode
from attnbackend.testing.conformance.case import ConformanceCase, RefusalCase
from attnbackend.testing.conformance.cases import CaseGenerator, config_of
from attnbackend.testing.conformance.checks.base import Check
from attnbackend.testing.conformance.subject import Subject
from attnbackend.testing.conformance.unclaimed import unclaimed
from attnbackend.testing.judgement import assert_attention_within_rule

__all__ = ["Refusal"]


class Refusal(Check):
    name = "refusal"
    proves = "Whatever is not claimed is a ValueError that names the field and its value, also while tracing."

    def cases(self, generate: CaseGenerator) -> Iterator[ConformanceCase]:
        plain = next(generate.case("plain", "decode"))
        attention = replace(plain.attention, lse=False)
        yield from unclaimed(generate.backend, attention)

    def run(self, subject: Subject, case: ConformanceCase) -> Sequence[str]:
        assert isinstance(case, RefusalCase)
        if case.field == "kv_cache_layout":
            return [*_not_a_reason(subject, case), *_silently_wrong(subject, case)]
        if case.field in ("use_mla", "use_sparse", "device_type"):
            return _not_a_reason(subject, case)
        batch = subject.batch(case.attention)
        extras = {name: _given(subject, value) for name, value in case.extras.items()}
        if case.field == "has_quantized_query":
            extras["query"] = batch.query.to(torch.float8_e4m3fn)
        if "output_scale" in extras or "output_block_scale" in extras:
            extras["output"] = torch.zeros(batch.output.shape, dtype=torch.uint8, device=subject.device)
        args, kwargs = subject.forward_args(batch, **extras)
        findings = list(_not_refused("the op", subject, case, args, kwargs))
        if not bool(batch.output.isnan().all()):
            findings.append("the op wrote to output before it refused")
        with fake_mode() as mode:
            args, kwargs = _faked(mode, args, kwargs)
            findings += _not_refused("its fake", subject, case, args, kwargs)
        return findings


def _given(subject: Subject, value: Any) -> Any:
    if isinstance(value, tuple):
        return torch.full(value, 1.0, device=subject.device)
    return value


def _not_refused(
    who: str, subject: Subject, case: RefusalCase, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[str]:  # fmt: skip
    try:
        subject.forward(*args, **kwargs)
    except ValueError as error:
        if f"{case.field}=" not in str(error) or "allowed" not in str(error):
            yield f"{who} refuses without saying '{case.field}=... (allowed: ...)': {error}"
    except Exception as error:
        yield f"{who} fails with {type(error).__name__} instead of a ValueError with reasons: {error}"
    else:
        yield f"{who} accepts a call with {case.field} that the class does not claim"


def _faked(mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    def fake(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, torch.Tensor) else x

    return tuple(map(fake, args)), {name: fake(x) for name, x in kwargs.items()}


def _silently_wrong(subject: Subject, case: RefusalCase) -> Iterator[str]:
    """A cache of an unclaimed layout has strides that an op call cannot name: refuse it, or read it right."""
    batch = subject.batch(replace(case.attention, layout=case.extras["kv_cache_layout"].value))
    try:
        subject.run_forward(batch)
    except ValueError:
        return
    try:
        assert_attention_within_rule(batch)
    except AssertionError as error:
        yield (
            f"a cache of the unclaimed layout {batch.case.layout} is neither refused nor read right; check "
            f"strides in forward() and raise ValueError: {error}"
        )


def _not_a_reason(subject: Subject, case: RefusalCase) -> Sequence[str]:
    """Fields that no op call sets; selection asks by them."""
    config = config_of(case.attention, subject.device.type, **case.extras)
    reasons = subject.backend.validate_configuration(config)
    if any(reason.field == case.field for reason in reasons):
        return ()
    return [f"validate_configuration gives no reason against {case.extras}: {list(map(str, reasons))}"]
