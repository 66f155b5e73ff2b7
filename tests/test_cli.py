"""The command line: what is printed where, exit codes, and what is said of wrong requests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from cli_calls import error_of, run
from tiny_models import (
    CHAT_TEMPLATE,
    MAX_POSITIONS,
    VOCAB,
    greedy_tokens,
    save_tiny_model,
    tiny_model,
    tiny_tokenizer,
    write_tiny_gguf,
)
from typer.testing import Result

import attnbackend
from attnbackend import cli
from attnbackend.cli.errors import one_line
from attnbackend.cli.writers import InOrder
from attnbackend.runtime import RequestOutput, StepOutput

PROMPT = "the capital of france is"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


def generate(folder: Path, *arguments: object) -> Result:
    """`generate` on the CPU, where the reference of these tests runs too."""
    return run("generate", "--model", folder, "--device", "cpu", *arguments)


def expected_tokens(prompt: str, count: int) -> list[int]:
    """Greedy tokens up to the end of sequence, by transformers alone."""
    tokens = greedy_tokens(tiny_model(), [VOCAB[word] for word in prompt.split()], count)
    end = tokens.index(VOCAB["</s>"]) + 1 if VOCAB["</s>"] in tokens else count
    return tokens[:end]


def continuation(prompt: str, token_ids: list[int]) -> str:
    """The text that the tokens add to the prompt, without special tokens."""
    decode, ids = tiny_tokenizer().decode, [VOCAB[word] for word in prompt.split()]
    return decode(ids + token_ids, skip_special_tokens=True).removeprefix(decode(ids))


def subprocess_run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "attnbackend", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, **options,
    )  # fmt: skip


# generate


def test_json_lines_hold_the_greedy_tokens_of_the_model_and_nothing_else_is_on_stdout(model_folder):
    result = generate(model_folder, "--json", "--max-tokens", 12, PROMPT)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    expected = expected_tokens(PROMPT, 12)
    assert json.loads(line) == {
        "prompt": PROMPT,
        "token_ids": expected,
        "text": continuation(PROMPT, expected),
        "finish_reason": "length" if len(expected) == 12 else "stop",
    }


def test_text_output_is_the_completion_alone(model_folder):
    as_json = json.loads(generate(model_folder, "--json", PROMPT).stdout)
    result = generate(model_folder, PROMPT)
    assert result.stdout == as_json["text"] + "\n"
    assert "tokens/s" in result.stderr


def test_several_prompts_are_served_together_and_printed_in_order(model_folder):
    prompts = [PROMPT, "one", "paris is the capital", "two three"]
    result = generate(model_folder, "--json", "--max-tokens", 9, *prompts)
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [found["prompt"] for found in objects] == prompts
    assert [found["token_ids"] for found in objects] == [expected_tokens(p, 9) for p in prompts]


def test_the_default_is_32_tokens_at_most(model_folder):
    found = json.loads(generate(model_folder, "--json", PROMPT).stdout)
    assert found["token_ids"] == expected_tokens(PROMPT, 32)


def test_sampling_repeats_with_a_seed_and_differs_between_seeds(model_folder):
    def sampled(seed: int) -> list[int]:
        options = ("--temperature", 3, "--top-k", 12, "--top-p", 0.99, "--seed", seed)
        return json.loads(generate(model_folder, "--json", *options, PROMPT).stdout)["token_ids"]

    assert sampled(1) == sampled(1)
    assert len({tuple(sampled(seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    "options",
    [
        ("--backend", "torch_sdpa"),
        ("--block-size", 4),
        ("--num-blocks", 3),
        ("--max-model-len", 20),
        ("--kv-cache-dtype", "float32"),
        ("--dtype", "float32"),
    ],
    ids=lambda options: options[0][2:],
)
def test_an_option_of_the_engine_does_not_change_the_tokens(model_folder, options):
    result = generate(model_folder, "--json", "--max-tokens", 7, *options, PROMPT)
    assert json.loads(result.stdout)["token_ids"] == expected_tokens(PROMPT, 7)


def test_the_named_backend_and_cache_reach_the_engine(model_folder, monkeypatch):
    seen: dict[str, object] = {}

    class Spy(attnbackend.Engine):
        def __init__(self, *args: object, **options: object) -> None:
            seen.update(options)
            super().__init__(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("attnbackend.runtime.Engine", Spy)
    options = ("--backend", "torch_sdpa", "--block-size", 8, "--num-blocks", 9)
    more = ("--kv-cache-dtype", "fp8_e5m2", "--max-model-len", 40, "--max-tokens", 2)
    drafts = ("--speculative", "ngram", "--num-speculative-tokens", 2)
    found = generate(model_folder, *options, *more, *drafts, PROMPT)
    assert found.exit_code == 0
    assert "drafts accepted" in found.stderr
    assert seen == {
        "backend": "TORCH_SDPA", "block_size": 8, "num_blocks": 9, "kv_cache_dtype": "fp8_e5m2",
        "max_model_len": 40, "max_num_seqs": 1, "compile": False, "speculative": "ngram",
        "num_speculative_tokens": 2,
    }  # fmt: skip


def test_chat_puts_the_prompt_in_the_template(tmp_path):
    folder = save_tiny_model(tmp_path / "chatty", CHAT_TEMPLATE)
    found = json.loads(generate(folder, "--json", "--chat", "--max-tokens", 5, "capital").stdout)
    assert found["prompt"] == "capital"
    assert found["token_ids"] == expected_tokens("the capital is one", 5)


def test_quiet_leaves_stderr_empty(model_folder):
    assert generate(model_folder, "--quiet", PROMPT).stderr == ""


def test_stages_are_told_on_stderr(model_folder):
    stages = generate(model_folder, PROMPT).stderr.splitlines()
    assert "loading the weights of tiny-llama ..." in stages


# generate: wrong requests


def test_an_unknown_backend_lists_near_names_before_anything_is_loaded():
    message = error_of(run("generate", "--model", "/nowhere", "--backend", "torch_sdap", "x"))
    assert "'torch_sdap'" in message
    assert "did you mean TORCH_SDPA" in message


def test_a_backend_without_a_class_is_refused_before_anything_is_loaded():
    message = error_of(run("generate", "--model", "/nowhere", "--backend", "hpc_attn", "x"))
    assert "'HPC_ATTN' is not implemented" in message


def test_a_backend_that_cannot_serve_the_model_says_why(model_folder, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    result = generate(model_folder, "--backend", "triton_attn", "--block-size", 8, PROMPT)
    assert "block_size=8" in error_of(result)


def test_a_missing_model_says_where_it_was_looked_for(tmp_path):
    message = error_of(generate(tmp_path / "nowhere", PROMPT))
    assert str(tmp_path / "nowhere") in message
    assert "does not exist" in message


def test_a_cut_off_gguf_file_is_named(tmp_path):
    file = write_tiny_gguf(tmp_path / "cut.gguf")
    file.write_bytes(file.read_bytes()[:900])
    assert "cut.gguf is cut off" in error_of(generate(file, PROMPT))


def test_damaged_weights_are_one_line(model_folder, tmp_path):
    copy = shutil.copytree(model_folder, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"\0" * 3000)
    assert "weights of" in error_of(generate(copy, PROMPT))


def test_an_empty_prompt_is_refused_by_number():
    message = error_of(run("generate", "--model", "/nowhere", "text", ""))
    assert "prompt 2 of 2 is empty" in message


def test_a_prompt_without_tokens_is_refused(model_folder):
    assert "prompt 1: prompt [] has no tokens" in error_of(generate(model_folder, "   "))


def test_a_prompt_too_long_for_the_model_states_the_numbers(model_folder):
    prompt = " ".join(["one"] * MAX_POSITIONS)
    message = error_of(generate(model_folder, "--max-tokens", 3, "two", prompt))
    assert f"prompt 2: the request needs {MAX_POSITIONS + 3} tokens" in message
    assert f"max_model_len allows {MAX_POSITIONS}" in message


def test_chat_without_a_template_is_refused(model_folder):
    assert "no chat template" in error_of(generate(model_folder, "--chat", PROMPT))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--temperature", -1), "temperature=-1"),
        (("--top-p", 1.5, "--temperature", 1), "top_p=1.5"),
        (("--top-k", 5), "top_k=5 has no effect at temperature=0"),
        (("--kv-cache-dtype", "fp8_e5m3"), "did you mean fp8_e5m2"),
        (("--kv-cache-dtype", "zzz"), "allowed: auto, float16"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_loaded(options, said):
    assert said in error_of(run("generate", "--model", "/nowhere", *options, "x"))


@pytest.mark.parametrize(
    ("options", "said"), [(("--dtype", "int4"), "allowed: auto"), (("--device", "tpu"), "'tpu'")]
)
def test_a_wrong_dtype_or_device_is_one_line(options, said):
    assert said in error_of(run("generate", "--model", "/nowhere", *options, "x"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate",), "Missing argument 'PROMPT"),
        (
            ("generate", "--max-tokens", 0, "x"),
            "'--max-tokens': Input should be greater than or equal to 1",
        ),
        (("generate", "--max-tokns", 3, "x"), "--max-tokens"),
        (("generrate", "x"), "generrate"),
    ],
)
def test_a_usage_error_exits_with_2_and_says_what_is_allowed(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_fault_of_the_program_keeps_its_traceback(model_folder, monkeypatch):
    monkeypatch.setattr("attnbackend.cli.serving.serve", lambda *_: 1 / 0)
    assert isinstance(generate(model_folder, PROMPT).exception, ZeroDivisionError)


def test_an_interrupt_ends_with_130_and_no_traceback(model_folder, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnbackend.cli.serving.serve", interrupted)
    result = generate(model_folder, PROMPT)
    assert result.exit_code == cli.EXIT_INTERRUPTED
    assert result.stderr.endswith("\ninterrupted\n")


# order of several completions


class NotingWriter:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin(self, prompt: str) -> None:
        self.notes.append(f"begin {prompt}")

    def piece(self, text: str) -> None:
        self.notes.append(text)

    def end(self, prompt: str, output: RequestOutput) -> None:
        self.notes.append(f"end {prompt} {output.text}")


def step(request_id: str, text: str, whole: str | None = None) -> StepOutput:
    if whole is None:
        return StepOutput(request_id, [0], text)
    output = RequestOutput(request_id, None, [0], [0], whole, "stop")
    return StepOutput(request_id, [0], text, "stop", output)


def test_the_first_unfinished_prompt_is_written_as_it_comes_and_later_ones_wait():
    writer = NotingWriter()
    in_order = InOrder(writer, {"r0": "A", "r1": "B", "r2": "C"})
    in_order.add(step("r1", "b1"))
    in_order.add(step("r0", "a1"))
    assert writer.notes == ["begin A", "a1"]
    in_order.add(step("r1", "b2", "b1b2"))
    in_order.add(step("r2", "c1"))
    assert writer.notes == ["begin A", "a1"]
    in_order.add(step("r0", "a2", "a1a2"))
    assert writer.notes[2:] == [
        "a2",
        "end A a1a2",
        "begin B",
        "b1",
        "b2",
        "end B b1b2",
        "begin C",
        "c1",
    ]
    in_order.add(step("r2", "", "c1"))
    assert writer.notes[-1] == "end C c1"


# the command itself


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"attnbackend {attnbackend.__version__}\n")


def test_help_lists_the_commands():
    text = run("--help").stdout
    assert all(command in text for command in ("generate", "backends", "explain"))


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_says_how_to_install_it(monkeypatch, capsys, missing):
    found = cli.importlib.util.find_spec
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name == missing else found(name)
    )
    assert cli.main(["--version"]) == cli.EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"needs {missing}" in captured.err
    assert "pip install 'attnbackend[cli]'" in captured.err


def test_main_returns_the_exit_code(capsys):
    assert cli.main(["--version"]) == 0
    assert cli.main(["explain", "--head-size", "64"]) == cli.EXIT_USER_ERROR


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("a\n  b\n  c", "a; b; c"),
        ("cannot serve:\n  x=1\n  y=2\n", "cannot serve: x=1; y=2"),
        ("plain", "plain"),
    ],
)
def test_a_message_of_several_lines_becomes_one(message, expected):
    assert one_line(message) == expected


def test_version_imports_neither_transformers_nor_a_kernel_library():
    code = (
        "import sys; from attnbackend.cli import main; main(['--version']); "
        "sys.exit(bool({'transformers', 'triton', 'flashinfer'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"attnbackend {attnbackend.__version__}\n")


def test_a_process_prints_json_alone_on_stdout_and_exits_with_0(model_folder):
    options = ("--model", model_folder, "--device", "cpu", "--max-tokens", 3, "--json")
    ran = subprocess_run("generate", *options, PROMPT)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["token_ids"] == expected_tokens(PROMPT, 3)
    assert "Traceback" not in ran.stderr


def test_ctrl_c_that_an_import_swallowed_ends_the_command_at_the_next_stage():
    from attnbackend.cli.stages import Stages

    before = signal.getsignal(signal.SIGINT)
    with Stages(quiet=True) as stages:
        stages("importing")
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stages("loading")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_a_process_cleanly(model_folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "attnbackend", "generate", "--model", str(model_folder), PROMPT],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "importing torch ...\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    # Python itself ends by the signal where the interrupt met an import's exec(); to a shell both
    # are 130.
    assert process.returncode in (cli.EXIT_INTERRUPTED, -signal.SIGINT), err
    assert out == ""
    assert "Traceback" not in err
    assert err.endswith("interrupted\n")


@pytest.mark.slow
def test_the_packaged_language_model_knows_the_capital_of_france():
    pytest.importorskip("gguf")
    ran = subprocess_run("generate", "The capital of France is")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(" Paris.")
    assert "tokens/s" in ran.stderr
