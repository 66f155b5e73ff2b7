"""What a new request must satisfy; everything wrong with it is said before it is queued."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from attnbackend.runtime.block_allocator import RESERVED_BLOCKS
from attnbackend.runtime.detokenizer import Tokenizer
from attnbackend.runtime.sampling_params import SamplingParams
from attnbackend.runtime.scheduler import blocks_for

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class AdmissionRules:
    """Limits of the model and its cache, and the checks that follow from them.

    Attributes:
        vocab_size: token ids are 0 .. vocab_size-1.
        max_model_len: most tokens of a request, prompt and generated.
        num_blocks: blocks of the cache with the reserved one.
        block_size: tokens a block.
        tokenizer: None when prompts can only be token ids.
        num_drafts: speculative tokens a decode, which need room in the cache as well.
        placeholders: token ids that stand for something else than text, with what the model calls them.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    tokenizer: Tokenizer | None
    num_drafts: int = 0
    placeholders: Mapping[int, str] = field(default_factory=dict)

    def prompt_token_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked.

        Raises:
            ValueError: empty, a string without a tokenizer, an id outside the vocabulary, or one that
                stands for an image or a sound.
            TypeError: neither a string nor a sequence of integers.
        """
        token_ids = self._encode(prompt) if isinstance(prompt, str) else _integers(prompt)
        if not token_ids:
            raise ValueError(
                f"prompt {reprlib.repr(prompt)} has no tokens; at least one is needed to "
                f"predict the next (the model's begin-of-sequence token will do)"
            )
        self._check_vocabulary("prompt token id", token_ids)
        self._check_placeholders(token_ids)
        return token_ids

    def check_params(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters that this model or engine cannot honour."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {params!r}")
        self._check_vocabulary("stop_token_ids", tuple(params.stop_token_ids))
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(
                f"stop={params.stop_strings} needs text, and this engine has no tokenizer; give "
                f"Engine a tokenizer or use stop_token_ids"
            )

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise ValueError for a request that could never run to its end."""
        total = prompt_len + max_tokens
        if total > self.max_model_len:
            raise ValueError(
                f"the request needs {total} tokens (prompt {prompt_len} + max_tokens {max_tokens}) "
                f"and max_model_len allows {self.max_model_len}; shorten the prompt, lower "
                f"max_tokens or raise max_model_len if the model allows more"
            )
        # The last token is returned and never fed back, so it needs no place in the cache.
        needed = blocks_for(total - 1 + self.num_drafts, self.block_size)
        usable = self.num_blocks - RESERVED_BLOCKS
        if needed > usable:
            drafts = f" + {self.num_drafts} speculative" if self.num_drafts else ""
            raise ValueError(
                f"the request needs {needed} cache blocks of {self.block_size} tokens (prompt "
                f"{prompt_len} + max_tokens {max_tokens} - 1{drafts}) and the cache has {usable} "
                f"(num_blocks={self.num_blocks}, of which block 0 is reserved); raise num_blocks "
                f"to at least {needed + RESERVED_BLOCKS}, shorten the prompt or lower max_tokens"
            )

    def _encode(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(
                f"prompt {reprlib.repr(prompt)} is a string and this engine has no tokenizer; "
                f"give Engine a tokenizer, or give the prompt as a list of token ids"
            )
        return list(self.tokenizer.encode(prompt))

    def _check_placeholders(self, token_ids: Sequence[int]) -> None:
        if self.placeholders.keys().isdisjoint(token_ids):
            return
        for position, token_id in enumerate(token_ids):
            if token_id in self.placeholders:
                raise ValueError(
                    f"prompt token id {token_id} at position {position} is the model's "
                    f"{self.placeholders[token_id]}, and engines serve text alone; run the model itself"
                )

    def _check_vocabulary(self, what: str, token_ids: Sequence[int]) -> None:
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            return
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"{what} {token_id} at position {position} is outside the vocabulary; "
                    f"allowed are 0 to {self.vocab_size - 1}"
                )


def _integers(prompt: Sequence[int]) -> list[int]:
    try:
        if isinstance(prompt, bytes | Mapping | Set):
            raise TypeError("it has no order, or holds bytes of text")
        return list(map(operator.index, prompt))
    except TypeError as error:
        raise TypeError(
            f"prompt {reprlib.repr(prompt)} is neither a string nor a sequence of integer token ids"
        ) from error
