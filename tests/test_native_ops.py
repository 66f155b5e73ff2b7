"""Calls that C++ serves: equal to Python's bit for bit, and left to Python where it must look."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from ctypes import CDLL
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mla_op_cases import FEATURES as MLA_FEATURES
from mla_op_cases import mla_case, mla_op
from op_cases import FEATURES, case, forward_op, update_op
from test_bad_input import ATTENTION_REFUSALS, NAMES, WRITE_REFUSALS
from test_cpu_kernel import thread_count
from torch import Tensor

from attnbackend import register_backend, set_config
from attnbackend.backends import cpu_attn
from attnbackend.backends.mla import cpu_mla
from attnbackend.kernels.cpu import BuildError
from attnbackend.native_calls import python_only
from attnbackend.ops import cpu_linear, native
from attnbackend.registry import registry_scope
from attnbackend.testing import (
    assert_within_rule,
    kv_update_kwargs,
    kv_update_positional,
    make_batch,
    op_kwargs,
    op_positional,
)
from attnbackend.testing.mla_batches import make_mla_batch, mqa_arguments, update_arguments

pytestmark = [
    pytest.mark.skipif(
        native.how_ops_are_called() != "C++, called without Python", reason=str(native.how_ops_are_called())
    ),
    pytest.mark.usefixtures("no_grad"),
]

Call = Callable[[], None]
IN_PYTHON = {"ranges", "ranges_over_window", "ranges_over_chunks", "encoder", "encoder_causal",
             "encoder_window", "encoder_strided", "cross"}  # fmt: skip


@pytest.fixture
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the methods that were called, one by one."""
    names: list[str] = []

    def watch(cls: type, name: str) -> None:
        inner = getattr(cls, name)

        def run(*args: Any) -> None:
            names.append(name)
            inner(*args)

        monkeypatch.setattr(cls, name, run)

    for cls, methods in (
        (cpu_attn.CPUAttentionImpl, ("forward", "kv_cache_update")),
        (cpu_mla.CPUMLAImpl, ("forward_mqa", "mla_kv_cache_update")),
    ):
        for name in methods:
            watch(cls, name)
    return names


def forward(batch: Any) -> Call:
    return lambda: forward_op("CPU_ATTN")(*op_positional(batch), **op_kwargs(batch))


def update(batch: Any) -> Call:
    return lambda: update_op("CPU_ATTN")(*kv_update_positional(batch), **kv_update_kwargs(batch))


def mqa(batch: Any) -> Call:
    positional, keyword = mqa_arguments(batch)
    return lambda: mla_op("CPU_MLA", "forward_mqa")(*positional, **keyword)


def mla_update(batch: Any) -> Call:
    positional, keyword = update_arguments(batch)
    return lambda: mla_op("CPU_MLA", "mla_kv_cache_update")(*positional, **keyword)


def forget() -> None:
    """Any change of the registry makes C++ forget what it learned."""
    with registry_scope():
        pass


def check(make: Callable[[], tuple[Call, list[Tensor | None]]], seen: list[str], learns: bool = True) -> None:
    """A call in Python, one that is learned from, and one that C++ serves, each on tensors of its own."""
    forget()
    results = []
    for turn in range(3):
        call, written = make()
        seen.clear()
        with python_only() if turn == 0 else nullcontext():
            call()
        assert bool(seen) == (turn < 2 or not learns)
        results.append([x.contiguous().view(torch.uint8) for x in written if x is not None])
    for python, own in zip(results[0], results[2], strict=True):
        assert torch.equal(python, own)


@pytest.mark.parametrize("feature", FEATURES)
def test_attention(feature: str, seen: list[str]) -> None:
    def make() -> tuple[Call, list[Tensor | None]]:
        batch = make_batch(case(feature), "cpu")
        return forward(batch), [batch.output, batch.lse]

    check(make, seen, feature not in IN_PYTHON)


