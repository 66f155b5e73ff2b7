"""A request as its caller will see it: takes sampled tokens, decides when it has ended."""

from __future__ import annotations

from collections.abc import Sequence

from attnbackend.runtime.request import FinishReason, Request, RequestOutput, StepOutput
from attnbackend.runtime.sampler import INVALID_TOKEN
from attnbackend.runtime.text_stream import TextStream


class RequestProgress:
    """Applies the stop rules to one request, token by token.

    Of several reasons in one step "stop" wins over "length".

    Args:
        request: its `token_ids` are extended here; it is told what takes its tokens, and which are plain.
        stop_ids: end-of-sequence and stop token ids that hold for it.
        stream: its text, None without a tokenizer.
    """

    __slots__ = ("_full_len", "_stop_ids", "_stream", "request")

    def __init__(self, request: Request, stop_ids: frozenset[int], stream: TextStream | None) -> None:
        self.request = request
        self._stop_ids = stop_ids
        self._stream = stream
        self._full_len = request.prompt_len + request.params.max_tokens
        request.special_ids = stop_ids.union((INVALID_TOKEN,))
        request.plain_len = self._full_len - 1 if stream is None else 0
        request.accept = self.accept

    def accept(self, token_id: int) -> StepOutput:
        """Add a sampled token; the output says whether the request has ended with it."""
        request = self.request
        token_ids = request.token_ids
        if token_id not in request.special_ids and len(token_ids) < request.plain_len:
            token_ids.append(token_id)
            # Twice as fast as the class's own `__new__`, for every token of every request.
            return tuple.__new__(StepOutput, (request.request_id, [token_id], "", None, None))
        if token_id == INVALID_TOKEN:
            return self.fail(
                f"logits of output token {request.num_outputs} hold NaN or +inf, or rule "
                f"every token out; check the model's weights and dtype"
            )
        token_ids.append(token_id)
        try:
            piece, reason = self._advance(token_id)
        except Exception as error:
            # A tokenizer's fault is this request's end; the step's other tokens must not be lost.
            return self.fail(f"decoding token {token_id} raised {error!r}", [token_id])
        return self._step_output([token_id], piece, reason)

    def accept_all(self, token_ids: Sequence[int]) -> StepOutput:
        """Add tokens until the request has ended; those behind its end are dropped."""
        outputs = [self.accept(token_ids[0])]
        for token_id in token_ids[1:]:
            if outputs[-1].finished:
                break
            outputs.append(self.accept(token_id))
        added = [token_id for output in outputs for token_id in output.token_ids]
        return outputs[-1]._replace(token_ids=added, text="".join(output.text for output in outputs))

    def accept_again(self) -> StepOutput | None:
        """Add the tokens that the request has generated anew; the last output if they end it."""
        request = self.request
        generated = request.token_ids[request.prompt_len :]
        del request.token_ids[request.prompt_len :]
        outputs = map(self.accept, generated)
        return next((output for output in outputs if output.finished), None)

    def fail(self, message: str, token_ids: list[int] | None = None) -> StepOutput:
        """End the request with an error."""
        return self._step_output(token_ids or [], "", "error", message)

    def abort(self) -> RequestOutput:
        """End the request at its caller's wish."""
        return self._request_output("abort")

    def _advance(self, token_id: int) -> tuple[str, FinishReason | None]:
        is_stop_id = token_id in self._stop_ids
        piece = "" if is_stop_id or self._stream is None else self._stream.push(token_id)
        reason = self._reason(is_stop_id)
        if reason is not None and self._stream is not None:
            piece += self._stream.finish()
            reason = self._reason(is_stop_id)
        return piece, reason

    def _reason(self, is_stop_id: bool) -> FinishReason | None:
        if is_stop_id or (self._stream is not None and self._stream.is_stopped):
            return "stop"
        return "length" if len(self.request.token_ids) >= self._full_len else None

    def _step_output(
        self,
        token_ids: list[int],
        piece: str,
        reason: FinishReason | None,
        error: str | None = None,
    ) -> StepOutput:
        output = None if reason is None else self._request_output(reason, error)
        return StepOutput(self.request.request_id, token_ids, piece, reason, output)

    def _request_output(self, reason: FinishReason, error: str | None = None) -> RequestOutput:
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.token_ids[: request.prompt_len],
            token_ids=request.token_ids[request.prompt_len :],
            text="" if self._stream is None else self._stream.text,
            finish_reason=reason,
            error=error,
        )
