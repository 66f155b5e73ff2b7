"""The engine that people with a model use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attnbackend.cudagraph.modes import CUDAGraphMode
from attnbackend.runtime.detokenizer import Tokenizer
from attnbackend.runtime.engine_core import EngineCore
from attnbackend.runtime.speculation import drafts_of


class Engine(EngineCore):
    """Generates text with a model over a paged KV cache; requests are batched as they come.

    Sampling is what `SamplingParams` say; of the model's generation config only the end-of-sequence
    ids count. Weights may be written in place between steps, as parameters of the model: tensors that shared
    their memory before the engine was made may not any more. After other changes, such as new parameters,
    layers or hooks, or written weights of a latent ``kv_b_proj`` that is no plain linear layer, make a new
    engine.

    `generate` runs prompts to their end; `add_request`, `step` and `abort` make a serving loop.

    Args:
        model: the model, as `attnbackend.runtime.model_runner.build_runner` takes it.
        tokenizer: a transformers tokenizer; None works on token ids alone.
        backend: name of the attention backend; None selects one.
        block_size: tokens a cache block.
        num_blocks: blocks of the cache, block 0 reserved; None takes what memory allows.
        max_num_seqs: most requests running at a time.
        max_num_batched_tokens: most tokens a step; longer prompts are computed in chunks.
        max_model_len: most tokens of a request, prompt and generated; None takes the model's.
        kv_cache_dtype: "auto" for the model's dtype, or the name of another.
        compile: compile the model.
        cudagraph_mode: a `CUDAGraphMode` or its name; None takes what backend and device allow.
        cudagraph_capture_sizes: batch sizes in tokens to capture graphs for; None: see `capture_sizes`.
        cudagraph_lazy_capture: capture a graph when a batch first needs it, not before serving.
        cudagraph_debug: hold each replay against the same step without graphs, bit for bit, with NaN in the
            graphs' memory and other blocks in the padding of the block table; slow.
        async_scheduling: start each step before the tokens of the one before are known, so that the host
            works while the device does; `step` then returns the outputs of the step before. No token
            differs. None: on devices other than a CPU, without speculation.
        speculative: "ngram" proposes the tokens that followed the same ones earlier in the request, and the
            model checks them in one step; no token differs. None: one token a step.
        num_speculative_tokens: tokens proposed a step; None: 3.

    Raises:
        ValueError: a value that the model, the backend or the device cannot serve.
        TypeError: an unknown keyword argument.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer | None = None,
        *,
        backend: str | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        kv_cache_dtype: str = "auto",
        compile: bool = True,
        cudagraph_mode: CUDAGraphMode | str | None = None,
        cudagraph_capture_sizes: Sequence[int] | None = None,
        cudagraph_lazy_capture: bool = False,
        cudagraph_debug: bool = False,
        async_scheduling: bool | None = None,
        speculative: str | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        from attnbackend.runtime.model_runner import build_runner
        from attnbackend.runtime.step_graphs import GraphOptions

        runner = build_runner(
            model,
            backend=backend,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            kv_cache_dtype=kv_cache_dtype,
            compile=compile,
            num_drafts=drafts_of(speculative, num_speculative_tokens),
            graphs=GraphOptions(
                mode=None if cudagraph_mode is None else CUDAGraphMode.parse(cudagraph_mode),
                sizes=cudagraph_capture_sizes,
                lazy=cudagraph_lazy_capture,
                debug=cudagraph_debug,
            ),
        )
        super().__init__(
            runner,
            tokenizer,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            eos_token_ids=_known_eos_ids(model, tokenizer),
            async_scheduling=async_scheduling,
            speculative=speculative,
            num_speculative_tokens=num_speculative_tokens,
        )


def _known_eos_ids(model: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids that the model's generation config, else its config, and the tokenizer name as final."""
    config = getattr(model, "generation_config", None) or getattr(model, "config", None)
    return _ids(config).union(_ids(tokenizer))


def _ids(owner: Any) -> frozenset[int]:
    found: int | Iterable[int] | None = getattr(owner, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset((found,) if isinstance(found, int) else found)
