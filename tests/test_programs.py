"""Whole models as programs: exported, saved, loaded, packaged; their caches are inputs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_zoo import make_latent_model
from model_zoo import EagerReference, make_model
from program_steps import greedy, prompt_logits

import attnbackend
from attnbackend.fx_passes import (
    FuseRopeCacheWrite,
    PassManager,
    RecogniseAttention,
    RemoveNoOps,
    SelectBackend,
    graph_text,
)
from attnbackend.integrations.programs import ModelStep, export_model
from attnbackend.testing import assert_within_rule

PROMPT = list(range(3, 12))
NUM_TOKENS = 64

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama")


@pytest.fixture(scope="module")
def eager_tokens(model: Any) -> list[int]:
    """Greedy tokens of the model as it is, without attnbackend, every step from the start."""
    reference = EagerReference(model)
    tokens = list(PROMPT)
    for _ in range(NUM_TOKENS):
        tokens.append(int(reference.logits(tokens).eager[-1].argmax()))
    return tokens[len(PROMPT) :]


def test_a_saved_and_loaded_program_generates_what_the_model_does(
    model: Any, eager_tokens: list[int], tmp_path: Path
) -> None:
    program = export_model(model, backend="CPU_ATTN")
    assert graph_text(program.graph_module).count("cpu_attn_forward") == 2
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert greedy(loaded, PROMPT, NUM_TOKENS, ModelStep(model).new_caches(9)) == eager_tokens


def test_a_program_runs_in_a_process_that_has_no_model(model: Any, tmp_path: Path) -> None:
    """Nobody there asked for the backend before the program did."""
    torch.export.save(export_model(model), tmp_path / "model.pt2")
    caches = ModelStep(model).new_caches(9)
    expected = greedy(ModelStep(model), PROMPT, 4, ModelStep(model).new_caches(9))
    torch.save(caches, tmp_path / "caches.pt")
    code = (
        "import sys, torch, attnbackend\n"
        "from program_steps import greedy\n"
        "program = attnbackend.load_program(sys.argv[1] + '/model.pt2').module()\n"
        "caches = torch.load(sys.argv[1] + '/caches.pt')\n"
        f"print(greedy(program, {PROMPT}, 4, caches), 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == f"{expected} False"
    assert "weights_only" not in done.stderr, done.stderr[-2000:]  # the example inputs' types are known


@pytest.mark.slow
def test_a_package_of_aotinductor_generates_what_the_model_does(
    model: Any, eager_tokens: list[int], tmp_path: Path
) -> None:
    program = export_model(model, backend="CPU_ATTN", max_num_batched_tokens=64)
    attnbackend.save_package(program, tmp_path / "model.pt2")
    packaged = attnbackend.load_package(tmp_path / "model.pt2")
    caches = ModelStep(model).new_caches(9)
    assert greedy(packaged, PROMPT, NUM_TOKENS, caches) == eager_tokens
    assert all(bool(cache.any()) for cache in caches)


@pytest.mark.gpu
def test_a_program_and_a_package_on_a_gpu_generate_what_the_model_does(tmp_path: Path) -> None:
    """The package in a process of its own, as it is served."""
    on_gpu = make_model("llama").to("cuda")
    reference, tokens = EagerReference(on_gpu), list(PROMPT)
    for _ in range(NUM_TOKENS):
        logits = reference._float32(input_ids=torch.tensor([tokens], device="cuda"), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    expected = tokens[len(PROMPT) :]
    program = export_model(on_gpu, backend="TRITON_ATTN", max_num_batched_tokens=64)
    assert greedy(program.module(), PROMPT, NUM_TOKENS, ModelStep(on_gpu).new_caches(9)) == expected
    attnbackend.save_package(program, tmp_path / "model.pt2")
    torch.save(ModelStep(on_gpu).new_caches(9), tmp_path / "caches.pt")
    code = (
        "import sys, torch, attnbackend\n"
        "from program_steps import greedy\n"
        "step = attnbackend.load_package(sys.argv[1] + '/model.pt2')\n"
        f"print(greedy(step, {PROMPT}, {NUM_TOKENS}, torch.load(sys.argv[1] + '/caches.pt')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(expected)


def test_a_package_with_a_runtime_of_its_own_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt2", "w") as package:
        package.writestr("model/wrapper.so", b"\0_ZNSt6locale7classicEv\0libgcc_s.so.1\0")
    with pytest.raises(ValueError, match=r"wrapper.so in package .*attnbackend.save_package"):
        attnbackend.load_package(tmp_path / "model.pt2")


@pytest.mark.parametrize("name", ["gemma2", "gemma3n_text", "llama4_text"])
def test_layers_of_several_kinds_and_shared_caches_are_exported(name: str) -> None:
    """Gemma 3n's last two layers read the caches of earlier ones and have none of their own; Llama 4's ask
    a cache for positions."""
    model = make_model(name)
    step = ModelStep(model)
    owned = step.new_caches(9)
    assert len(owned) == {"gemma2": 2, "gemma3n_text": 3, "llama4_text": 2}[name]
    prompt = list(range(3, 20))
    logits = prompt_logits(export_model(model).module(), prompt, owned)
    assert_within_rule(logits, *EagerReference(model).logits(prompt), what=name)


def test_latent_attention_is_exported_and_taken_for_nothing_else() -> None:
    """DeepSeek's layers have a cache of one row a token, which the dense fusions must leave alone."""
    model = make_latent_model("deepseek_v3")
    program = export_model(model, passes=[])
    passes = [SelectBackend("TORCH_MLA"), FuseRopeCacheWrite(), RecogniseAttention(), RemoveNoOps()]
    recognised, selected, fused, _ = PassManager(passes).run_on(program)
    assert [change.after for change in selected.changes] == ["attnbackend::torch_mla_forward_mixed"] * 2
    assert not recognised.changes + fused.changes + recognised.near_misses + fused.near_misses
    caches = ModelStep(model).new_caches(9)
    logits = prompt_logits(program.module(), PROMPT, caches)
    assert_within_rule(logits, *EagerReference(model).logits(PROMPT), what="deepseek_v3")
    with torch.no_grad():
        expected = greedy(ModelStep(model), PROMPT, 4, ModelStep(model).new_caches(9))
    assert greedy(program.module(), PROMPT, 4, caches) == expected
    assert not [name for m in model.modules() for name in vars(m) if name.startswith("attnbackend")]


