"""Fails, by name, when a private torch API that attnbackend uses has moved or changed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from attnbackend import _torch_compat as compat


def test_fake_mode_can_be_left() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert isinstance(torch.empty(1), compat.FakeTensor)
        with compat.outside_fake_mode():
            assert not isinstance(torch.empty(1), compat.FakeTensor)


def test_functionalised_calls_are_those_that_export_makes() -> None:
    def step(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        torch.ops.attnbackend.kv_cache_update(x, x, cache, slots)
        return cache + 0

    class Step(torch.nn.Module):
        def forward(self, x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            return step(x, cache, slots)

    args = (torch.ones(2, 2, 32), torch.zeros(3, 2, 16, 2, 32), torch.tensor([16, 17]))
    program = torch.export.export(Step(), args).run_decompositions()
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert sum(target in compat.FUNCTIONALIZED for target in targets) == 1


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_compilers_are_found_by_name(name: str) -> None:
    compiled = torch.compile(lambda x: x + 1, backend=compat.compiler_backend(name, None))
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="takes none"):
        compat.compiler_backend(name, {"max_autotune": True})


def test_a_namedtuple_can_be_registered_once_for_export() -> None:
    from attnbackend.layers import BatchTensors

    _, spec = torch.utils._pytree.tree_flatten(BatchTensors(*torch.zeros(4)))
    assert "attnbackend.layers.paged.BatchTensors" in torch.utils._pytree.treespec_dumps(spec)


@pytest.mark.slow
def test_a_changed_cache_key_keeps_an_old_artefact_from_being_served(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Inductor's on-disk cache knows an op by its name alone: the same name with other mutated arguments gave
    a silently wrong sum (0 for 4). A key over the schema makes the second process compile anew."""
    program = textwrap.dedent(
        """
        import sys, torch
        from attnbackend._torch_compat import add_cache_key
        mutates = tuple(filter(None, sys.argv[1].split(",")))
        add_cache_key(f"schema:{sys.argv[2]}")
        def u(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            c += 1
            return x.clone()
        op = torch.library.custom_op("cachekeytest::u", u, mutates_args=mutates)
        op.register_fake(lambda x, c: torch.empty_like(x))
        def f(x, c):
            torch.ops.cachekeytest.u(x, c)
            return c.sum()
        print(float(torch.compile(f)(torch.zeros(4), torch.zeros(4))))
        """
    )

    def run(mutates: str, key: str) -> float:
        environment = {**__import__("os").environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", program, mutates, key]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        return float(result.stdout.strip().splitlines()[-1])

    assert run("", "1") == 0.0, "an undeclared write is dropped by the compiler"
    assert run("c", "2") == 4.0


def test_functions_with_their_own_code_do_not_share_a_recompile_limit() -> None:
    def add(x: torch.Tensor, n: int) -> torch.Tensor:
        return x + n

    torch._dynamo.reset()
    one, other = (torch.compile(compat.with_own_code(add), backend="eager", dynamic=False) for _ in range(2))
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        assert [int(f(torch.ones(()), 1)) for f in (one, other)] == [2, 2]
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            one(torch.ones(()), 2)
    torch._dynamo.reset()


class _Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.factor = torch.nn.Parameter(torch.tensor([1.0, 2.0])), 3.0

    def forward(self, x: torch.Tensor, *, more: int = 0) -> torch.Tensor:
        return x * self.weight * self.factor + more


@pytest.fixture
def guarded(fresh_compiler: None) -> tuple[compat.GuardedCalls, list[int]]:
    """Calls of modules, and how many inputs each graph has; what is compiled gives 100 more."""
    graphs: list[int] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., tuple[torch.Tensor]]:
        graphs.append(len(inputs))
        return lambda *values: (graph(*values)[0] + 100,)

    function = compat.with_own_code(compat.run_module)
    compiled = torch.compile(function, backend=compiler, dynamic=True, fullgraph=True)
    return compat.GuardedCalls(compiled, specialize_float=True), graphs


