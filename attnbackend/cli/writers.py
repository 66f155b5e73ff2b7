"""Where completions go: text as it comes, or JSON lines."""

from __future__ import annotations

import json
import sys
from typing import Protocol

from rich.console import Console
from rich.text import Text

from attnbackend.runtime import RequestOutput, StepOutput

__all__ = ["InOrder", "JsonWriter", "TextWriter", "Writer"]


class Writer(Protocol):
    """Gets completions one after the other, each as a beginning, pieces of text and an end."""

    def begin(self, prompt: str) -> None: ...
    def piece(self, text: str) -> None: ...
    def end(self, prompt: str, output: RequestOutput) -> None: ...


class TextWriter:
    """The completion as it comes; in a terminal the prompt stands before it, dimmed."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def begin(self, prompt: str) -> None:
        if self._console.is_terminal:
            self._console.print(Text(prompt, style="dim"), end="")

    def piece(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def end(self, prompt: str, output: RequestOutput) -> None:
        self.piece("\n")


class JsonWriter:
    """One object a line: prompt, token_ids, text, finish_reason."""

    def begin(self, prompt: str) -> None:
        """Nothing is printed before a completion is whole."""

    def piece(self, text: str) -> None:
        """Nothing is printed before a completion is whole."""

    def end(self, prompt: str, output: RequestOutput) -> None:
        line = json.dumps(
            {
                "prompt": prompt,
                "token_ids": output.token_ids,
                "text": output.text,
                "finish_reason": output.finish_reason,
            }
        )
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


class InOrder:
    """Gives a writer the completions of several requests in the order of the prompts.

    The first unfinished one is written as it comes; what belongs to a later one waits for its turn.

    Args:
        writer: gets the completions.
        prompts: prompt of each request id, in order.
    """

    def __init__(self, writer: Writer, prompts: dict[str, str]) -> None:
        self._writer = writer
        self._prompts = prompts
        self._turns = list(prompts)
        self._waiting: dict[str, list[StepOutput]] = {request_id: [] for request_id in prompts}
        self._begin_next()

    def add(self, step: StepOutput) -> None:
        """Take in what one engine step added to a request."""
        self._waiting[step.request_id].append(step)
        while self._turns and self._write_waiting(self._turns[0]):
            self._turns.pop(0)
            self._begin_next()

    def _begin_next(self) -> None:
        if self._turns:
            self._writer.begin(self._prompts[self._turns[0]])

    def _write_waiting(self, request_id: str) -> bool:
        """Write what has come of the request whose turn it is; whether it has finished."""
        steps, self._waiting[request_id] = self._waiting[request_id], []
        for step in steps:
            self._writer.piece(step.text)
            if step.output is not None:
                self._writer.end(self._prompts[request_id], step.output)
                return True
        return False
