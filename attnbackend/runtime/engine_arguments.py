"""What an engine and `generate` are given, checked."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence

from attnbackend.runtime.admission import Prompt
from attnbackend.runtime.detokenizer import Tokenizer
from attnbackend.runtime.model_runner_protocol import ModelRunner
from attnbackend.runtime.sampling_params import SamplingParams

ParamsForPrompts = SamplingParams | Sequence[SamplingParams] | None


def check_decodes(num_drafts: int, max_num_batched_tokens: int, async_scheduling: bool | None) -> None:
    if async_scheduling is not None:
        require_flag("async_scheduling", async_scheduling)
    if num_drafts and async_scheduling:
        raise ValueError(
            "async_scheduling=True with speculation is not possible: drafts follow from tokens that must be "
            "known to the host; leave one of the two out"
        )
    if max_num_batched_tokens < 1 + num_drafts:
        raise ValueError(
            f"max_num_batched_tokens={max_num_batched_tokens} is less than one decode of 1 + "
            f"{num_drafts} speculative tokens; raise it, or lower num_speculative_tokens"
        )


def check_runner(runner: ModelRunner, num_drafts: int, limits: Mapping[str, int]) -> None:
    """Whether the engine's limits are the runner's; without graphs they may be less."""
    built_for = getattr(runner, "num_drafts", num_drafts)
    if built_for != num_drafts:
        raise ValueError(
            f"the engine speculates with {num_drafts} tokens and its runner was built for {built_for}; give "
            "build_runner the same num_drafts"
        )
    options, has_graphs = getattr(runner, "options", None), getattr(runner, "graphs", None) is not None
    for name, limit in limits.items():
        most = getattr(options, name, limit)
        if limit > most or (has_graphs and limit < most):
            raise ValueError(
                f"the engine has {name}={limit} and its runner was built for {most}; give build_runner the "
                f"same {name}"
            )


def check_tokenizer(tokenizer: object) -> None:
    lacking = [name for name in ("encode", "decode") if not callable(getattr(tokenizer, name, None))]
    if tokenizer is not None and lacking:
        raise TypeError(
            f"Engine: tokenizer={tokenizer!r} has no {' and no '.join(lacking)}; give a tokenizer of "
            "transformers, such as AutoTokenizer.from_pretrained(...), or None to work on token ids"
        )


def require_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"Engine: {name}={value!r} must be True or False")


def require_name(name: str, value: object, example: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"Engine: {name}={value!r} must be a name, such as {example!r}")


def require_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Engine: {name}={value!r} must be a whole number")


def require_positive(name: str, value: int) -> None:
    require_whole(name, value)
    if value < 1:
        raise ValueError(f"Engine: {name}={value} is not allowed; it must be at least 1")


def eos_ids(given: Iterable[int] | None, tokenizer: Tokenizer | None, vocab_size: int) -> frozenset[int]:
    if given is None:
        found = getattr(tokenizer, "eos_token_id", None)
        given = () if found is None else (found,) if isinstance(found, int) else found
    if not isinstance(given, Iterable):
        raise TypeError(f"Engine: eos_token_ids={given!r} must be a list of token ids; leave it out for none")
    eos_ids = frozenset(given)
    for token_id in eos_ids:
        require_whole("end-of-sequence id", token_id)
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"Engine: end-of-sequence id {token_id} is outside the vocabulary; allowed are 0 "
                f"to {vocab_size - 1}. Does the tokenizer belong to this model?"
            )
    return eos_ids


def prompt_list(prompts: str | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    found = list(prompts) if isinstance(prompts, Iterable) else []
    if not isinstance(prompts, Iterable) or any(isinstance(prompt, int) for prompt in found):
        raise TypeError(
            f"generate: prompts={reprlib.repr(prompts)} must be a string, or a list of strings or lists of "
            "token ids; one prompt of token ids is [[1, 2, 3]]"
        )
    return found


def params_for(prompts: Sequence[Prompt], sampling_params: ParamsForPrompts) -> list[SamplingParams]:
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * len(prompts)
    if isinstance(sampling_params, (Mapping, str)) or not isinstance(sampling_params, Sequence):
        raise TypeError(
            f"sampling_params={sampling_params!r} must be SamplingParams(...), or a list, one a prompt"
        )
    if len(sampling_params) != len(prompts):
        raise ValueError(
            f"generate: {len(prompts)} prompts and {len(sampling_params)} sampling_params; give "
            f"one for each prompt, or a single one for all"
        )
    return list(sampling_params)