def test_guarded_calls_go_to_what_was_compiled_while_its_guards_hold(
    guarded: tuple[compat.GuardedCalls, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, graphs = guarded
    module, other, x = _Scaled(), _Scaled(), torch.ones(2)
    with torch.no_grad():
        assert run(module, x).tolist() == [103.0, 106.0]
        own, asked = run._compiled, []
        monkeypatch.setattr(run, "_compiled", lambda *a, **k: asked.append(a) or own(*a, **k))
        other.weight = torch.nn.Parameter(torch.tensor([5.0, 6.0]))
        module.weight = torch.nn.Parameter(torch.tensor([0.0, 7.0]))
        assert run(module, x).tolist() == [100.0, 121.0]
        assert run(other, torch.ones(3, 2))[2].tolist() == [115.0, 118.0]  # another rank
        assert (len(graphs), len(asked)) == (2, 1)
        module.factor = 0.5
        assert [run(module, x).tolist() for _ in range(2)] == [[100.0, 103.5]] * 2
        assert run(other, x).tolist() == [115.0, 118.0]
        assert run(module, x, more=1).tolist() == [101.0, 104.5]
        module.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        assert run(module, x).dtype is torch.float64
        assert (len(graphs), len(asked)) == (5, 4)
        module.forward = lambda x: x - 1  # type: ignore[method-assign]
        assert run(module, x).tolist() == [100.0, 100.0]
    assert run(other, x).requires_grad


def test_guarded_calls_follow_stances_and_resets(guarded: tuple[compat.GuardedCalls, list[int]]) -> None:
    run, graphs = guarded
    module, x = _Scaled(), torch.ones(2)
    for expected in (1, 1, 2):
        if expected == 2:
            torch._dynamo.reset()
        assert run(module, x).tolist() == [103.0, 106.0]
        assert len(graphs) == expected
        with torch.compiler.set_stance("force_eager"):
            assert run(module, x).tolist() == [3.0, 6.0]


def test_a_module_s_call_can_be_replaced_and_given_back() -> None:
    import copy

    module = torch.nn.Linear(2, 2)
    x = torch.ones(2)
    compat.set_compiled_call(module, lambda x: compat.run_module(module, x) + 1)
    assert torch.equal(module(x), module.forward(x) + 1)
    assert compat.compiled_call(copy.deepcopy(module)) is None
    compat.set_compiled_call(module, None)
    assert torch.equal(module(x), module.forward(x))


def test_sizes_that_are_equal_by_chance_stay_apart_without_duck_shapes() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: x.sum() + y.sum(), backend=count, dynamic=True)
    with compat.no_duck_shapes():
        compiled(torch.ones(3), torch.ones(3))
    compiled(torch.ones(3), torch.ones(4))
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_a_function_is_compiled_as_often_as_is_asked(fresh_compiler: None) -> None:
    compiled = torch.compile(lambda x, y: x * y, backend="eager", fullgraph=True)
    with compat.unbounded_recompiles():
        assert [int(compiled(torch.ones(1), name)) for name in range(20) if name != 1] == [0, *range(2, 20)]


def test_code_of_its_own_keeps_closure_and_defaults() -> None:
    five = 5

    def add(x: int, y: int = 2) -> int:
        return x + y + five

    own = compat.with_own_code(add)
    assert own(1) == 8
    assert own.__code__ is not add.__code__


def test_flex_attention_in_math_is_softmax_attention() -> None:
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    out, lse = compat.flex_attention_in_math(
        q, k, v, lambda s, b, h, m, n: s + n, lambda b, h, m, n: n <= m + 1, 0.5
    )
    k4, v4 = (x.repeat_interleave(2, 1) for x in (k, v))
    n, m = torch.arange(5), torch.arange(3)[:, None]
    logits = (q @ k4.transpose(2, 3) * 0.5 + n).masked_fill(n > m + 1, -torch.inf)
    torch.testing.assert_close(out, logits.softmax(-1) @ v4)
    torch.testing.assert_close(lse, logits.logsumexp(-1))


def test_flex_attention_is_given_its_main_kernel_in_words_that_this_torch_knows() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    assert compat.flex_attention_reason() is None
    q = torch.randn(1, 1, 16, 16)
    options = compat.flex_kernel_options({"BLOCK_M": 16})
    assert options.keys() - {"BLOCK_M"} in ({"BACKEND"}, {"FORCE_USE_FLEX_ATTENTION"})
    compiled = torch.compile(flex_attention, backend="eager")
    torch.testing.assert_close(compiled(q, q, q, kernel_options=options), compiled(q, q, q))


def test_transforms_work_where_a_mode_handles_the_op() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            with compat.transforms_allowed():
                doubled = torch.vmap(lambda row: row * 2)(args[0])
                compiled = torch.compile(lambda x: x + 1, backend="aot_eager")(args[0])
            seen.append((doubled.tolist(), compiled.tolist()))
            return func(*args, **(kwargs or {}))

    ones = torch.ones(2)
    with Mode():
        torch.neg(ones)
    assert seen == [([2.0, 2.0], [2.0, 2.0])]


def test_a_size_marked_dynamic_is_no_constant_where_the_rest_is() -> None:
    graphs = []

    def collect(graph, inputs):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x * x.shape[0], backend=collect, fullgraph=True, dynamic=False)
    for size in (3, 5, 9):
        x = torch.ones(size, 4)
        compat.mark_dynamic(x, (0,))
        assert compiled(x).sum() == 4 * size**2
    assert len(graphs) == 1


def test_bfloat16_pairs_are_known_as_the_system_knows_them() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("needs /proc/cpuinfo")
    assert compat.has_avx512_bf16() == ("avx512_bf16" in cpuinfo.read_text())


def test_tensors_are_checked_at_once() -> None:
    fits = compat.tensor_check([torch.zeros(3, 4), torch.zeros(2, dtype=torch.int32)])
    second = torch.ones(2, dtype=torch.int32)
    assert fits(torch.ones(3, 4), second)
    assert fits(torch.ones(4, 2, 4)[:3, 0], second), "strides before the last are free"
    for other in (
        torch.ones(4, 4), torch.ones(3, 4).half(), torch.ones(3, 8)[:, ::2], torch.ones(3, 4, device="meta"),
        torch.ones(3, 4, requires_grad=True), torch.ones(12), torch.nn.Buffer(torch.ones(3, 5)),
    ):  # fmt: skip
        assert not fits(other, second)


def test_children_are_those_that_a_module_has_now() -> None:
    owner = torch.nn.Sequential(torch.nn.Identity())
    children = compat.children_of(owner)
    assert children["0"] is owner[0]
    owner.more = torch.nn.Identity()
    assert children["more"] is owner.more
