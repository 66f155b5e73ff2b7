"""What the engine needs of whatever runs the model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attnbackend.runtime.prepared_batch import PreparedBatch


class ModelRunner(Protocol):
    """Runs one step of a model over a paged KV cache that it owns.

    A runner that wants batches padded has a method ``padded_tokens(BatchShape) -> int`` as well, and one
    that captures graphs over the engine's buffers ``capture_graphs(padding)``, which is called once with a
    function that gives a batch of so many tokens of padding, in requests of so many. ``placeholders`` maps
    token ids that prompts may not hold to what the model calls them. ``num_drafts``, where there is one, says
    how many speculative tokens a decode the runner's plans and graphs have room for. ``greedy``,
    where it is not None after a step, is a `TokenMemory` with the greedy choice of each row of its logits;
    ``has_advanced`` says that the step has made the batch's tensors those of the next step of its requests.
    ``repeat``, where it is not None then, runs that next step as `execute` would; it gives False, and does
    nothing, if another step has run since.

    Attributes:
        vocab_size: token ids are 0 .. vocab_size-1.
        max_model_len: most tokens of one request, prompt and generated together.
        num_blocks: blocks of the cache, the reserved block 0 included.
        block_size: tokens a block.
        device: where the batch's tensors are wanted.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...

    def execute(self, batch: PreparedBatch) -> Tensor:
        """Write the batch's keys and values to the cache and return the logits asked for.

        Returns:
            [batch.num_sampled, vocab_size], any float dtype: row i belongs to request
            `batch.sampled_rows[i]`, at token `batch.logits_indices[i]`.

        An exception fails the step for all its requests; the same batch is tried again at the
        next step, so what was written to the cache may stay there.
        """
        ...
