"""The serving loop over any model runner."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from attnbackend.platforms import as_current
from attnbackend.runtime.admission import AdmissionRules, Prompt
from attnbackend.runtime.block_allocator import BlockAllocator
from attnbackend.runtime.detokenizer import IncrementalDetokenizer, Tokenizer
from attnbackend.runtime.engine_arguments import (
    ParamsForPrompts,
    check_decodes,
    check_runner,
    check_tokenizer,
    eos_ids,
    params_for,
    prompt_list,
    require_positive,
)
from attnbackend.runtime.input_batch import InputBatch
from attnbackend.runtime.lockstep import Lockstep
from attnbackend.runtime.model_runner_protocol import ModelRunner
from attnbackend.runtime.prepared_batch import PreparedBatch
from attnbackend.runtime.request import Request, RequestOutput, RequestStatus, StepOutput
from attnbackend.runtime.request_progress import RequestProgress
from attnbackend.runtime.sampling_params import SamplingParams
from attnbackend.runtime.scheduler import Schedule, ScheduledRequest, Scheduler
from attnbackend.runtime.speculation import NgramProposer, drafts_of
from attnbackend.runtime.started_step import SampledTokens, StartedStep, TokenMemory
from attnbackend.runtime.text_stream import TextStream


class _Repeatable(NamedTuple):
    """The last step, where the next is made by starting it again."""

    lockstep: Lockstep
    repeat: Callable[[], bool]
    memory: TokenMemory


class EngineCore:
    """Continuous batching over a `ModelRunner`. Not thread-safe.

    What a request generates depends on its prompt, parameters and seed alone as far as the
    runner's logits do: neither other requests nor preemption change it.

    When the runner raises, the exception leaves `step` and no request has advanced: calling
    `step` again repeats the batch, and every request can be aborted. After an interrupt, wherever it
    comes, requests are computed anew from the tokens that they had: no token of a `RequestOutput` differs,
    and what `step` was about to return may be missing or come twice.

    Args:
        runner: runs the model and owns the KV cache.
        tokenizer: a transformers tokenizer (`encode`, `decode`); None works on token ids alone.
        max_num_seqs: most requests running at a time.
        max_num_batched_tokens: most tokens a step; longer prompts are computed in chunks.
        eos_token_ids: ids that end a request; None takes the tokenizer's `eos_token_id`.
        async_scheduling: start each step before the tokens of the one before it are known, so that the
            host works while the device does; `step` then returns the outputs of the step before. No
            token differs. None: where the device is not a CPU, without speculation.
        speculative: "ngram" proposes what followed the same tokens before; no token differs.
        num_speculative_tokens: drafts a decode; None: 3.

    Raises:
        ValueError: a limit below 1, an end-of-sequence id outside the vocabulary, or speculation that is
            unknown, too long for a step or asked for together with `async_scheduling`.
        TypeError: a limit that is no whole number, or end-of-sequence ids that are no list of them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer | None = None,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        eos_token_ids: Iterable[int] | None = None,
        async_scheduling: bool | None = None,
        speculative: str | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        require_positive("max_num_seqs", max_num_seqs)
        require_positive("max_num_batched_tokens", max_num_batched_tokens)
        num_drafts = drafts_of(speculative, num_speculative_tokens)
        check_decodes(num_drafts, max_num_batched_tokens, async_scheduling)
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        check_runner(runner, num_drafts, limits)
        check_tokenizer(tokenizer)
        self.proposer = NgramProposer(num_drafts) if num_drafts else None
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_ids(eos_token_ids, tokenizer, runner.vocab_size)
        self._rules = AdmissionRules(
            vocab_size=runner.vocab_size, max_model_len=runner.max_model_len, num_blocks=runner.num_blocks,
            block_size=runner.block_size, tokenizer=tokenizer, num_drafts=num_drafts,
            placeholders=getattr(runner, "placeholders", {}),
        )  # fmt: skip
        self.scheduler = Scheduler(
            BlockAllocator(runner.num_blocks), block_size=runner.block_size, decode_len=1 + num_drafts,
            **limits,
        )  # fmt: skip
        self.input_batch = InputBatch(
            max_num_seqs=max_num_seqs, max_num_tokens=max_num_batched_tokens, decode_len=1 + num_drafts,
            max_model_len=runner.max_model_len, block_size=runner.block_size, device=runner.device,
            padded_tokens=getattr(runner, "padded_tokens", None),
        )  # fmt: skip
        self._on_device = as_current(runner.device)
        if capture := getattr(runner, "capture_graphs", None):
            with self._on_device:
                capture(self.input_batch.padding)
        ahead = runner.device.type != "cpu" and not num_drafts
        self.is_async = ahead if async_scheduling is None else async_scheduling
        self._sampled = SampledTokens(max_num_seqs * (1 + num_drafts), runner.device)
        self._in_flight: deque[StartedStep] = deque()
        self._progress: dict[str, RequestProgress] = {}
        self._undelivered: list[StepOutput] = []
        self._num_added = 0
        self._num_steps = 0
        self._repeatable: _Repeatable | None = None
        self._is_torn = self._is_undone = False
        """Whether a call broke off amid changes that belong together, and whether those were taken back."""

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt.

        Args:
            prompt: a string, or its token ids.
            sampling_params: None means `SamplingParams()`, greedy.
            request_id: None makes one.

        Returns:
            The request's id.

        Raises:
            ValueError: the id belongs to an unfinished request, the prompt is empty or has an id
                outside the vocabulary, the request can never fit, or a parameter cannot be
                honoured. The engine is left as it was.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        request_id = self._new_id() if request_id is None else request_id
        if not isinstance(request_id, str):
            raise TypeError(f"request_id={request_id!r} must be a string, or None to have one made")
        if request_id in self._progress:
            raise ValueError(
                f"request id {request_id!r} belongs to an unfinished request; choose another, or "
                f"abort that one first"
            )
        token_ids = self._checked_tokens(prompt, params)
        with self._whole():
            self._queue(request_id, prompt, token_ids, params)
        return request_id

    def check_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> None:
        """Raise what `add_request` would raise for them, and queue nothing."""
        self._checked_tokens(prompt, SamplingParams() if sampling_params is None else sampling_params)

    def steps_by_graph(self) -> dict[str, int]:
        """Steps so far by what they ran from: kinds of graphs, as the runner names them, and "none"."""
        graphs = getattr(self.runner, "graphs", None)
        counts = {} if graphs is None else dict(graphs.stats())
        return {**counts, "none": self._num_steps - sum(counts.values())}

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return bool(self._progress or self._undelivered)

    def step(self) -> list[StepOutput]:
        """Compute one batch.

        Returns:
            One output for each request that got a token or ended; none for requests still inside
            their prompt. Outputs of other requests that came up during `generate` come first. With
            `async_scheduling` they are those of the batch before, so there are none at first.

        Raises:
            Exception: whatever the runner raised, see the class.
        """
        self._mend()
        if self._progress and not self._undelivered:
            self._compute_step()
        delivered, self._undelivered = self._undelivered, []
        return delivered

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling_params: ParamsForPrompts = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end.

        Args:
            prompts: strings or lists of token ids, or one string.
            sampling_params: one for all prompts, or one for each.

        Returns:
            One output for each prompt, in their order.

        Raises:
            ValueError: as `add_request`, naming the prompt; or prompts and parameters differ in
                number. Nothing has run then.
            Exception: whatever the runner raised; these requests are aborted.
        """
        prompts = prompt_list(prompts)
        params = params_for(prompts, sampling_params)
        tokens = list(map(self._checked, range(len(prompts)), prompts, params))
        request_ids = [self._new_id() for _ in prompts]
        try:
            with self._whole():
                for added in zip(request_ids, prompts, tokens, params, strict=True):
                    self._queue(*added)
            finished = self._run_to_end(set(request_ids))
        except BaseException:
            self._abort_all(request_ids)
            raise
        return [finished[request_id] for request_id in request_ids]

    def abort(self, request_id: str) -> RequestOutput:
        """End a request at once and free its blocks.

        Returns:
            What it had generated, with finish_reason "abort"; `step` does not report it again.

        Raises:
            ValueError: no unfinished request has this id.
        """
        self._mend()
        progress = self._progress.get(request_id) if isinstance(request_id, str) else None
        if progress is None:
            raise ValueError(
                f"abort: no unfinished request {request_id!r}; unfinished are {sorted(self._progress)}"
            )
        with self._whole():
            self.scheduler.settle()
            output = progress.abort()
            self._retire(progress.request)
        return output

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Around changes that belong together."""
        self._mend()
        try:
            yield
        except BaseException:
            self._broke_off()
            raise

    def _mend(self) -> None:
        """If a call broke off: let all requests wait, with the tokens that they have."""
        if not self._is_torn:
            return
        self._repeatable = None
        self._in_flight.clear()
        self.scheduler.restart([progress.request for progress in self._progress.values()])
        with self._on_device:
            self.input_batch.clear()
        for progress in list(self._progress.values()):
            self._take_again(progress.request)
        self._is_torn = False

    def _take_again(self, request: Request) -> None:
        """Take in the tokens that a request has, which may have ended with them."""
        progress = self._progress[request.request_id] = self._new_progress(request)
        output = progress.accept_again()
        if output is not None:
            told = any(o.finished and o.request_id == request.request_id for o in self._undelivered)
            self._undelivered += [] if told else [output]
            self._retire(request)

    def _new_id(self) -> str:
        told = {output.request_id for output in self._undelivered}
        while True:
            request_id = f"request-{self._num_added}"
            self._num_added += 1
            if request_id not in self._progress and request_id not in told:
                return request_id

    def _checked_tokens(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        self._rules.check_params(params)
        token_ids = self._rules.prompt_token_ids(prompt)
        self._rules.check_fits(len(token_ids), params.max_tokens)
        return token_ids

    def _checked(self, index: int, prompt: Prompt, params: SamplingParams) -> list[int]:
        try:
            return self._checked_tokens(prompt, params)
        except (ValueError, TypeError) as error:
            raise type(error)(f"generate: prompt {index}: {error}") from error

    def _queue(self, request_id: str, prompt: Prompt, token_ids: list[int], params: SamplingParams) -> None:
        request = Request(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_len=len(token_ids),
            token_ids=token_ids,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
        )
        self._progress[request_id] = self._new_progress(request)
        self.scheduler.add(request)

    def _new_progress(self, request: Request) -> RequestProgress:
        params, stream = request.params, None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self.tokenizer, request.token_ids[: request.prompt_len])
            stream = TextStream(detokenizer, params.stop_strings)
        eos_ids = frozenset() if params.ignore_eos else self.eos_token_ids
        return RequestProgress(request, eos_ids.union(params.stop_token_ids), stream)

    def _compute_step(self) -> None:
        """Start a step, then take in the tokens of the one before; without working ahead, its own."""
        try:
            with self._on_device:
                started = self._start_step()
                if started is not None:
                    self._in_flight.append(started)
                self._take_in_all_but(int(self.is_async and started is not None))
        except BaseException:
            self._broke_off()
            raise

    def _broke_off(self) -> None:
        self._is_torn, self._is_undone = not self._is_undone, False

    def _take_in_all_but(self, count: int) -> None:
        """Take in the tokens of steps in flight, until so many are left."""
        while len(self._in_flight) > count:
            step = self._in_flight.popleft()
            if self.proposer is None:
                self._take_in(step, step.tokens())
            else:
                self._take_in_drafts(step, step.tokens(), self.proposer)

    def _start_step(self) -> StartedStep | None:
        """The step that the device now runs; None where every request waits for a token of the one before."""
        repeatable = self._repeatable
        if repeatable is not None and self.scheduler.repeats(repeatable.lockstep):
            started = self._repeat(repeatable)
            if started is not None:
                return started
        step = self.scheduler.schedule()
        for request in step.preempted:
            self.input_batch.remove(request.request_id)
        if not step.scheduled:
            assert self._in_flight, "requests are unfinished and none of them can run"
            return None
        if self.proposer is not None:
            _propose(self.proposer, step.scheduled)
        return self._run(step)

    def _repeat(self, repeatable: _Repeatable) -> StartedStep | None:
        """Start the last step again, on the batch that it made; None where the runner has run another since.

        It follows a wait, when little of the code and the data that a step needs is in a near cache: so it
        goes by none that it can do without.
        """
        try:
            if not repeatable.repeat():
                return None
            started = self._sampled.start(repeatable.memory, repeatable.lockstep.requests)
        except Exception:
            self._undo_tokens()
            raise
        self._num_steps += 1
        self.input_batch.repeated()
        repeatable.lockstep.start()
        return started

    def _run(self, step: Schedule) -> StartedStep:
        """Start a step on the device; nothing has advanced if this raises."""
        scheduled, lockstep, self._repeatable = step.scheduled, step.lockstep, None
        batch = self.input_batch.prepare(scheduled, step.has_new_blocks)
        try:
            logits = self.runner.execute(batch)
            self._num_steps += 1
            self._check_logits(logits, batch)
            rows = batch.sampled_rows
            requests = lockstep.requests if lockstep else [scheduled[row].request for row in rows]
            greedy = getattr(self.runner, "greedy", None)
            started = self._sampled.sample(logits, batch.sampling, requests, greedy)
        except Exception:
            self._undo_tokens()
            raise
        has_advanced = batch.sampling is None and getattr(self.runner, "has_advanced", False)
        self.input_batch.started(started.ids, has_advanced)
        self.scheduler.commit(scheduled)
        if lockstep and has_advanced and (repeat := getattr(self.runner, "repeat", None)):
            self._repeatable = _Repeatable(lockstep, repeat, started.memory)
        for request in () if lockstep else started.requests:
            request.num_pending += 1
        return started

    def _undo_tokens(self) -> None:
        """After a step that failed: the tokens that it was to read are those of the step before again."""
        self._repeatable = None
        self.scheduler.settle()
        self.input_batch.invalidate()
        if self._in_flight:
            self._in_flight[-1].put_back()
        self._is_undone = True

    def _check_logits(self, logits: Tensor, batch: PreparedBatch) -> None:
        expected = (batch.num_sampled, self.runner.vocab_size)
        if logits.shape != expected:
            raise RuntimeError(
                f"the model runner returned logits of shape {tuple(logits.shape)}; expected "
                f"{expected}: a row for each of batch.sampled_rows, vocab_size wide"
            )

    def _take_in(self, step: StartedStep, tokens: list[int]) -> None:
        """Give the requests their tokens; those that ended while the step ran are left out."""
        lockstep = self.scheduler.lockstep
        if lockstep is not None and step.requests is lockstep.requests:
            taken = lockstep.take(tokens)
            if taken is not None:
                self._undelivered += taken
                return
        self.scheduler.settle()
        finished = RequestStatus.FINISHED
        for request, token_id in zip(step.requests, tokens, strict=True):
            if request.status is finished:
                continue
            request.num_pending -= 1
            assert request.accept is not None
            self._add_output(request, request.accept(token_id))

    def _add_output(self, request: Request, output: StepOutput) -> None:
        self._undelivered.append(output)
        if output.finish_reason is not None:
            self._retire(request)

    def _take_in_drafts(self, step: StartedStep, tokens: list[int], proposer: NgramProposer) -> None:
        """As `_take_in`, of requests that have a row of logits for each draft as well."""
        for request, start, stop in step.rows_of_requests():
            accepted = proposer.count_accepted(request, tokens[start:stop]) if request.drafts else 0
            request.num_pending = 0
            request.num_computed -= len(request.drafts) - accepted
            output = self._progress[request.request_id].accept_all(tokens[start : start + accepted + 1])
            self._add_output(request, output)

    def _retire(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.input_batch.remove(request.request_id)
        del self._progress[request.request_id]
        if self.proposer is not None:
            self.proposer.forget(request.request_id)

    def _run_to_end(self, own: set[str]) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        while len(finished) < len(own):
            first = len(self._undelivered)
            self._compute_step()
            new = self._undelivered[first:]
            self._undelivered[first:] = [o for o in new if o.request_id not in own]
            finished.update((o.request_id, o.output) for o in new if o.output and o.request_id in own)
        return finished

    def _abort_all(self, request_ids: Sequence[str]) -> None:
        self._mend()
        for request_id in request_ids:
            if request_id in self._progress:
                self.abort(request_id)
        self._undelivered = [o for o in self._undelivered if o.request_id not in request_ids]


def _propose(proposer: NgramProposer, scheduled: Sequence[ScheduledRequest]) -> None:
    """Give decodes their drafts."""
    for request, num_tokens in scheduled:
        request.drafts = proposer.propose(request) if num_tokens > request.num_uncomputed else []
