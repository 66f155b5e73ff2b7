"""How things are timed: sides take turns, and medians over rounds are what counts.

A machine that slows down for a while slows all sides of a round, so ratios are taken within rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Spread", "Stopwatch", "per_call_us", "take_turns"]


@dataclass(frozen=True)
class Spread:
    """Smallest, median and largest of the rounds."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises statistics.StatisticsError on no values."""
        return cls(min(values), statistics.median(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.min:.4g} .. {self.max:.4g})"


def take_turns(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side, once a round; every second round runs in reversed order.

    Args:
        sides: name -> what to time; warm-up is the caller's.
        rounds: how often each side runs.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(rounds):
        for name in order:
            start = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - start)
        order.reverse()
    return seconds


def per_call_us(
    sides: Mapping[str, Callable[[], object]], *, rounds: int, calls: int
) -> dict[str, list[float]]:
    """Microseconds a call of each side, round by round, from loops of ``calls`` calls."""

    def looped(side: Callable[[], object]) -> Callable[[], None]:
        def loop() -> None:
            for _ in range(calls):
                side()

        return loop

    loops = {name: looped(side) for name, side in sides.items()}
    take_turns(loops, 1)
    timed = take_turns(loops, rounds)
    return {name: [s / calls * 1e6 for s in seconds] for name, seconds in timed.items()}


class Stopwatch:
    """Wraps a method of one object and adds up the seconds spent in it."""

    def __init__(self, owner: Any, method: str) -> None:
        self.seconds = 0.0
        self._owner, self._method = owner, method

    def __enter__(self) -> Stopwatch:
        inner = getattr(self._owner, self._method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        # An instance attribute hides the method until it is deleted again.
        setattr(self._owner, self._method, timed)
        return self

    def __exit__(self, *exception: object) -> None:
        delattr(self._owner, self._method)

    def lap(self) -> float:
        """The seconds since the last lap."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