def test_the_model_is_left_without_traces(model: Any) -> None:
    step = ModelStep(model)
    with torch.no_grad():
        prompt_logits(step, PROMPT, step.new_caches(9))
    assert not [
        n for m in model.modules() for n in vars(m) if n in ("attnbackend_layer", "attnbackend_chunk")
    ]


def test_a_backend_that_cannot_serve_is_refused_at_export(model: Any) -> None:
    with pytest.raises(ValueError, match="FLASHINFER"):
        export_model(model, backend="FLASHINFER")


_STALE = """
import sys, torch
import attnbackend
from attnbackend.fx_passes import Change, GraphPass, PassReport

class Scale(GraphPass):
    name = "scale"
    def __init__(self, factor):
        self.factor = factor
    def run(self, graph_module):
        for node in list(graph_module.graph.nodes):
            if "sin" in str(node.target):
                with graph_module.graph.inserting_after(node):
                    scaled = graph_module.graph.call_function(torch.mul, (node, self.factor))
                    scaled.meta = dict(node.meta)
                node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        graph_module.recompile()
        return PassReport(self.name, (Change("sin", "sin", "scaled", "asked for"),))

compiled = attnbackend.compile(lambda x: x.sin() + 1, passes=[Scale(FACTOR)])
print(float(compiled(torch.full((4,), 1.5707964))[0]))
"""


@pytest.mark.slow
def test_a_changed_pass_never_meets_code_compiled_without_the_change(tmp_path: Path) -> None:
    """Two processes and one cache on disk: the second differs in the pass's source alone."""

    def run(factor: str) -> float:
        (tmp_path / "program.py").write_text(_STALE.replace("FACTOR", factor))
        environment = {**__import__("os").environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, str(tmp_path / "program.py")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return float(done.stdout.strip().splitlines()[-1])

    assert run("2.0") == 3.0
    assert run("5.0") == 6.0


def test_what_keys_the_caches_changes_with_each_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of schemas, fakes and passes; `tests/test_torch_compat.py` shows that the key is what counts."""
    from attnbackend.ops import library

    def uuid() -> str:
        return PassManager([SelectBackend()]).uuid()

    before, read = uuid(), Path.read_text

    for touched in ("checks.py", "calls.py", "rope_write.py", "select_backend.py", "forms.py", "nodes.py"):

        def changed(path: Path, *args: Any, touched: str = touched, **kwargs: Any) -> str:
            return read(path, *args, **kwargs) + ("#" if path.name == touched else "")

        monkeypatch.setattr(Path, "read_text", changed)
        assert uuid() != before, touched
        monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(library, "ROLES", library.ROLES[1:])
    assert uuid() != before
    assert attnbackend.fx_passes.PassManager([]).uuid() != before
