"""A run of an engine with whole prefills, prefills in chunks, decodes and mixed batches; its logits, judged.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from model_zoo import VOCAB_SIZE, EagerReference
from torch import Tensor

from attnbackend import Engine, SamplingParams
from attnbackend.runtime import PreparedBatch
from attnbackend.testing import RuleReport, assert_within_rule

KINDS = {"whole prefill", "prefill in chunks", "decode", "mixed"}
MAX_TOKENS_A_STEP = 16


class Row(NamedTuple):
    """Logits after one token of a step."""

    request_id: str
    position: int
    kind: str
    logits_V: Tensor


class Served(NamedTuple):
    rows: list[Row]
    token_ids: dict[str, list[int]]
    """Prompt and answer of each request."""
    chunks: dict[str, int]
    """Steps that each request was in before its first token."""


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


def make_engine(model: Any, backend: str, *, compile: bool = False, **options: Any) -> Engine:
    engine = Engine(
        model, backend=backend, compile=compile, num_blocks=12, max_num_seqs=4, max_model_len=64,
        max_num_batched_tokens=MAX_TOKENS_A_STEP, **options,
    )  # fmt: skip
    for kv_cache in engine.runner.kv_caches.values():  # type: ignore[attr-defined]
        kv_cache.fill_(float("nan"))
    return engine


def serve(engine: Engine, *, long: int = 40, answer: int = 5) -> Served:
    """A whole prefill; a long prompt alone, in chunks; its decodes; then two prompts beside them."""
    rows: list[Row] = []
    chunks: dict[str, int] = {}
    engine.runner.execute = partial(_record, engine.runner.execute, rows, chunks)  # type: ignore[method-assign]
    engine.scheduler.repeats = lambda lockstep: False  # type: ignore[method-assign]  # Each step by `execute`.
    token_ids: dict[str, list[int]] = {}
    _add(engine, prompt(9, 1), 2)
    _run(engine, token_ids)
    _add(engine, prompt(long, 2), answer + 4)
    _run(engine, token_ids, steps=-(-long // MAX_TOKENS_A_STEP) + 2)
    _add(engine, prompt(19, 3), answer)
    _add(engine, prompt(7, 4), answer)
    _run(engine, token_ids)
    return Served(rows, token_ids, chunks)


def _add(engine: Engine, token_ids: list[int], max_tokens: int) -> None:
    engine.add_request(token_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def _run(engine: Engine, token_ids: dict[str, list[int]], steps: int = 1000) -> None:
    while engine.has_unfinished() and steps:
        steps -= 1
        for step in engine.step():
            if step.output is not None:
                token_ids[step.request_id] = step.output.prompt_token_ids + step.output.token_ids


def _record(
    execute: Callable[[PreparedBatch], Tensor], rows: list[Row], chunks: dict[str, int], batch: PreparedBatch
) -> Tensor:  # fmt: skip
    """Runs a step with logits after every token of it, notes them, and returns those that were asked for."""
    tokens = range(batch.num_tokens)
    every = torch.tensor(tokens, device=batch.logits_indices.device)
    logits_TV = execute(replace(batch, logits_indices=every, sampled_rows=tuple(tokens))).cpu()
    starts = batch.query_start_loc_cpu.tolist()
    for row, request_id in enumerate(batch.request_ids):
        chunks[request_id] = chunks.get(request_id, 0) + bool(batch.is_prefilling_cpu[row])
        first_position = int(batch.seq_lens_cpu[row]) - (starts[row + 1] - starts[row])
        for offset, token in enumerate(range(starts[row], starts[row + 1])):
            rows.append(Row(request_id, first_position + offset, _kind(batch, row), logits_TV[token]))
    return logits_TV[batch.logits_indices[: batch.num_sampled].cpu()].to(every.device)


def _kind(batch: PreparedBatch, row: int) -> str:
    if 0 < batch.num_decodes < batch.num_reqs:
        return "mixed"
    if batch.is_pure_decode:
        return "decode"
    return (
        "whole prefill" if batch.max_seq_len == batch.num_tokens < MAX_TOKENS_A_STEP else "prefill in chunks"
    )


def judge(served: Served, reference: EagerReference) -> dict[str, RuleReport]:
    """Holds the rows of each kind to the rule."""
    sequences = {name: reference.logits(ids[:-1]) for name, ids in served.token_ids.items()}
    return {kind: _judge_kind(kind, served, sequences) for kind in sorted({row.kind for row in served.rows})}


def _judge_kind(kind: str, served: Served, sequences: dict[str, Any]) -> RuleReport:
    rows = [row for row in served.rows if row.kind == kind]
    actual = torch.stack([row.logits_V for row in rows])
    exact, eager = (
        torch.stack([getattr(sequences[row.request_id], which)[row.position] for row in rows])
        for which in ("exact", "eager")
    )
    return assert_within_rule(actual, exact, eager, what=f"logits of {kind}")
