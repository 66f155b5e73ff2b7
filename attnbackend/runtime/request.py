"""One request on its way through the engine, and what a caller gets to see of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

from attnbackend.runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    Attributes:
        request_id: as given to, or made by, `add_request`.
        prompt: the prompt string, None when token ids were given.
        prompt_token_ids: the prompt's tokens.
        token_ids: the generated tokens; a token that stopped the request is the last one.
        text: the generated text without special tokens, stop tokens and stop string; empty when
            the engine has no tokenizer.
        finish_reason: "stop" (end-of-sequence or stop token, stop string), "length" (max_tokens
            reached), "abort" (`abort` was called) or "error" (see `error`).
        error: what went wrong, None unless finish_reason is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    error: str | None = None


@dataclass(frozen=True)
class StepOutput:
    """What one engine step added to one request.

    Attributes:
        request_id: the request.
        token_ids: the new tokens: one, or none when the request ended in an error.
        text: the text that became certain; characters whose bytes are not complete, and text that
            may turn out to be a stop string, come with a later step. All of a request's pieces
            joined are its `RequestOutput.text`.
        finish_reason: None while the request goes on.
        output: the whole request once it has finished, None before.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


@dataclass(eq=False)
class Request:
    """State of an unfinished request; the scheduler owns the fields after `seed`.

    Attributes:
        prompt_len: tokens of the prompt.
        token_ids: prompt, then the tokens generated so far.
        num_computed: leading tokens whose keys and values are in the cache.
        block_ids: cache blocks, in order of position.
        arrival: place in the order of arrival, unique.
    """

    request_id: str
    prompt: str | None
    prompt_len: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival: int = -1
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose keys and values are not in the cache yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """All but the newest generated token are in the cache: the prompt is finished.

        A prompt of one token, or its last chunk of one token, has the same shape and is not this.
        """
        return self.num_computed == len(self.token_ids) - 1 and self.num_computed >= self.prompt_len
