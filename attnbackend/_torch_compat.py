"""The only place that touches private torch APIs. ``tests/test_torch_compat.py`` fails when one moves."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, get_eval_frame_callback
from torch._C._dynamo.guards import TensorGuards
from torch._C._functorch import is_functorch_wrapped_tensor as is_transformed
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef as StorageRef
from torch.utils.hooks import RemovableHandle

__all__ = [
    "FUNCTIONALIZED",
    "TRANSFORMS_KEY",
    "FakeTensor",
    "GuardedCalls",
    "StorageRef",
    "add_buffer",
    "add_cache_key",
    "aoti_package",
    "cache_key",
    "children_of",
    "compiled_call",
    "compiler_backend",
    "fake_mode",
    "fake_mode_of",
    "flex_attention_in_math",
    "flex_attention_reason",
    "flex_kernel_options",
    "forward_hooks",
    "has_avx512_bf16",
    "hooks_made",
    "in_forward_mode",
    "inductor_code",
    "inductor_cpp_compiler",
    "inductor_graph_pass",
    "is_transformed",
    "load_aoti_package",
    "makes_sizes",
    "mark_dynamic",
    "may_have_tangent",
    "no_duck_shapes",
    "outside_fake_mode",
    "outside_transforms",
    "register_namedtuple",
    "remove_forward_hook",
    "reset_compiler",
    "run_module",
    "run_on_program",
    "same_size",
    "set_compiled_call",
    "size_bounds",
    "tensor_check",
    "trace_fake",
    "transforms_allowed",
    "unbounded_recompiles",
    "with_own_code",
]

FUNCTIONALIZED = (auto_functionalized, auto_functionalized_v2)
"""Wrappers that AOTAutograd and export put around an op that writes its arguments."""

TRANSFORMS_KEY = "FuncTorchDynamicLayerFrontMode"
"""Under it an op is called inside of ``torch.func``'s transforms, `outside_transforms` excepted.

`is_transformed` tells tensors that come from inside of one.
"""


def in_forward_mode() -> bool:
    """Whether tensors may have tangents."""
    return forward_ad._current_level >= 0


def may_have_tangent(x: Tensor) -> bool:
    """Whether forward-mode AD derives what is computed of ``x``; inside of a fake nothing tells."""
    return isinstance(x, FakeTensor) or forward_ad.unpack_dual(x).tangent is not None


def outside_fake_mode() -> AbstractContextManager[object]:
    """Real tensors inside the ``with`` block, also while a model is being traced."""
    return unset_fake_temporarily()


def add_buffer(graph_module: torch.fx.GraphModule, name: str, value: Tensor) -> None:
    """Gives a graph a tensor of its own; AOTAutograd asks where each of a Dynamo graph's comes from."""
    from torch._dynamo.source import ConstantSource

    graph_module.register_buffer(name, value)
    sources = getattr(graph_module, "_param_name_to_source", None)
    if sources is not None:
        sources[name] = ConstantSource(source_name=name)


def add_cache_key(tag: str) -> None:
    """Makes every compile cache of this process depend on ``tag`` from now on."""
    import torch.compiler.config as config

    if tag not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag};{tag}"


def cache_key(tag: str) -> AbstractContextManager[object]:
    """Makes the compile caches depend on ``tag`` inside the ``with`` block."""
    import torch.compiler.config as config

    return config.patch(cache_key_tag=f"{config.cache_key_tag};{tag}")  # type: ignore[attr-defined]


def compiler_backend(name: str, options: dict[str, Any] | None) -> Callable[[Any, Any], Any]:
    """The function behind a ``torch.compile`` backend name; ``options`` are Inductor's."""
    if name == "inductor":
        from torch._inductor.compile_fx import compile_fx

        return lambda gm, inputs: compile_fx(gm, inputs, config_patches=options)
    if options:
        raise ValueError(f"options={options} are Inductor's; the compiler is {name!r}, which takes none")
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def inductor_graph_pass(run: Callable[[torch.fx.GraphModule], Any], uuid: Callable[[], str]) -> Any:
    """``run`` in the form of Inductor's custom graph passes, keyed in its caches by ``uuid``."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class GraphPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            owner = graph.owning_module
            assert owner is not None, "Inductor hands over graphs of modules"
            run(owner)

        def uuid(self) -> str:
            return uuid()

    return GraphPass()


def size_bounds(size: int | torch.SymInt) -> tuple[int, int | None]:
    """The smallest and the largest value that a size can have; None: it has no largest."""
    if isinstance(size, int):
        return size, size
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    upper = bounds.upper
    return int(bounds.lower), int(upper) if upper.is_finite and upper < 2**62 else None


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal whatever the inputs; asking guards nothing."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def makes_sizes(value: Any, inputs: Sequence[Any]) -> bool:
    """Whether a value has sizes that depend on data of the inputs, not on their sizes."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return not free_unbacked_symbols(value) <= set().union(*map(free_unbacked_symbols, inputs))


