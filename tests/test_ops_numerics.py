"""Every op against float64, over features, batches, layouts and types, by the relative rule."""

from __future__ import annotations

import pytest
import torch
from op_cases import (
    BATCHES,
    DENSE_BACKENDS,
    DEVICE,
    FEATURES,
    case,
    dtypes,
    forward_op,
    require,
    update_op,
)

from attnbackend import set_config
from attnbackend.ops import bind
from attnbackend.ops.calls import AttentionCall
from attnbackend.testing import (
    AttentionCase,
    assert_attention_within_rule,
    expected_kv_cache,
    kv_update_kwargs,
    kv_update_positional,
    make_batch,
    op_kwargs,
    op_positional,
)


def _check(backend: str, attention_case: AttentionCase) -> None:
    require(backend, attention_case.dtype)
    batch = make_batch(attention_case, DEVICE)
    forward_op(backend)(*op_positional(batch), **op_kwargs(batch))
    assert_attention_within_rule(batch)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("backend", DENSE_BACKENDS)
def test_forward_equals_float64_for_each_feature(backend: str, feature: str) -> None:
    _check(backend, case(feature))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("backend", DENSE_BACKENDS)
def test_forward_equals_float64_for_each_batch(backend: str, batch: str) -> None:
    _check(backend, case("window_cap_and_sinks", batch))


@pytest.mark.parametrize("feature", ["chunks_cap_and_sinks", "ranges_over_window", "encoder_window", "cross"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("backend", DENSE_BACKENDS)
def test_forward_equals_float64_for_each_kind_and_batch(backend: str, batch: str, feature: str) -> None:
    _check(backend, case(feature, batch))


@pytest.mark.parametrize("feature", ["plain", "fp8_e4m3", "soft_cap", "no_lse", "encoder"])
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("backend", DENSE_BACKENDS)
def test_forward_equals_float64_for_each_dtype(backend: str, dtype: torch.dtype, feature: str) -> None:
    _check(backend, case(feature, dtype=dtype))


@pytest.mark.parametrize("kv_cache_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("backend", DENSE_BACKENDS)
def test_a_cache_of_another_float_type_is_read(backend: str, kv_cache_dtype: str) -> None:
    _check(backend, case("plain", kv_cache_dtype=kv_cache_dtype))


@pytest.mark.parametrize("feature", ["plain", "no_lse", "window", "not_causal"])
def test_the_agnostic_op_runs_on_the_selected_backend(feature: str) -> None:
    batch = make_batch(case(feature), DEVICE)
    torch.ops.attnbackend.attention(*op_positional(batch), **op_kwargs(batch))
    assert_attention_within_rule(batch)


@pytest.mark.parametrize(
    "feature",
    [
        "plain", "hnd", "layers_interleaved", "keys_before_values", "strided_tensors",
        "fp8_e4m3", "fp8_e5m2", "fp8_per_head_scales",
    ],
)  # fmt: skip
@pytest.mark.parametrize("batch", ["mixed", "padded", "one_token"])
@pytest.mark.parametrize("backend", ["agnostic", *DENSE_BACKENDS])
def test_a_write_is_exact_and_touches_nothing_else(backend: str, batch: str, feature: str) -> None:
    if backend != "agnostic":
        require(backend)
    b = make_batch(case(feature, batch, new_tokens_written=False, raw_new_tokens=True), DEVICE)
    expected, rest = expected_kv_cache(b), b.kv_buffer.clone()
    update_op(backend)(*kv_update_positional(b), **kv_update_kwargs(b))
    assert torch.equal(_bytes(b.kv_cache), _bytes(expected))
    b.kv_cache.copy_(make_batch(b.case, DEVICE).kv_cache)
    assert torch.equal(_bytes(b.kv_buffer), _bytes(rest)), "another layer's pages were written"


@pytest.mark.parametrize("writer", DENSE_BACKENDS)
@pytest.mark.parametrize("reader", DENSE_BACKENDS)
@pytest.mark.parametrize("feature", ["hnd", "fp8_per_head_scales"])
def test_what_one_backend_wrote_another_reads(writer: str, reader: str, feature: str) -> None:
    require(writer)
    require(reader)
    b = make_batch(case(feature, new_tokens_written=False), DEVICE)
    update_op(writer)(*kv_update_positional(b), **kv_update_kwargs(b))
    forward_op(reader)(*op_positional(b), **op_kwargs(b))
    assert_attention_within_rule(b)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize(("backend", "bindings"), [("agnostic", 2), ("TORCH_SDPA", 1)])
def test_a_changed_choice_of_library_binds_anew_what_may_depend_on_it(
    backend: str, bindings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[str | None] = []
    original = bind._bind_attention

    def counted(name: str | None, call: AttentionCall) -> object:
        bound.append(name)
        return original(name, call)

    monkeypatch.setattr(bind, "_bind_attention", counted)
    monkeypatch.setattr(bind, "_ATTENTION", {})
    batch = make_batch(case("plain"), "cpu")
    for choice in (None, "2", "2"):
        with set_config(flash_attn=choice):
            forward_op(backend)(*op_positional(batch), **op_kwargs(batch))
    assert len(bound) == bindings


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["agnostic", *DENSE_BACKENDS])
def test_autocast_of_the_caller_does_not_reach_into_the_ops(
    backend: str, compiled: bool, fresh_compiler: None
) -> None:
    """Kernels in torch multiplied float32 in bfloat16 under it: LSEs were off by 1e-3."""
    attend = torch.ops.attnbackend.attention.default
    if backend != "agnostic":
        require(backend)
        attend = forward_op(backend)
    batch = make_batch(case("plain"), DEVICE)

    def call(*args: torch.Tensor) -> None:
        attend(*args, **op_kwargs(batch))

    run = torch.compile(call, backend="aot_eager") if compiled else call
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        run(*op_positional(batch))
        assert torch.is_autocast_enabled(DEVICE)
    assert_attention_within_rule(batch)
