"""``attnbackend backends`` and ``attnbackend explain``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from cli_calls import error_of, run
from tiny_models import save_tiny_model

from attnbackend import cli
from attnbackend.registry import backend_names, register_backend, registry_scope


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


# backends


def test_every_registered_name_is_listed_with_its_status():
    result = run("backends", "--json")
    assert result.exit_code == 0
    listed = {fact["name"]: fact for fact in json.loads(result.stdout)}
    assert list(listed) == backend_names()
    sdpa = listed["TORCH_SDPA"]
    assert (sdpa["status"], sdpa["reason"], sdpa["source"]) == ("ready", None, "built-in")
    assert "cpu" in sdpa["devices"]
    assert sdpa["ops"] == ["attnbackend::torch_sdpa_forward"]
    assert sdpa["class_path"] == "attnbackend.backends.torch_sdpa.TorchSDPABackend"
    assert {"sliding window", "encoder", "encoder only", "cross attention"} <= set(sdpa["features"])
    assert "encoder" not in listed["FLASH_ATTN"]["features"]
    assert listed["CUSTOM"]["status"] == "not implemented"
    assert listed["CUSTOM"]["class_path"] is None


def test_third_party_backends_are_listed_and_a_broken_one_hides_no_other():
    from attnbackend.backends.torch_sdpa import TorchSDPABackend

    class MyBackend(TorchSDPABackend):
        supported_device_types = ("xpu",)

        @staticmethod
        def get_name() -> str:
            return "MY_LISTED_ATTN"

    with registry_scope():
        register_backend()(MyBackend)
        register_backend("ABSENT_ATTN", "no_such_package.attn.Backend")
        result = run("backends", "--json")
        text = run("backends").stdout
    listed = {fact["name"]: fact for fact in json.loads(result.stdout)}
    mine, absent = listed["MY_LISTED_ATTN"], listed["ABSENT_ATTN"]
    assert (mine["status"], mine["source"]) == ("unavailable", "third-party")
    assert mine["reason"] == "needs xpu, and there is none here"
    assert absent["status"] == "unavailable"
    assert "no_such_package" in absent["reason"]
    assert absent["class_path"] == "no_such_package.attn.Backend"
    assert listed["TORCH_SDPA"]["status"] == "ready"
    assert "MY_LISTED_ATTN  unavailable: needs xpu" in text
    assert "test_cli" in text


def test_the_text_lists_ready_ones_first_and_all_names():
    text = run("backends").stdout
    assert text.index("TORCH_SDPA  ready") < text.index("not implemented (")
    assert all(name in text for name in backend_names())


# explain

SHAPE = ("--device", "cpu", "--head-size", 64, "--num-heads", 8)


def test_explain_prints_the_choice_and_the_table():
    result = run("explain", *SHAPE)
    assert result.exit_code == 0
    assert "head_size=64 num_heads=8 num_kv_heads=8 dtype=float32" in result.stdout
    assert "TORCH_SDPA" in result.stdout


def test_every_option_of_explain_reaches_the_configuration():
    options = (
        "--num-kv-heads", 2, "--dtype", "bfloat16", "--kv-cache-dtype", "fp8", "--block-size", 32,
        "--sliding-window", 128, "--soft-cap", 30, "--alibi", "--sinks", "--lse", "--non-causal",
        "--backend", "torch_sdpa",
    )  # fmt: skip
    (found,) = json.loads(run("explain", "--json", *SHAPE, *options).stdout)
    config = found["config"]
    expected = {
        "device_type": "cpu", "head_size": 64, "num_heads": 8, "num_kv_heads": 2,
        "dtype": "bfloat16", "kv_cache_dtype": "fp8", "block_size": 32, "sliding_window": 128,
        "logits_soft_cap": 30.0, "has_alibi": True, "has_sinks": True, "needs_lse": True,
        "causal": False, "use_mla": False, "compute_capability": None,
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    assert found["forced_name"] == "TORCH_SDPA"
    assert found["layers"] == []


def test_explain_exits_with_1_when_nothing_can_serve():
    result = run("explain", "--json", *SHAPE, "--mla")
    assert result.exit_code == cli.EXIT_NOT_POSSIBLE
    (found,) = json.loads(result.stdout)
    assert found["selected"] is None
    named = run("explain", *SHAPE, "--num-kv-heads", 3, "--backend", "torch_sdpa")
    assert named.exit_code == cli.EXIT_NOT_POSSIBLE
    assert "multiples of num_kv_heads=3" in named.stdout


def test_explain_asks_for_another_gpu_by_its_compute_capability():
    options = (
        "--device",
        "cuda",
        "--head-size",
        64,
        "--num-heads",
        8,
        "--compute-capability",
        "9.0",
    )
    (found,) = json.loads(run("explain", "--json", *options).stdout)
    assert found["config"]["compute_capability"] == [9, 0]
    assert found["config"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--head-size", 64), "--num-heads"),
        ((*SHAPE, "--backend", "trton_attn"), "did you mean TRITON_ATTN"),
        ((*SHAPE, "--dtype", "bfloat61"), "did you mean bfloat16"),
        ((*SHAPE, "--kv-cache-dtype", "fp9"), "did you mean fp8"),
        (("--device", "cudaa", "--head-size", 64, "--num-heads", 8), "did you mean cuda"),
        ((*SHAPE, "--compute-capability", "9.0"), "goes with --device cuda"),
        (("--device", "cuda", "--compute-capability", "nine"), "not two numbers"),
        (("--model", "/nowhere"), "does not exist"),
        (("--model", "/nowhere", "--head-size", 64), "--model says head_size itself"),
    ],
)
def test_a_wrong_request_to_explain_is_one_line(options, said):
    assert said in error_of(run("explain", *options))


def test_explain_takes_the_layers_of_a_model_from_its_config(model_folder, tmp_path):
    folder = tmp_path / "config-alone"
    folder.mkdir()
    shutil.copy(model_folder / "config.json", folder)
    options = ("--device", "cpu", "--kv-cache-dtype", "fp8", "--block-size", 32)
    (found,) = json.loads(run("explain", "--json", "--model", folder, *options).stdout)
    assert found["layers"] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    config = found["config"]
    assert (config["head_size"], config["num_heads"], config["num_kv_heads"]) == (32, 2, 1)
    assert (config["kv_cache_dtype"], config["block_size"]) == ("fp8", 32)
    text = run("explain", "--model", folder, "--device", "cpu").stdout
    assert text.startswith("2 layers: model.layers.0.self_attn, model.layers.1.self_attn\n")


def test_explain_has_one_table_for_each_kind_of_layer(tmp_path):
    from transformers import Gemma2Config

    Gemma2Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, sliding_window=48,
        attn_logit_softcapping=25.0, query_pre_attn_scalar=32,
    ).save_pretrained(tmp_path)  # fmt: skip
    found = json.loads(run("explain", "--json", "--device", "cpu", "--model", tmp_path).stdout)
    kinds = [(len(f["layers"]), f["config"]["sliding_window"]) for f in found]
    assert kinds == [(2, 48), (2, None)]
    assert all(f["config"]["logits_soft_cap"] == 25.0 for f in found)


def test_explain_finds_attention_sinks_in_a_model(tmp_path):
    from transformers import GptOssConfig

    GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_local_experts=2,
        num_experts_per_tok=1,
    ).save_pretrained(tmp_path)  # fmt: skip
    found = json.loads(run("explain", "--json", "--device", "cpu", "--model", tmp_path).stdout)
    assert [f["config"]["has_sinks"] for f in found] == [True, True]