def run_on_program(
    program: torch.export.ExportedProgram, run: Callable[[torch.fx.GraphModule], Any]
) -> None:  # fmt: skip
    """Rewrites an exported program's graph by ``run``, in place, keeping names in its signature true."""
    program.graph_module.meta["written_inputs"] = _written_inputs(program)
    run(program.graph_module)
    outputs = program.graph.output_node().args[0]
    for spec, value in zip(program.graph_signature.output_specs, outputs, strict=True):
        if isinstance(value, torch.fx.Node) and hasattr(spec.arg, "name"):
            spec.arg.name = value.name


def _written_inputs(program: torch.export.ExportedProgram) -> dict[str, int]:
    """Input -> which of the outputs is what the caller finds in it."""
    signature = program.graph_signature
    inputs = {name: node for node, name in signature.inputs_to_buffers.items()}
    found = {}
    for place, spec in enumerate(signature.output_specs):
        name = getattr(spec.arg, "name", None)
        if name in signature.buffers_to_mutate:
            found[inputs[signature.buffers_to_mutate[name]]] = place
        elif name in signature.user_inputs_to_mutate:
            found[signature.user_inputs_to_mutate[name]] = place
    return found


def register_namedtuple(cls: type) -> None:
    """Lets exported programs that take a NamedTuple be saved."""
    from torch.utils._pytree import _register_namedtuple

    _register_namedtuple(cls, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")


def reset_compiler() -> None:
    """Forgets everything compiled in this process."""
    torch._dynamo.reset()


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own.

    Dynamo keeps what it compiled with the code object, and counts recompilations there: functions of equal
    text would share the limit.
    """
    assert isinstance(function, types.FunctionType)
    code, names = function.__code__.replace(), function.__globals__
    return types.FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)


class GuardedCalls:
    """What ``torch.compile`` made of a function, without all that Dynamo does on each call beside its guards.

    Dynamo's own guards are checked; the code that they admit is called. A call that none admits goes to
    ``torch.compile``, and so do all while a stance is set or while Dynamo traces a caller.

    Args:
        compiled: ``torch.compile`` of a function without closure, which takes any further arguments; compiled
            without graph breaks.
        specialize_float: floats are constants of what is compiled, which is compiled anew for others.
    """

    def __init__(self, compiled: Callable[..., Any], *, specialize_float: bool) -> None:
        from torch._dynamo import eval_frame

        self._compiled, self._dynamo = compiled, eval_frame
        self._function: types.FunctionType = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]
        code = self._function.__code__
        assert not code.co_freevars
        self._places, names = code.co_argcount, code.co_varnames
        self._names, self._rest = names[: self._places], names[self._places : self._places + 2]
        self._settings = {"specialize_float": specialize_float}
        self._known: list[tuple[Any, types.FunctionType]] = []
        """Guards and what they guard, the last that were met first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (function := self._find(args, kwargs)) is not None:
            return function(*args, **kwargs)
        with torch._dynamo.config.patch(self._settings), torch._inductor.config.patch(size_asserts=False):
            result = self._compiled(*args, **kwargs)
        entries, names = _debug_get_cache_entry_list(self._function.__code__), self._function.__globals__
        self._known = [
            (e.guard_manager, types.FunctionType(e.code, names)) for e in entries if e.code is not None
        ]
        return result

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """What was compiled for such a call, its guards checked; None: ``torch.compile`` is to be asked."""
        if self._dynamo._stance.stance != "default" or get_eval_frame_callback() is not None:
            return None
        scope = dict(zip(self._names, args, strict=False))
        scope |= zip(self._rest, (args[self._places :], kwargs), strict=True)
        for place, (guards, function) in enumerate(self._known):
            # Guards without an entry were given up: Dynamo was reset, or what they are about is gone.
            if guards.cache_entry is not None and guards.root.check(scope):
                if place:
                    self._known.insert(0, self._known.pop(place))
                return function
        return None


def run_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a module, hooks included, past what `set_compiled_call` set."""
    return module._call_impl(*args, **kwargs)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What is called in the module's place, as ``module.compile()`` sets it."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Calls ``call`` whenever the module is called; copies and pickles of the module leave it out."""
    module._compiled_call_impl = call


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own children by name, now and whenever they are others."""
    return module._modules


def hooks_made() -> int:
    """Grows with every hook that is registered on any module."""
    return RemovableHandle.next_id


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """A module's own hooks around its forward, each under what tells it from others."""
    return {**module._forward_pre_hooks, **module._forward_hooks}


def remove_forward_hook(module: nn.Module, key: int) -> None:
    """Takes away a hook that `forward_hooks` gave, as its handle would."""
    module._forward_pre_hooks.pop(key, None)
    module._forward_hooks.pop(key, None)


def no_duck_shapes() -> AbstractContextManager[object]:
    """Sizes that happen to be equal while compiling are not taken to be equal always."""
    import torch.fx.experimental._config as config

    return config.patch(use_duck_shape=False)  # type: ignore[attr-defined]


def unbounded_recompiles() -> AbstractContextManager[object]:
    """A function is compiled as often as calls ask for it, where Dynamo gives up at the ninth time else."""
    return torch._dynamo.config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20)


