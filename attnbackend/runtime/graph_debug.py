"""Each replay held against the path without graphs, over memory that nobody should read.

Shape suffixes: R rows of requests, W block-table width, N rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attnbackend.cudagraph import BatchDescriptor, Dispatch, GraphedSteps, PreparedStep
from attnbackend.runtime.prepared_batch import PreparedBatch

__all__ = ["checked_replay", "keep_inputs"]


def checked_replay(
    steps: GraphedSteps, key: Dispatch, batch: PreparedBatch, prepare: Callable[[], PreparedStep]
) -> Tensor:
    """The logits of a replay, [num_sampled, V], which are those of the path without graphs bit for bit.

    The replay runs with other blocks in place of the block table's padding and with NaN in the memory of the
    graph; the path without, on the same batch as it is.

    Raises:
        RuntimeError: the logits differ, or a tensor is not where the graph reads it.
    """
    steps.long_lived.check_all(key.descriptor)
    put_back = keep_inputs(batch)
    with _other_blocks(batch):
        logits_NV = steps.replay(key, prepare(), poisoned=True)[: batch.num_sampled].clone()
    put_back()
    without_NV = prepare().work()[: batch.num_sampled]
    if not _same_bits(logits_NV, without_NV):
        put_back()
        again_NV = prepare().work()[: batch.num_sampled]
        message = _difference(key.descriptor, batch, logits_NV, without_NV)
        if not _same_bits(without_NV, again_NV):
            message += ". So does the path without from one run to the next: the backend is not deterministic"
        raise RuntimeError(message)
    return logits_NV


def keep_inputs(batch: PreparedBatch) -> Callable[[], None]:
    """What makes the batch as it is now again: steps of decodes make it the next step's."""
    kept = [(x, x.clone()) for x in (batch.input_ids, batch.positions, batch.slot_mapping, batch.seq_lens)]

    def put_back() -> None:
        for tensor, value in kept:
            tensor.copy_(value)

    return put_back


@contextmanager
def _other_blocks(batch: PreparedBatch) -> Iterator[None]:
    """The batch's own last blocks in place of padding: ids that may be read, of somebody else's keys."""
    table_RW = batch.block_table
    kept_RW, padding_RW = table_RW.clone(), table_RW == 0
    table_RW.masked_fill_(padding_RW, table_RW.max())
    try:
        yield
    finally:
        table_RW.copy_(kept_RW)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _difference(graph: BatchDescriptor, batch: PreparedBatch, a_NV: Tensor, b_NV: Tensor) -> str:
    wrong_N = ~((a_NV == b_NV) | (a_NV.isnan() & b_NV.isnan())).all(1)
    rows = [batch.sampled_rows[row] for row in wrong_N.nonzero()[:, 0].tolist()]
    most = (a_NV.double() - b_NV.double()).abs().nan_to_num(torch.inf).max()
    return (
        f"the graph of {graph} gives other logits than the path without: in rows {rows}, requests "
        f"{sorted({batch.request_ids[row] for row in rows})}, by up to {float(most):.3g}"
    )
