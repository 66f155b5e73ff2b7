"""What a run says: rates, latencies, and how often graphs were used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from attnbackend.bench.load import ServeRun

__all__ = ["Latency", "ServeReport"]


@dataclass(frozen=True)
class Latency:
    """Milliseconds: the mean, the median, and what 99 of 100 stay below."""

    mean: float
    median: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        """None where there is nothing to say."""
        if not seconds:
            return None
        ms = np.asarray(seconds) * 1e3
        return cls(float(ms.mean()), float(np.median(ms)), float(np.percentile(ms, 99)))

    def __str__(self) -> str:
        return f"median {self.median:.2f} ms, p99 {self.p99:.2f} ms, mean {self.mean:.2f} ms"


@dataclass(frozen=True)
class ServeReport:
    """Figures of one run.

    Attributes:
        requests: that ended with all their tokens.
        failed: that ended otherwise.
        seconds: from the first arrival's clock to the last output.
        prompt_tokens, generated_tokens: of all requests.
        time_to_first_token: from arrival, waiting included.
        inter_token_latency: before each token but the first; tokens that come together share the time.
        request_latency: from arrival to the last token.
        steps: engine steps by what they ran from: graphs of decodes, of mixed batches, in pieces, or "none".
    """

    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    generated_tokens: int
    time_to_first_token: Latency | None
    inter_token_latency: Latency | None
    request_latency: Latency | None
    steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, run: ServeRun) -> ServeReport:
        ended = [times for times in run.requests if times.finish_reason == "length"]
        return cls(
            requests=len(ended),
            failed=len(run.requests) - len(ended),
            seconds=run.seconds,
            prompt_tokens=sum(times.prompt_tokens for times in run.requests),
            generated_tokens=sum(times.num_tokens for times in run.requests),
            time_to_first_token=Latency.of([s for t in ended if (s := t.first_token_s) is not None]),
            inter_token_latency=Latency.of([gap for times in ended for gap in times.gaps_s()]),
            request_latency=Latency.of([s for t in ended if (s := t.latency_s) is not None]),
            steps=dict(run.steps),
        )

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def graph_hit_rates(self) -> dict[str, float]:
        """Share of the steps that ran from each kind of graph, and "none"."""
        total = sum(self.steps.values())
        return {kind: count / total for kind, count in self.steps.items()} if total else {}

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times of latencies in milliseconds."""
        return asdict(self) | {
            "requests_per_s": self.requests_per_s,
            "tokens_per_s": self.tokens_per_s,
            "graph_hit_rates": self.graph_hit_rates,
        }

    def __str__(self) -> str:
        rates = ", ".join(f"{kind} {share:.0%}" for kind, share in self.graph_hit_rates.items())
        failed = f", {self.failed} failed" if self.failed else ""
        return (
            f"{self.requests} requests in {self.seconds:.2f} s{failed}: {self.requests_per_s:.2f} "
            f"requests/s, {self.tokens_per_s:.1f} tokens/s ({self.prompt_tokens} of prompts, "
            f"{self.generated_tokens} generated)\n"
            f"time to first token  {self.time_to_first_token or 'unknown'}\n"
            f"inter-token latency  {self.inter_token_latency or 'unknown'}\n"
            f"request latency      {self.request_latency or 'unknown'}\n"
            f"steps from graphs    {rates or 'none'}"
        )
