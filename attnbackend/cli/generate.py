"""``attnbackend generate``: complete prompts with a model from local files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnbackend.cli import EXIT_NOT_POSSIBLE
from attnbackend.cli.choices import backend_choice, kv_cache_dtype_choice
from attnbackend.cli.errors import UserError, print_error, user_errors
from attnbackend.cli.options import (
    BackendName,
    BlockSize,
    Device,
    Dtype,
    ModelPath,
    NumSpeculativeTokens,
    Quiet,
)
from attnbackend.cli.stages import Stages

if TYPE_CHECKING:
    from attnbackend.integrations.loading import LoadedModel
    from attnbackend.runtime import SamplingParams

__all__ = ["generate"]

Input = tuple[str, list[int]]
"""A prompt as typed, and its token ids."""

_MAX_NUM_SEQS = 64


_Prompts = Annotated[list[str], typer.Argument(metavar="PROMPT", help="One or several texts to go on from.")]
_MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
_Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
_TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
_TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens of this weight.")]
_Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
_Chat = Annotated[bool, typer.Option("--chat", help="Put each prompt in the model's chat template.")]
_CompileModel = Annotated[
    bool,
    typer.Option(
        "--compile/--no-compile",
        help="Compile the model first. The first token comes seconds later, which only long "
        "outputs or many prompts can repay.",
    ),
]
_NumBlocks = Annotated[
    int | None, typer.Option(min=2, help="Blocks of the KV cache. Default: what is needed.")
]
_KVCacheDtype = Annotated[str, typer.Option(metavar="DTYPE", help="Such as fp8. auto: the model's own.")]
_MaxModelLen = Annotated[int | None, typer.Option(min=1, help="Most tokens of prompt and output together.")]
_Speculative = Annotated[
    str | None,
    typer.Option(metavar="METHOD", help="ngram checks guesses from the text so far, several a step."),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt and nothing else.")]


def generate(
    prompts: _Prompts,
    model: ModelPath = None,
    backend: BackendName = None,
    max_tokens: _MaxTokens = 32,
    temperature: _Temperature = 0.0,
    top_k: _TopK = 0,
    top_p: _TopP = 1.0,
    seed: _Seed = None,
    chat: _Chat = False,
    compile_model: _CompileModel = False,
    block_size: BlockSize = 16,
    num_blocks: _NumBlocks = None,
    kv_cache_dtype: _KVCacheDtype = "auto",
    max_model_len: _MaxModelLen = None,
    speculative: _Speculative = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: _AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Complete prompts with a model from local files.

    One prompt's text is printed as it comes. Several prompts are served together and printed in
    order.
    """
    with user_errors(), Stages(quiet) as stages:
        _check_prompts(prompts)
        engine_options: dict[str, Any] = {
            "backend": backend_choice(backend),
            "block_size": block_size,
            "num_blocks": num_blocks,
            "kv_cache_dtype": kv_cache_dtype_choice(kv_cache_dtype),
            "compile": compile_model,
            "speculative": speculative,
            "num_speculative_tokens": num_speculative_tokens,
        }
        _check_speculation(speculative, num_speculative_tokens)
        params = _sampling_params(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        stages("importing torch")
        from attnbackend.integrations.loading import load_model

        loaded = load_model(model, dtype=dtype, device=device, on_stage=stages)
        encode = _chat_ids if chat else _plain_ids
        inputs = [(prompt, encode(loaded, prompt)) for prompt in prompts]
        engine_options |= _limits(loaded, inputs, max_tokens, max_model_len)
        _serve(loaded, engine_options, inputs, params, stages, as_json)


def _serve(
    loaded: LoadedModel,
    engine_options: dict[str, Any],
    inputs: list[Input],
    params: SamplingParams,
    stages: Stages,
    as_json: bool,
) -> None:
    from attnbackend.cli.serving import serve
    from attnbackend.cli.writers import JsonWriter, TextWriter
    from attnbackend.runtime import Engine

    stages("preparing the engine")
    engine = Engine(loaded.model, loaded.tokenizer, **engine_options)
    stages("compiling" if engine_options["compile"] else "computing the first token")
    writer = JsonWriter() if as_json else TextWriter()
    report = serve(engine, inputs, params, writer, stages.clear)
    stages.note(str(report))
    if engine.proposer is not None:
        stages.note(str(engine.proposer.stats))
    for error in report.errors:
        print_error(error)
    if report.errors:
        raise typer.Exit(EXIT_NOT_POSSIBLE)


def _check_prompts(prompts: list[str]) -> None:
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UserError(f"prompt {number} of {len(prompts)} is empty; give it some text")


def _check_speculation(speculative: str | None, num_speculative_tokens: int | None) -> None:
    """Before the model is loaded."""
    from attnbackend.runtime.speculation import drafts_of

    drafts_of(speculative, num_speculative_tokens)


def _sampling_params(**values: Any) -> SamplingParams:
    from attnbackend.runtime import SamplingParams

    return SamplingParams(**values)


def _limits(
    loaded: LoadedModel, inputs: list[Input], max_tokens: int, max_model_len: int | None
) -> dict[str, int]:
    """Engine limits that just fit these prompts, so that the cache is no larger than they need."""
    longest = max(len(token_ids) for _, token_ids in inputs) + max_tokens
    of_model = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", longest)
    return {
        "max_num_seqs": min(len(inputs), _MAX_NUM_SEQS),
        "max_model_len": max_model_len or min(longest, of_model),
    }


def _plain_ids(loaded: LoadedModel, prompt: str) -> list[int]:
    return list(loaded.tokenizer.encode(prompt))


def _chat_ids(loaded: LoadedModel, prompt: str) -> list[int]:
    tokenizer = loaded.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(f"--chat: the tokenizer of {loaded.name} has no chat template; leave --chat out")
    message = {"role": "user", "content": prompt}
    ids = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(ids)
