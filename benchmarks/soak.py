"""`python -m benchmarks.soak`: an engine under thousands of random requests, some cancelled, some bad.

A small Llama with random weights serves prompts and outputs of random lengths in a cache too small for all
that run, so that requests lose their blocks. Checked: every request ends as it should; bad ones are refused
and harm nobody; a sample is compared, token by token, with the model run alone over the request's own text;
all blocks come back; no memory is kept; nothing is compiled and no graph is captured after the warm-up.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnbackend import Engine, SamplingParams
from attnbackend.runtime import EngineCore, RequestOutput
from attnbackend.runtime.random_draws import draw_key, gumbel_draws
from benchmarks.environment import describe_environment

__all__ = ["Oracle", "SoakResult", "Traffic", "soak"]

_STOPS = (7, 8, 9)
"""Tokens that end some requests."""
_LONGEST = 256
_BYTES_ALLOWED = 1 << 20
"""What may stay on the device: the last step's tokens, and buffers that the warm-up had no need for."""
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.15}
"""What rounding may do to logits whose standard deviation is about 1."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What is asked of the engine; shares are probabilities for each request."""

    requests: int
    vocab_size: int
    longest_prompt: int = 80
    longest_output: int = 64
    waiting: int = 64
    """Requests that are kept waiting."""
    wave: int = 1000
    """Requests after which all are waited for. Every other wave has short prompts and outputs twice as long:
    as these begin together and grow together, they run out of blocks."""
    cancelled: float = 0.05
    bad: float = 0.05
    checked: float = 0.01
    seed: int = 0


@dataclass
class SoakResult:
    """What happened; `faults` is empty where all is well."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    checked_requests: int = 0
    checked_tokens: int = 0
    near_ties: int = 0
    """Tokens that are not the oracle's choice, but as good within the tolerance."""
    bytes_kept: int = 0
    faults: list[str] = field(default_factory=list)


class Oracle:
    """The model alone, without cache, engine or graphs: its choice after each token of a text.

    Args:
        model: a transformers model that the engine does not use.
        tolerance: difference of logits that rounding may make; a larger one is a fault.
    """

    def __init__(self, model: Any, tolerance: float) -> None:
        self._model, self._tolerance = model, tolerance

    @torch.inference_mode()
    def check(self, output: RequestOutput, params: SamplingParams) -> tuple[list[str], int]:
        """Faults, and how many tokens are ties with what was chosen here."""
        ids = torch.tensor([output.prompt_token_ids + output.token_ids], device=self._model.device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0].double()
        logits_NV = logits[len(output.prompt_token_ids) - 1 : -1]
        chosen_N = torch.tensor(output.token_ids, device=logits.device)
        behind_N = self._behind(logits_NV, chosen_N, params)
        limit = self._tolerance * (1 if params.is_greedy else 1 / params.temperature)
        wrong = (behind_N > limit).nonzero()[:, 0].tolist()
        faults = [
            f"{output.request_id}: token {i} of {len(chosen_N)} is {output.token_ids[i]}, "
            f"{float(behind_N[i]):.4f} behind the best"
            for i in wrong[:3]
        ]
        return faults, int(((behind_N > 0) & (behind_N <= limit)).sum())

    def _behind(self, logits_NV: Tensor, chosen_N: Tensor, params: SamplingParams) -> Tensor:
        """How much worse each token is than the best one: of logits, or of what a seed makes of them."""
        scores_NV = logits_NV
        if not params.is_greedy:
            assert params.seed is not None
            keys = [draw_key(params.seed, i) for i in range(len(chosen_N))]
            noise_NV = gumbel_draws(torch.tensor(keys, device=logits_NV.device), logits_NV.shape[1])
            scores_NV = logits_NV / params.temperature + noise_NV
        if params.top_k:
            limit_N = logits_NV.topk(params.top_k).values[:, -1:]
            scores_NV = scores_NV.masked_fill(logits_NV < limit_N - self._tolerance, -torch.inf)
            certain_NV = scores_NV.masked_fill(logits_NV < limit_N + self._tolerance, -torch.inf)
        else:
            certain_NV = scores_NV
        return certain_NV.amax(-1) - scores_NV.gather(1, chosen_N[:, None])[:, 0]


BadRequest = Callable[[int, int], dict[str, Any]]
"""From the vocabulary's size and the longest length to the arguments of a request that must be refused."""

_BAD: tuple[BadRequest, ...] = (
    lambda vocab, longest: {"prompt": []},
    lambda vocab, longest: {"prompt": [vocab]},
    lambda vocab, longest: {"prompt": [3, -1]},
    lambda vocab, longest: {"prompt": [1.5]},
    lambda vocab, longest: {"prompt": "text without a tokenizer"},
    lambda vocab, longest: {"prompt": [3] * longest},
    lambda vocab, longest: {"prompt": [3], "sampling_params": {"max_tokens": 3}},
    lambda vocab, longest: {"prompt": [3], "sampling_params": SamplingParams(stop_token_ids=[vocab])},
    lambda vocab, longest: {"prompt": [3], "request_id": 5},
)


