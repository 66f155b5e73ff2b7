"""torch.compile, attnbackend.compile, regional compilation: results, graphs, no copies of a cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy_models import Stack, caches, make_stack, random_batch, reset_caches

import attnbackend
from attnbackend import compile_layers
from attnbackend._torch_compat import cache_key
from attnbackend.ops.library import ops_fingerprint

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _eager(stack: Stack, seed: int, num_tokens: int | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    reset_caches(stack)
    x, batch = random_batch(seed, num_tokens)
    return stack(x, batch), [c.clone() for c in caches(stack)]


def _equal_caches(stack: Stack, expected: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(caches(stack), expected, strict=True)
    )


@pytest.mark.parametrize("how", ["torch.compile", "attnbackend.compile"])
def test_compiled_equals_eager_in_output_and_cache(how: str) -> None:
    stack = make_stack()
    expected, expected_caches = _eager(stack, seed=1)
    reset_caches(stack)
    compiled = (
        torch.compile(stack, fullgraph=True)
        if how == "torch.compile"
        else attnbackend.compile(stack, fullgraph=True)
    )
    actual = compiled(*random_batch(1))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert all(not c[1:].isnan().all() for c in caches(stack)), "nothing was written"
    for cache, wanted in zip(caches(stack), expected_caches, strict=True):
        torch.testing.assert_close(cache, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_thousand_random_mixed_batches_need_at_most_three_graphs() -> None:
    stack = make_stack(num_layers=1)
    compiled = attnbackend.compile(stack, compiler="aot_eager", fullgraph=True)
    for cache in caches(stack):
        cache.fill_(0.5)
    for num_tokens in (7, 9, 1):  # warm-up: one count, another, one token
        compiled(*random_batch(0, num_tokens))
    after_warm_up = compiled.attnbackend_compiler.num_graphs
    kinds = set()
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(1000):
            x, batch = random_batch(seed, mixed=True)
            assert bool(compiled(x, batch).isfinite().all())
            kinds.add((len(x) == 1, bool((batch.seq_lens > batch.query_start_loc.diff()).any())))
    graphs = compiled.attnbackend_compiler.num_graphs
    print(f"{graphs} graphs for 1,000 random mixed batches")
    assert graphs == after_warm_up <= 3
    assert len(kinds) == 4, "single tokens and more, with and without context, all occur"


def test_equal_layers_compile_once() -> None:
    stack = make_stack(num_layers=6)
    expected, _ = _eager(stack, seed=3)
    compiler = compile_layers(list(stack.layers), compiler="aot_eager", fullgraph=True, dynamic=True)
    reset_caches(stack)
    torch.testing.assert_close(stack(*random_batch(3)), expected)
    assert compiler.num_graphs == 1


def test_generated_code_allocates_nothing_of_a_cache_s_size() -> None:
    from torch._inductor.utils import run_and_get_code

    stack = make_stack(num_layers=2)
    compiled = attnbackend.compile(stack, fullgraph=True)
    _, codes = run_and_get_code(compiled, *random_batch(5))
    (code,) = codes
    calls = code[code.index("def call(") :]
    shape = tuple(caches(stack)[0].shape)
    allocated = [line for line in calls.splitlines() if "empty_strided" in line]
    assert allocated, "no allocation found: the test reads the wrong code"
    assert not [line for line in allocated if str(shape) in line]
    assert "clone" not in calls
    assert calls.count("torch.ops.attnbackend.cpu_attn_kv_cache_update") == 2


@pytest.mark.parametrize(
    "view",
    [
        lambda c: c,
        lambda c: c.unbind(0)[1],
        lambda c: c[1],
        lambda c: c.chunk(2, 0)[1][0],
        lambda c: c.split(1, 0)[1].squeeze(0),
        lambda c: c.flatten(0, 1).unflatten(0, (2, -1))[1],
        lambda c: c.transpose(0, 1)[:, 1],
    ],
    ids=["whole", "unbind", "index", "chunk", "split", "flatten", "transposed"],
)
@pytest.mark.parametrize("dtype", ["float32", "bytes_as_fp8"])
def test_a_cache_that_is_a_view_is_written_in_place(view, dtype: str) -> None:  # type: ignore[no-untyped-def]
    """One buffer holds two layers: the graph must not copy it (pytorch #131192)."""
    fp8 = dtype != "float32"
    base = torch.zeros(2, 4, 2, 16, 2, 32, dtype=torch.uint8 if fp8 else torch.float32)
    if view(base).dim() == 6:
        base = base[1]
    key = torch.randn(3, 2, 32)
    slots = torch.tensor([17, -1, 40])
    name = "fp8_e4m3" if fp8 else "auto"

    def step(buffer: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        cache = view(buffer)
        attnbackend.kv_cache_update(key * 2, key, cache, slots, kv_cache_dtype=name)
        return cache.float().sum()

    expected = base.clone()
    total = step(expected, key)
    compiled = attnbackend.compile(step, compiler="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(base, key), total)
    assert torch.equal(base, expected)
    assert int((base != 0).sum()) > 0


def test_compiling_for_a_named_backend_puts_its_ops_in_the_graph() -> None:
    compiled = attnbackend.compile(make_stack(), backend="TORCH_SDPA", compiler="aot_eager", fullgraph=True)
    compiled(*random_batch(1))
    text = str(compiled.attnbackend_compiler)
    assert "attnbackend::attention -> attnbackend::torch_sdpa_forward (named by the caller)" in text


def test_a_backend_that_cannot_serve_fails_when_compiled_not_when_run() -> None:
    with attnbackend.registry_scope():
        attnbackend.register_backend("LATER", "nowhere_at_all.Backend")
        compiled = attnbackend.compile(make_stack(), backend="LATER", compiler="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="nowhere_at_all"):
            compiled(*random_batch(1))


def test_compile_caches_depend_on_schemas_fakes_and_passes() -> None:
    import torch.compiler.config as config

    from attnbackend.fx_passes import PassManager, SelectBackend

    assert ops_fingerprint() in config.cache_key_tag
    automatic, named = PassManager([SelectBackend()]), PassManager([SelectBackend("TORCH_SDPA")])
    assert automatic.uuid() == PassManager([SelectBackend()]).uuid() != named.uuid()
    before = config.cache_key_tag
    with cache_key(automatic.uuid()):
        assert automatic.uuid() in config.cache_key_tag
    assert config.cache_key_tag == before


def test_a_changed_fake_changes_the_key_of_another_process_s_caches(tmp_path: Path) -> None:
    """What a changed key does: `test_a_changed_cache_key_keeps_an_old_artefact_from_being_served`."""
    package = Path(attnbackend.__file__).parent
    changed = tmp_path / "attnbackend"
    shutil.copytree(package, changed, ignore=shutil.ignore_patterns("__pycache__"))
    with (changed / "ops" / "rope_write.py").open("a") as source:
        source.write("# a fake that checks something else\n")
    program = "from attnbackend.ops.library import ops_fingerprint; print(ops_fingerprint())"
    keys = [
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(root)}, cwd=root,
            check=True, capture_output=True, text=True,
        ).stdout
        for root in (package.parent, tmp_path)
    ]  # fmt: skip
    assert keys[0].strip() == ops_fingerprint() != keys[1].strip()


def test_training_is_refused_with_the_remedy() -> None:
    stack = make_stack().requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"torch\.inference_mode\(\)"):
        stack(*random_batch(1))