@pytest.mark.parametrize("feature", ["plain", "hnd", "fp8_e4m3", "fp8_per_head_scales", "strided_tensors"])
def test_cache_writes(feature: str, seen: list[str]) -> None:
    def make() -> tuple[Call, list[Tensor | None]]:
        batch = make_batch(case(feature, new_tokens_written=False), "cpu")
        return update(batch), [batch.kv_buffer]

    check(make, seen)


@pytest.mark.parametrize("feature", MLA_FEATURES)
def test_latent_attention_and_writes(feature: str, seen: list[str]) -> None:
    def make(call: Callable[[Any], Call]) -> tuple[Call, list[Tensor | None]]:
        batch = make_mla_batch(mla_case(feature), "cpu")
        return call(batch), [batch.latent_output, batch.lse, batch.kv_buffer]

    check(partial(make, mqa), seen)
    check(partial(make, mla_update), seen)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_was_learned_serves_other_numbers_of_tokens(dtype: torch.dtype, seen: list[str]) -> None:
    seq_lens = (15, 32, 63)
    batches = []
    for query_lens in ((1, 1, 1), (9, 1, 30), (0, 2, 0)):
        context_lens = tuple(n - q for n, q in zip(seq_lens, query_lens, strict=True))
        changes = {"dtype": dtype, "query_lens": query_lens, "context_lens": context_lens}
        batches.append(make_batch(case("plain", "decode", **changes), "cpu"))
    forget()
    forward(batches[1])()
    for batch in batches:
        seen.clear()
        forward(batch)()
        assert not seen
        own = batch.output.clone()
        with python_only():
            batch.poison_outputs()
            forward(batch)()
        assert torch.equal(own, batch.output)


def outcome(call: Call) -> tuple[type | None, str]:
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None, ""


def refused(op: torch._ops.OpOverload, good: dict[str, Any], changes: dict[str, Any]) -> Call:
    bad = {name: change(good[name]) if callable(change) else change for name, change in changes.items()}
    return lambda: op(**good | bad)


@pytest.mark.parametrize(
    "changes", [*(changes for changes, _ in ATTENTION_REFUSALS.values()),
                {"block_table": lambda t: t + 99}, {"seq_lens": lambda n: n + 999},
                {"query_start_loc": lambda s: s + 99}, {"output": lambda o: o[:-1]}]
)  # fmt: skip
def test_refusals_of_attention_are_python_s(changes: dict[str, Any]) -> None:
    batch, op = make_batch(case("no_lse"), "cpu"), forward_op("CPU_ATTN")
    good = dict(zip(NAMES, op_positional(batch), strict=True)) | op_kwargs(batch)
    op(**good)
    kind, message = outcome(refused(op, good, changes))
    assert kind is ValueError
    with python_only():
        assert outcome(refused(op, good, changes)) == (kind, message)


@pytest.mark.parametrize(
    "changes",
    [*(changes for changes, _ in WRITE_REFUSALS.values()), {"slot_mapping": torch.tensor([1, 99, 2])}],
)  # fmt: skip
def test_refusals_of_cache_writes_are_python_s(changes: dict[str, Any]) -> None:
    op = update_op("CPU_ATTN")
    good = {"key": torch.ones(3, 2, 64), "value": torch.ones(3, 2, 64),
            "kv_cache": torch.zeros(4, 2, 16, 2, 64), "slot_mapping": torch.tensor([16, -1, 40])}  # fmt: skip
    op(**good)
    kind, message = outcome(refused(op, good, changes))
    assert kind is ValueError
    with python_only():
        assert outcome(refused(op, good, changes)) == (kind, message)


def test_gradients_are_refused() -> None:
    batch = make_batch(case("sinks"), "cpu")
    forward(batch)()
    for name in ("query", "value", "sinks"):
        wants_grad = {name: getattr(batch, name).clone().requires_grad_()}
        with torch.enable_grad(), pytest.raises(RuntimeError, match="serve inference and have no backward"):
            forward(replace(batch, **wants_grad))()


