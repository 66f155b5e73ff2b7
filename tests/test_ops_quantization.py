"""Scaled queries and quantised outputs: against the unquantised result of the same op, and by opcheck."""

from __future__ import annotations

import pytest
import torch
from op_cases import DENSE_BACKENDS, DEVICE, case, forward_op, require

from attnbackend.testing import PagedBatch, audit_op, make_batch, op_kwargs, op_positional

HEADS, HEAD_SIZE, GROUPS = 4, 64, 2


def _batch(feature: str = "window_cap_and_sinks", batch: str = "padded") -> PagedBatch:
    b = make_batch(case(feature, batch), DEVICE)
    b.kv_cache.nan_to_num_(0.5)
    for tensor in (b.query, b.output, b.lse):
        assert tensor is not None
        tensor.nan_to_num_(0.5)
    return b


def _exact(backend: str, b: PagedBatch, query: torch.Tensor | None = None) -> torch.Tensor:
    output = torch.full_like(b.output, float("nan"))
    args = list(op_positional(b))
    args[0], args[4] = args[0] if query is None else query, output
    forward_op(backend)(*args, **{**op_kwargs(b), "lse": None})
    return output


def _call(b: PagedBatch, **changes: object) -> tuple[list[object], dict[str, object]]:
    args = list(op_positional(b))
    args[4] = changes.pop("output", args[4])
    return args, {**op_kwargs(b), **changes}


@pytest.mark.parametrize("backend", DENSE_BACKENDS)
def test_a_query_scale_scales_the_query(backend: str) -> None:
    require(backend)
    b = _batch()
    expected = _exact(backend, b, query=b.query * 0.25)
    args, kwargs = _call(b, q_scale=torch.full((1,), 0.25, device=DEVICE))
    forward_op(backend)(*args, **kwargs)
    torch.testing.assert_close(b.output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", DENSE_BACKENDS)
def test_a_query_scale_and_a_key_scale_multiply(backend: str) -> None:
    require(backend)
    b = make_batch(case("fp8_per_head_scales", "decode", lse=False), DEVICE)
    expected = _exact(backend, b, query=b.query * 4.0)
    args, kwargs = _call(b, q_scale=torch.full((1,), 4.0, device=DEVICE))
    forward_op(backend)(*args, **kwargs)
    torch.testing.assert_close(b.output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", DENSE_BACKENDS)
def test_a_query_in_float8_is_its_values_times_their_scale(backend: str) -> None:
    require(backend)
    b = _batch()
    stored = b.query.to(torch.float8_e4m3fn)
    expected = _exact(backend, b, query=stored.float() * 0.25)
    args, kwargs = _call(b, q_scale=torch.full((1,), 0.25, device=DEVICE))
    forward_op(backend)(stored, *args[1:], **kwargs)
    torch.testing.assert_close(b.output, expected, rtol=1e-5, atol=1e-6)


def test_beside_a_query_in_float8_something_must_have_the_model_s_type() -> None:
    b = _batch()
    scale = torch.ones(1, device=DEVICE)
    args, kwargs = _call(b, output=b.output.to(torch.float8_e4m3fn), output_scale=scale, lse=None)
    with pytest.raises(ValueError, match="nothing else here has the model's type, give key"):
        forward_op("TORCH_SDPA")(b.query.to(torch.float8_e4m3fn), None, None, *args[3:], **kwargs)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8], ids=str)
@pytest.mark.parametrize("backend", DENSE_BACKENDS)
def test_a_static_output_scale_rounds_once_and_saturates(backend: str, dtype: torch.dtype) -> None:
    require(backend)
    b = _batch()
    exact, scale = _exact(backend, b), torch.full((1,), 0.0005, device=DEVICE)
    output = torch.zeros(exact.shape, dtype=dtype, device=DEVICE)
    args, kwargs = _call(b, output=output, output_scale=scale, lse=None)
    forward_op(backend)(*args, **kwargs)
    stored = torch.float8_e4m3fn if dtype is torch.uint8 else dtype
    limit = torch.finfo(stored).max
    expected = (exact.float() / scale).clamp(-limit, limit).to(stored)
    assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))
    if stored is torch.float8_e4m3fn:
        assert float(expected.float().abs().max()) == limit, "nothing saturates: the test is too weak"


@pytest.mark.parametrize("backend", DENSE_BACKENDS)
def test_block_scales_are_each_group_s_own_and_zero_rows_stay_zero(backend: str) -> None:
    require(backend)
    b = _batch()
    exact = _exact(backend, b)
    output = torch.zeros(exact.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.full((len(exact), GROUPS), float("nan"), device=DEVICE)
    args, kwargs = _call(b, output=output, output_block_scale=scales)
    forward_op(backend)(*args, **kwargs)
    groups = exact.reshape(len(exact), GROUPS, -1)
    torch.testing.assert_close(scales, groups.abs().amax(-1) / 448.0)
    real = output.float().reshape(groups.shape) * scales.unsqueeze(-1)
    assert float((real - groups).abs().max()) <= float(groups.abs().max()) * 2**-4
    assert bool((real[exact.flatten(1).abs().amax(-1) == 0] == 0).all())


@pytest.mark.parametrize("backend", ["agnostic", *DENSE_BACKENDS])
def test_opcheck_and_the_state_audit_pass_with_every_optional_tensor(backend: str) -> None:
    if backend != "agnostic":
        require(backend)
    one = torch.full((1,), 0.5, device=DEVICE)
    for scales in (
        {"output_scale": one},
        {"output_block_scale": torch.full((len(_batch().query), GROUPS), 9.0, device=DEVICE)},
    ):
        b = _batch()
        args, kwargs = _call(
            b, output=torch.full(b.output.shape, 1, dtype=torch.uint8, device=DEVICE),
            q_scale=one, k_scale=one, v_scale=one,
            alibi_slopes=torch.full((HEADS,), 0.1, device=DEVICE), **scales,
        )  # fmt: skip
        torch.library.opcheck(forward_op(backend), tuple(args), kwargs)
        audit_op(forward_op(backend), args, kwargs).assert_ok()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_scale": torch.ones(1)}, "dtype of output is torch.float32"),
        ({"q_scale": torch.ones(HEADS)}, "shape of q_scale"),
        (
            {
                "output": torch.zeros(6, HEADS, HEAD_SIZE, dtype=torch.uint8),
                "output_block_scale": torch.ones(6, 7),
            },
            "groups of output_block_scale is 7",
        ),
        (
            {
                "output": torch.zeros(6, HEADS, HEAD_SIZE, dtype=torch.uint8),
                "output_scale": torch.ones(1),
                "output_block_scale": torch.ones(6, 2),
            },
            "both given",
        ),
    ],
    ids=["float_output", "scale_a_head", "groups_that_do_not_divide", "both_scales"],
)
def test_scales_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    b = _batch()
    changes = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}
    args, kwargs = _call(b, **changes)
    with pytest.raises(ValueError, match=message):
        forward_op("agnostic")(*args, **kwargs)