def fake_mode() -> Any:
    """A context in which tensors have no data, as while a model is being traced."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


@contextmanager
def fake_mode_of(*trees: Any) -> Iterator[None]:
    """The context to which the tensors without data among nested values belong.

    Calls of several ops are taken apart in Python in it: torch 2.11's own `matmul` asks for sizes as numbers.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.utils._pytree import tree_leaves

    modes = (leaf.fake_mode for leaf in tree_leaves(trees) if isinstance(leaf, FakeTensor))
    with next(modes, nullcontext()), enable_python_dispatcher():
        yield


def trace_fake(function: Callable[..., Any], values: Sequence[Tensor]) -> torch.fx.GraphModule:
    """The calls of ``function`` on tensors without data, as a graph of ATen and custom ops."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with fake_mode_of(values):
        return make_fx(function)(*values)


def inductor_code(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What Inductor's compilation of ``function`` returns for ``args``, and the code it generated."""
    from torch._inductor.utils import run_and_get_code

    result, codes = run_and_get_code(torch.compile(function, fullgraph=True), *args)
    return result, "\n".join(codes)


def aoti_package(
    program: torch.export.ExportedProgram, path: str, libraries: Sequence[str], options: Mapping[str, Any]
) -> str:
    """Compiles the program, with more libraries linked, into a package at ``path``, which is returned."""
    from torch._inductor import aoti_compile_and_package
    from torch._inductor import config as inductor

    name = "aot_inductor.custom_op_libs"
    given = options.get(name) or inductor.aot_inductor.custom_op_libs or ()
    links = {name: [*given, *libraries]} if libraries else {}
    return aoti_compile_and_package(program, package_path=path, inductor_configs={**options, **links})


def load_aoti_package(path: str) -> Callable[..., Any]:
    """A package that `aoti_package` made."""
    from torch._inductor import aoti_load_package

    return aoti_load_package(path)


def inductor_cpp_compiler() -> str:
    """The C++ compiler that Inductor runs."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def mark_dynamic(x: Tensor, dims: tuple[int, ...]) -> None:
    """Compiled code may not be specialised for these sizes of ``x``; the compiler raises where it would."""
    for dim in dims:
        torch._dynamo.mark_dynamic(x, dim)


def has_avx512_bf16() -> bool:
    """Whether the processor multiplies pairs of bfloat16."""
    return torch.cpu._is_avx512_bf16_supported()


def flex_attention_reason() -> str | None:
    """Why this torch's ``flex_attention`` cannot serve; None when it can."""
    try:
        from torch.nn.attention.flex_attention import AuxRequest  # noqa: F401 (there since 2.9)
    except ImportError as error:
        return f"torch {torch.__version__} has no flex_attention with return_aux ({error})"
    return None


def flex_kernel_options(options: dict[str, Any]) -> Any:
    """``options`` of ``flex_attention``, with the choice of its main kernel in the words of this torch."""
    from torch.nn.attention.flex_attention import FlexKernelOptions

    if "BACKEND" in FlexKernelOptions.__annotations__:
        return {**options, "BACKEND": "TRITON"}
    return {**options, "FORCE_USE_FLEX_ATTENTION": True}


def flex_attention_in_math(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor],
    mask_mod: Callable[..., Tensor], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What ``flex_attention`` does where it is not compiled, without the compilation that it wraps around.

    Args:
        query, key, value: [B, H, M, D], [B, K, L, D], [B, K, L, D].
        score_mod, mask_mod: as ``flex_attention`` takes them.
        scale: factor of the logits.

    Returns:
        Output [B, H, M, D] and natural-log LSE, float32 [B, H, M].
    """
    from torch._higher_order_ops.flex_attention import math_attention

    with torch.no_grad(), transforms_allowed():
        out, lse, *_ = math_attention(query, key, value, score_mod, (mask_mod,), scale, {})
    return out, lse * math.log(2.0)


@contextmanager
def transforms_allowed() -> Iterator[None]:
    """``vmap`` and compilation work in the block, also where a mode such as opcheck's handles the op.

    A mode's handler shuts out every dispatch key above its own, those that both need among them.
    """
    members = torch._C.DispatchKey.__members__
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(members["FuncTorchBatched"]):
        yield
        return
    with torch._C._PreserveDispatchKeyGuard():
        for name, key in members.items():
            if name.startswith("FuncTorch") or name in _SHUT_OUT:
                torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


_SHUT_OUT = ("Functionalize", "Conjugate", "Negative", "ZeroTensor", "PythonTLSSnapshot", "PreDispatch")


def tensor_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A fast check of as many tensors: same class, device, type, sizes, and stride of the last dimension.

    What `tensors` hold does not matter, and none is kept.
    """
    sizes: Any = [list(x.shape) for x in tensors]
    strides: Any = [[*[None] * (x.dim() - 1), x.stride(-1)] for x in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