def test_python_is_asked_again_where_it_must_look(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(case("plain"), "cpu")
    call = forward(batch)
    call()
    seen.clear()
    call()
    assert not seen
    with set_config(debug=True):
        call()
    monkeypatch.setenv("ATTNBACKEND_DEBUG", "1")
    call()
    monkeypatch.setenv("ATTNBACKEND_DEBUG", "0")
    assert len(seen) == 2
    call()
    assert len(seen) == 2


def test_another_class_under_the_name_is_called_each_time() -> None:
    class Other(cpu_attn.CPUAttentionBackend):
        @staticmethod
        def get_impl_cls() -> type[cpu_attn.CPUAttentionImpl]:
            return OtherImpl

    class OtherImpl(cpu_attn.CPUAttentionImpl):
        def forward(self, *args: Any) -> None:
            args[5].fill_(3.0)

    batch = make_batch(case("plain"), "cpu")
    forward(batch)()
    with registry_scope():
        register_backend("CPU_ATTN")(Other)
        for _ in range(3):
            batch.poison_outputs()
            forward(batch)()
            assert torch.all(batch.output == 3.0)
    batch.poison_outputs()
    forward(batch)()
    assert not torch.any(batch.output == 3.0)


def test_threads_learn_for_themselves(seen: list[str]) -> None:
    batches = [make_batch(case("plain", "decode", seed=seed), "cpu") for seed in range(4)]
    expected = []
    for batch in batches:
        forward(batch)()
        expected.append(batch.output.clone())

    def work(batch: Any) -> None:
        with torch.no_grad():
            for _ in range(50):
                batch.poison_outputs()
                forward(batch)()

    threads = [threading.Thread(target=work, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for batch, output in zip(batches, expected, strict=True):
        assert torch.equal(batch.output, output)


FIRST_CALLS = """
import sys, threading
import torch
import attnbackend
from attnbackend.ops import cpu_linear, native

define = native.define

def define_while_others_call(*args):
    assert cpu_linear.cpu_linear(torch.ones(2, 32), torch.ones(1, 32)).sum() == 64
    define(*args)

native.define = define_while_others_call
torch.set_grad_enabled(False)
sys.setswitchinterval(1e-6)
barrier, served = threading.Barrier(8), []

def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)

def call(backend):
    query, cache, output = torch.ones(1, 4, 64), torch.ones(2, 2, 16, 4, 64), torch.zeros(1, 4, 64)
    barrier.wait()
    with attnbackend.set_config(backend=backend):
        attnbackend.attention(
            query, None, None, cache, output, ints(0, 1), ints(3), ints(1)[None], scale=0.1
        )
    served.append(bool(output.sub(1).abs().max() < 1e-6))

threads = [threading.Thread(target=call, args=(name,)) for name in ("CPU_ATTN", "TORCH_SDPA") * 4]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert served == [True] * 8, served
"""


def test_threads_may_make_a_process_s_first_calls_at_once() -> None:
    """Ops are defined once, and served while they are being defined for C++."""
    subprocess.run([sys.executable, "-c", FIRST_CALLS], check=True)


def test_where_the_ops_do_not_build_the_list_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> CDLL:
        raise BuildError("no headers")

    monkeypatch.setattr(native, "load_ops", load)
    monkeypatch.setattr(native, "_served", native._served.__wrapped__)
    assert native.how_ops_are_called() == "C++, called through Python: no headers"


# Linear layers


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the calls of `cpu_linear` that Python served."""
    rows: list[int] = []

    def linear(x: Tensor, *args: Tensor | None) -> Tensor:
        rows.append(x.shape[:-1].numel())
        return torch.nn.functional.linear(x, *args)

    monkeypatch.setattr(cpu_linear, "F", SimpleNamespace(linear=linear))
    return rows


def check_products(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    """Against float64, where torch's own error says what the type can do."""
    torch.manual_seed(rows)
    x, weight = torch.randn(1, rows, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
    for bias in (None, torch.randn(outputs, dtype=dtype)):
        arguments = [None if y is None else y.double() for y in (x, weight, bias)]
        exact, torch_s = torch.nn.functional.linear(*arguments), torch.nn.functional.linear(x, weight, bias)
        for threads in (1, 3):
            with thread_count(threads), cpu_linear.own_products():
                own = cpu_linear.cpu_linear(x, weight, bias)
            assert (own.shape, own.dtype, own.is_contiguous()) == (exact.shape, dtype, True)
            assert_within_rule(own, exact, torch_s)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 16, 17, 27, 64, 131])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 65), (64, 33), (160, 48), (544, 16)])
