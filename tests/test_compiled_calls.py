"""Compiled functions that C++ calls by tvm-ffi, as FlashInfer's are; on the CPU stand-ins for both."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from ctypes import c_void_p, cast
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from library_fakes import FakeFlashInferBackend, FakeFunction, FakeObject, fake_ffi, fake_flashinfer
from step_layers import attend, layer, other_layer, planned
from torch import Tensor

from attnbackend import ForwardContext, register_backend, set_forward_context
from attnbackend.backends.flashinfer import planning
from attnbackend.backends.flashinfer.compiled_call import compiled_call
from attnbackend.backends.flashinfer.impl import FlashInferImpl
from attnbackend.kernels import triton
from attnbackend.native_calls import Argument, python_only
from attnbackend.ops import lessons
from attnbackend.ops.library_calls import serve_library_calls
from attnbackend.registry import registry_scope

NAME = "FAKE_FLASHINFER"
REASON = serve_library_calls(NAME, "cpu") or triton.unavailable_reason("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available() or REASON is not None, reason=str(REASON))


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    functions = fake_ffi()
    ffi = lessons._Ffi(*(None if f is None else cast(f, c_void_p) for f in functions))
    monkeypatch.setattr(lessons, "_ffi_functions", lambda: ffi)
    kept: list[FakeObject] = []  # as the library does for those who count themselves in

    def object_of(tensor: Tensor) -> FakeObject:
        kept.append(FakeObject(tensor))
        return kept[-1]

    monkeypatch.setattr(lessons, "_ffi_tensor", object_of)
    lessons._shared_ffi.cache_clear()
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
    monkeypatch.setattr(planning, "shared_workspace", lambda *_: torch.zeros(16, dtype=torch.uint8))
    with registry_scope(), torch.no_grad():
        register_backend(NAME)(FakeFlashInferBackend)
        yield
        with set_forward_context(ForwardContext()):  # forgets while the functions are there
            attend(layer(), NAME)
    lessons._shared_ffi.cache_clear()


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The outputs of calls that Python served."""
    outputs: list[Tensor] = []
    inner = FlashInferImpl.attend

    def watched(self: FlashInferImpl, *args: Any) -> None:
        outputs.append(args[5])
        inner(self, *args)

    monkeypatch.setattr(FlashInferImpl, "attend", watched)
    return outputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_other_layers_of_a_step(
    dtype: torch.dtype, captured: bool, layout: str, in_python: list[Tensor]
) -> None:
    batch = layer("no_lse", dtype=dtype, layout=layout)
    layers = [batch, other_layer(batch, 0.5), other_layer(batch, -2.0)]
    with set_forward_context(planned(batch, NAME, captured=captured)):
        with python_only():
            expected = [attend(x, NAME) for x in layers]
        in_python.clear()
        own = [attend(x, NAME) for x in layers]
    assert len(in_python) == 1
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


@pytest.mark.parametrize("case", ["strided_tensors", "fp8_e4m3", "plain", "sinks"])
def test_more_than_the_kernel_s_call_is_python_s(
    case: str, in_python: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "finish_attention", lambda *args, **more: None)
    batch = layer(case, lse=case == "plain")
    with set_forward_context(planned(batch, NAME)):
        for _ in range(3):
            attend(batch, NAME)
    assert len(in_python) == 3


def test_a_plan_anew_is_learned_anew(in_python: list[Tensor]) -> None:
    batch = layer()
    context = planned(batch, NAME)
    planner = context.plans[0, NAME].planner  # type: ignore[attr-defined]
    with set_forward_context(context):
        for _ in range(2):
            attend(batch, NAME)
        planner._begin_plan()
        for _ in range(2):
            attend(batch, NAME)
    assert len(in_python) == 2


def test_what_the_function_refuses_python_repeats(
    in_python: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = layer()

    def fail(*args: object) -> None:
        raise RuntimeError("the device is on fire")

    with set_forward_context(planned(batch, NAME)):
        attend(batch, NAME)
        with monkeypatch.context() as patch:
            for function in list(FakeFunction.known.values()):
                patch.setattr(function, "run", fail)
            with pytest.raises(RuntimeError, match="the device is on fire"):
                attend(batch, NAME)
        for _ in range(2):
            attend(batch, NAME)
    assert len(in_python) == 4, "and does so until the plan goes"


def test_functions_are_kept_no_longer_than_the_step() -> None:
    batch = layer()
    context = planned(batch, NAME)
    function = context.plans[0, NAME].planner.wrapper._function  # type: ignore[attr-defined]
    with set_forward_context(context):
        attend(batch, NAME)
        assert function.header.references == 3, "as the function and as an argument"
    with set_forward_context(ForwardContext()):
        attend(batch, NAME)
    assert function.header.references == 1


# --- what a wrapper calls


def wrapper_of(wrapping: Any) -> SimpleNamespace:
    wrapper = SimpleNamespace(_cached_module=SimpleNamespace(paged_run=wrapping))
    wrapper.run = lambda q, sides, out: wrapper._cached_module.paged_run(q, *sides, out)
    return wrapper


def tensors() -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    cache = torch.zeros(2, 2, 16, 1, 8)
    return torch.zeros(1, 1, 8), (cache[:, 0], cache[:, 1]), torch.zeros(1, 1, 8)


def wrapping_around(paged_run_func: Any, change: Any = lambda *arguments: arguments) -> Any:
    def paged_run(*arguments: object) -> None:
        paged_run_func(*change(*arguments), 7, None)

    return paged_run


def never(*arguments: object) -> None:
    raise AssertionError("only listened to")


def test_what_a_wrapper_calls_is_heard_without_calling_it() -> None:
    wrapper = wrapper_of(wrapping_around(never))
    module = wrapper._cached_module
    call = compiled_call(wrapper, *tensors())
    assert call is not None
    assert call.function is never
    names = Argument("query"), Argument("kv_cache", 0), Argument("kv_cache", 1), Argument("output")
    assert call.arguments == (*names, 7, None)
    assert wrapper._cached_module is module


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, out: (q.clone(), k, v, out), lambda q, k, v, out: (q, k, v),
        lambda q, k, v, out: (q, k, v, out, q.view(-1)), lambda q, k, v, out: (q, k.transpose(1, 2), v, out),
    ],
    ids=["a copy", "no output", "a view beside", "a view instead"],
)  # fmt: skip
def test_a_call_in_other_terms_is_not_known(change: Any) -> None:
    assert compiled_call(wrapper_of(wrapping_around(never, change)), *tensors()) is None


def test_another_wrapping_is_not_known() -> None:
    def other(*arguments: object) -> None:
        never(*arguments)

    assert compiled_call(wrapper_of(other), *tensors()) is None
    assert compiled_call(wrapper_of(never), *tensors()) is None
    assert compiled_call(SimpleNamespace(run=never), *tensors()) is None
