"""One request on its way through the engine, and what a caller gets to see of it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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


class StepOutput(NamedTuple):
    """What one engine step added to one request.

    Attributes:
        request_id: the request.
        token_ids: the new tokens: one, several where speculated ones were accepted, or none when the
            request ended in an error.
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


@dataclass(eq=False, slots=True)
class Request:
    """State of an unfinished request; the scheduler owns the fields after `seed`, but for the drafts.

    Attributes:
        prompt_len: tokens of the prompt.
        token_ids: prompt, then the tokens generated so far, as far as the host knows them.
        num_computed: leading tokens whose keys and values are in the cache, or will be when the steps
            that have been started are done.
        num_pending: tokens behind `token_ids` that are sampled and known to the device alone.
        block_ids: cache blocks, in order of position.
        limit: what `num_computed` may grow to before the scheduler must look at the request again.
        arrival: place in the order of arrival, unique.
        drafts: guesses of the tokens that follow, for the step at hand.
        num_proposed: leading drafts that are more than a filling.
        accept: takes each sampled token; what the caller gets for it.
        special_ids: sampled tokens that are more than one token more: they end the request.
        plain_len: tokens up to which any other is nothing but one more.
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
    num_pending: int = 0
    limit: int = 0
    status: RequestStatus = RequestStatus.WAITING
    drafts: list[int] = field(default_factory=list)
    num_proposed: int = 0
    accept: Callable[[int], StepOutput] | None = None
    special_ids: frozenset[int] = frozenset()
    plain_len: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and generated, the pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_outputs(self) -> int:
        """Generated tokens that the host knows."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are not in the cache yet."""
        return self.num_tokens - self.num_computed

    @property
    def max_computed(self) -> int:
        """What `num_computed` is once every token is sampled: the last one is never fed back."""
        return self.prompt_len + self.params.max_tokens - 1

    @property
    def is_decoding(self) -> bool:
        """All but the newest generated token are in the cache: the prompt is finished.

        A prompt of one token, or its last chunk of one token, has the same shape and is not this.
        """
        return self.num_computed == self.num_tokens - 1 and self.num_computed >= self.prompt_len