class _Soak:
    """One run over an engine that has served before."""

    def __init__(self, engine: EngineCore, traffic: Traffic, oracle: Oracle, result: SoakResult) -> None:
        self.engine, self.traffic, self.oracle, self.result = engine, traffic, oracle, result
        self.rng = random.Random(traffic.seed)
        self.params: dict[str, SamplingParams] = {}
        self.samples: list[tuple[RequestOutput, SamplingParams]] = []
        self.num_sent = 0
        self._to_cancel: dict[int, list[str]] = {}

    def run(self) -> None:
        schedule, engine = self.engine.scheduler.schedule, self.engine

        def counted() -> Any:
            step = schedule()
            self.result.preemptions += len(step.preempted)
            return step

        engine.scheduler.schedule = counted  # type: ignore[method-assign]
        try:
            while self.num_sent < self.traffic.requests or engine.has_unfinished():
                self._send()
                self._cancel()
                for output in engine.step():
                    self.result.tokens += len(output.token_ids)
                    if output.output is not None:
                        self._take(output.output)
                self.result.steps += 1
        finally:
            engine.scheduler.schedule = schedule  # type: ignore[method-assign]

    def _send(self) -> None:
        left_of_wave = self.traffic.wave - self.num_sent % self.traffic.wave
        if left_of_wave == self.traffic.wave and self.engine.scheduler.has_unfinished:
            return
        missing = self.traffic.waiting - len(self.engine.scheduler.waiting)
        for _ in range(min(missing, left_of_wave, self.traffic.requests - self.num_sent)):
            self.num_sent += 1
            if self.rng.random() < self.traffic.bad:
                self._send_bad()
            else:
                self._send_good()

    def _send_bad(self) -> None:
        runner = self.engine.runner
        arguments = self.rng.choice(_BAD)(runner.vocab_size, runner.max_model_len)
        try:
            self.engine.add_request(**arguments)
        except (ValueError, TypeError):
            self.result.ended["refused"] += 1
        else:
            self.result.faults.append(f"a bad request was taken: {str(arguments)[:80]}")

    def _send_good(self) -> None:
        rng, traffic = self.rng, self.traffic
        longest, longest_output = traffic.longest_prompt, traffic.longest_output
        if self.num_sent // traffic.wave % 2:
            longest, longest_output = -(-longest // 10), 2 * longest_output
        length = 1 + min(int(rng.expovariate(4 / longest)), longest - 1)
        options: dict[str, Any] = {"max_tokens": rng.randrange(1, longest_output + 1)}
        if rng.random() < 0.4:
            options |= {"temperature": rng.choice((0.7, 1.0)), "seed": rng.getrandbits(63)}
            options |= {"top_k": 20} if rng.random() < 0.5 else {}
        if rng.random() < 0.3:
            options["stop_token_ids"] = _STOPS
        params = SamplingParams(**options)
        prompt = [rng.randrange(traffic.vocab_size) for _ in range(length)]
        request_id = self.engine.add_request(prompt, params)
        self.params[request_id] = params
        if rng.random() < traffic.cancelled:
            at = self.result.steps + rng.randrange(traffic.longest_output)
            self._to_cancel.setdefault(at, []).append(request_id)

    def _cancel(self) -> None:
        for request_id in self._to_cancel.pop(self.result.steps, ()):
            if request_id in self.params:
                self._take(self.engine.abort(request_id))

    def _take(self, output: RequestOutput) -> None:
        params = self.params.pop(output.request_id)
        self.result.ended[output.finish_reason] += 1
        if fault := _ending_fault(output, params):
            self.result.faults.append(fault)
        if output.token_ids and self.rng.random() < self.traffic.checked:
            self.samples.append((output, params))

    def check_samples(self) -> None:
        for output, params in self.samples:
            faults, ties = self.oracle.check(output, params)
            self.result.faults += faults
            self.result.near_ties += ties
            self.result.checked_tokens += len(output.token_ids)
        self.result.checked_requests += len(self.samples)


def _ending_fault(output: RequestOutput, params: SamplingParams) -> str | None:
    """Whether the end is not where the parameters put it."""
    tokens, reason = output.token_ids, output.finish_reason
    stops = [i for i, token in enumerate(tokens) if token in params.stop_token_ids]
    right = {
        "stop": stops == [len(tokens) - 1],
        "length": len(tokens) == params.max_tokens and not stops,
        "abort": len(tokens) < params.max_tokens and not stops,
        "error": False,
    }[reason]
    return None if right else f"{output.request_id} ended with {reason}, {output.error}, after {len(tokens)}"


def soak(engine: EngineCore, traffic: Traffic, oracle: Oracle, warm_up: int = 200) -> SoakResult:
    """Runs the traffic, after `warm_up` requests that do not count."""
    warm = Traffic(**{**asdict(traffic), "requests": warm_up, "seed": traffic.seed + 1, "checked": 0.0})
    _Soak(engine, warm, oracle, SoakResult()).run()
    result = SoakResult()
    run = _Soak(engine, traffic, oracle, result)
    before, captured = _bytes_in_use(), _num_graphs(engine)
    started = time.perf_counter()
    with torch.compiler.set_stance("fail_on_recompile"):
        run.run()
    result.seconds = time.perf_counter() - started
    result.bytes_kept = _bytes_in_use() - before
    run.check_samples()
    result.faults += _leaks(engine, result, run, captured)
    return result


def _leaks(engine: EngineCore, result: SoakResult, run: _Soak, captured: int) -> list[str]:
    allocator = engine.scheduler.allocator
    found = {
        "blocks are not free": allocator.num_usable - allocator.num_free,
        "requests are still known to the engine": len(engine._progress),
        "rows are still taken": engine.input_batch.num_known,
        "bytes are kept on the device": max(0, result.bytes_kept - _BYTES_ALLOWED),
        "graphs were captured after the warm-up": _num_graphs(engine) - captured,
        "requests did not end": run.traffic.requests - sum(result.ended.values()),
    }
    return [f"{count} {what}" for what, count in found.items() if count]


def _num_graphs(engine: EngineCore) -> int:
    graphs = getattr(engine.runner, "graphs", None)
    return 0 if graphs is None else len(graphs.steps.report.costs)


def _bytes_in_use() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def small_llama(device: str, dtype: torch.dtype, **changes: int) -> Any:
    """Four layers with random weights; logits have a standard deviation of about 1."""
    import transformers

    sizes = {
        "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        **(sizes | changes), tie_word_embeddings=False, eos_token_id=None, attn_implementation="eager",
        dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model.to(device, dtype).eval().requires_grad_(False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs, prints and writes; exits with 1 if there are faults. See ``--help``."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser("python -m benchmarks.soak", description=__doc__)
    add = parser.add_argument
    add("--requests", type=int, default=20_000 if on_gpu else 300)
    add("--backend", help="default: the automatic choice")
    add("--mode", help="CUDA-graph mode; default: as much as is possible")
    add("--ahead", action=argparse.BooleanOptionalAction, help="see async_scheduling; default: on a GPU")
    add("--speculative", type=int, help="n-gram drafts a decode; default: none")
    add("--max-num-seqs", type=int, default=256 if on_gpu else 16)
    add("--compile", action=argparse.BooleanOptionalAction, default=on_gpu)
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="JSON file; default: none")
    options = parser.parse_args(arguments)
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    model = small_llama(device, dtype)
    # Before the engine puts its own modules in the model. Weights of bfloat16 are exact in float32.
    oracle = Oracle(copy.deepcopy(model).float(), TOLERANCES[dtype])
    engine = soak_engine(
        model, backend=options.backend, cudagraph_mode=options.mode, compile=options.compile,
        max_num_seqs=options.max_num_seqs, async_scheduling=options.ahead,
        speculative="ngram" if options.speculative else None, num_speculative_tokens=options.speculative,
    )  # fmt: skip
    result = soak(engine, Traffic(requests=options.requests, vocab_size=1024, seed=options.seed), oracle)
    _report(engine, result, options.output)
    sys.exit(bool(result.faults))


def soak_engine(model: Any, max_num_seqs: int, block_size: int = 16, **options: Any) -> Engine:
    """An engine whose cache holds less than its requests need together."""
    tokens = _LONGEST + max(0, max_num_seqs - 8) * 24
    return Engine(
        model, max_num_seqs=max_num_seqs, max_model_len=_LONGEST, max_num_batched_tokens=4 * max_num_seqs,
        num_blocks=tokens // block_size + 2, block_size=block_size, **options,
    )  # fmt: skip


def _report(engine: Engine, result: SoakResult, file: Path | None) -> None:
    graphs = getattr(engine.runner, "graphs", None)
    found = vars(result) | {
        "requests_per_s": round(sum(result.ended.values()) / result.seconds, 1),
        "graph_replays": {} if graphs is None else dict(graphs.stats()),
        "speculation": None if engine.proposer is None else str(engine.proposer.stats),
    }
    print(json.dumps(found, indent=1))
    if file is not None:
        file.write_text(json.dumps({"environment": describe_environment(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