def test_rows_are_multiplied_as_well_as_torch_does(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int, in_python: list[int]
) -> None:
    check_products(dtype, rows, inputs, outputs)
    assert not in_python


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(600, 1056, 40), (19, 1056, 1024)],
    ids=["more rows than the cache holds", "a weight too large to be read twice"],
)  # fmt: skip
def test_large_products(rows: int, inputs: int, outputs: int, in_python: list[int]) -> None:
    check_products(torch.float32, rows, inputs, outputs)
    check_products(torch.bfloat16, rows, inputs, outputs)
    assert not in_python


def test_one_output_is_exact_where_sums_are(in_python: list[int]) -> None:
    x, weight = torch.arange(96.0).view(3, 32), torch.arange(32.0).view(1, 32)
    with cpu_linear.own_products():
        assert torch.equal(cpu_linear.cpu_linear(x, weight), x @ weight.T)
    assert not in_python


def test_nan_and_infinity_stay_in_their_rows(in_python: list[int]) -> None:
    x, weight = torch.ones(3, 64), torch.ones(20, 64)
    x[0, 5], x[1, 7], weight[3] = torch.nan, torch.inf, 0.0
    with cpu_linear.own_products():
        own = cpu_linear.cpu_linear(x, weight)
    assert not in_python
    torch.testing.assert_close(own, torch.nn.functional.linear(x, weight), equal_nan=True)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(2, 48), torch.ones(8, 48)),
        (torch.ones(64, 2).T, torch.ones(8, 64)), (torch.ones(2, 64), torch.ones(64, 8).T),
        (torch.ones(0, 64), torch.ones(8, 64)), (torch.ones(2, 64).double(), torch.ones(8, 64).double()),
    ],
    ids=["an odd size", "strided rows", "a strided weight", "no rows", "float64"],
)  # fmt: skip
def test_other_products_are_python_s(x: Tensor, weight: Tensor, in_python: list[int]) -> None:
    with cpu_linear.own_products():
        own = cpu_linear.cpu_linear(x, weight)
    assert in_python == [len(x)]
    assert torch.equal(own, x @ weight.T)


def test_products_that_do_not_fit_are_torch_s_to_refuse() -> None:
    x, weight = torch.ones(2, 64), torch.ones(8, 32)
    with cpu_linear.own_products():
        kind, message = outcome(lambda: cpu_linear.cpu_linear(x, weight))
    assert (kind, message) == outcome(lambda: torch.nn.functional.linear(x, weight))
    assert kind is RuntimeError


@pytest.mark.parametrize("place", range(3))
def test_products_without_numbers_are_refused(place: int) -> None:
    """Torch asks the fake of an op where one tensor is on "meta"."""
    tensors = [torch.ones(2, 64), torch.ones(8, 64), torch.ones(8)]
    tensors[place] = tensors[place].to("meta")
    with pytest.raises(ValueError, match="device of what cpu_linear multiplies by is"):
        cpu_linear.cpu_linear(*tensors)


def test_a_model_used_by_itself_multiplies_as_torch_does(in_python: list[int]) -> None:
    cpu_linear.cpu_linear(torch.ones(2, 64), torch.ones(8, 64))
    assert in_python == [2]
