"""Prompts through an engine, with the time taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from attnbackend.cli.writers import InOrder, Writer
from attnbackend.runtime import EngineCore, SamplingParams
from attnbackend.runtime.admission import Prompt

__all__ = ["ServingReport", "serve"]


@dataclass
class ServingReport:
    """What was made, how fast, and what failed.

    Attributes:
        num_tokens: tokens generated, of all requests.
        first_token_s: seconds from the start until the first token; None when none came.
        total_s: seconds from the start to the end.
        errors: one message for each request that ended in an error.
    """

    num_tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0
    errors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        tokens = f"{self.num_tokens} token{'s' if self.num_tokens != 1 else ''}"
        if self.first_token_s is None:
            return f"{tokens} in {self.total_s:.2f} s"
        rate = self.num_tokens / self.total_s
        first = f"the first after {self.first_token_s:.2f} s"
        return f"{tokens} in {self.total_s:.2f} s, {rate:.1f} tokens/s; {first}"


def serve(
    engine: EngineCore,
    prompts: Sequence[tuple[str, Prompt]],
    params: SamplingParams,
    writer: Writer,
    before_first: Callable[[], None],
) -> ServingReport:
    """Run all prompts together and write their completions in order.

    Args:
        engine: has no other requests.
        prompts: each as shown to a person, and as given to the engine.
        params: for all prompts.
        writer: gets the completions.
        before_first: called once, before the writer gets anything.

    Raises:
        ValueError: a prompt that the engine refuses, by number; nothing has run then.
    """
    ids = [_add(engine, number, given, params) for number, (_, given) in enumerate(prompts, 1)]
    shown = {request_id: text for request_id, (text, _) in zip(ids, prompts, strict=True)}
    report, start = ServingReport(), time.perf_counter()
    in_order: InOrder | None = None
    while engine.has_unfinished():
        for step in engine.step():
            if in_order is None:
                report.first_token_s = time.perf_counter() - start
                before_first()
                in_order = InOrder(writer, shown)
            report.num_tokens += len(step.token_ids)
            if step.output is not None and step.output.error is not None:
                number = ids.index(step.request_id) + 1
                report.errors.append(f"prompt {number}: {step.output.error}")
            in_order.add(step)
    report.total_s = time.perf_counter() - start
    return report


def _add(engine: EngineCore, number: int, prompt: Prompt, params: SamplingParams) -> str:
    try:
        return engine.add_request(prompt, params)
    except ValueError as error:
        raise ValueError(f"prompt {number}: {error}") from error
