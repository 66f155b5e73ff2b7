"""What a model runner gets for one step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnbackend.cudagraph.dispatcher import BatchShape
from attnbackend.runtime.sampler import SamplingPlan


@dataclass(frozen=True, kw_only=True)
class PreparedBatch:
    """One step's batch: persistent device buffers of the largest size, and counts on the host.

    The device tensors are the same objects at the same addresses at every step; rows and tokens
    beyond the counts are padding. `max_tokens`, `max_reqs` and W are the limits that the
    `InputBatch` was built with. The `_cpu` tensors belong to this step alone and stay as they are.
    """

    input_ids: Tensor
    """int64 [max_tokens]; 0 past num_tokens."""
    positions: Tensor
    """int64 [max_tokens], position of each token in its request; 0 past num_tokens."""
    slot_mapping: Tensor
    """int64 [max_tokens], block * block_size + offset; -1 past num_tokens."""
    logits_indices: Tensor
    """int64 [max_logits], token whose logits are needed, one for each of `sampled_rows`; 0 after."""
    query_start_loc: Tensor
    """int32 [max_reqs+1], first token of each request; past num_reqs those of the padding."""
    seq_lens: Tensor
    """int32 [max_reqs], context and query tokens; 0 past num_reqs."""
    block_table: Tensor
    """int32 [max_reqs, W]; 0 past a request's blocks and past num_reqs."""
    query_start_loc_cpu: Tensor
    """int32 [max_reqs+1] on the CPU, equal to query_start_loc."""
    seq_lens_cpu: Tensor
    """int32 [max_reqs] on the CPU, equal to seq_lens."""
    is_prefilling_cpu: Tensor
    """bool [max_reqs] on the CPU: the row computes more than its newest generated token, or
    belongs to a request whose prompt is not finished before this step; False past num_reqs."""
    num_reqs: int
    """Requests in the batch, decodes first."""
    num_decodes: int
    """Leading requests that compute their newest token, with all before it in the cache, and its drafts."""
    num_tokens: int
    """Tokens in the batch."""
    num_padded_tokens: int
    """Tokens with padding: requests of seq_len 0 behind the real ones, as far as rows go, of as many tokens
    as a decode where all are decodes, else of one token."""
    max_query_len: int
    """Most tokens of one request in this step."""
    max_seq_len: int
    """Largest of seq_lens."""
    sampled_rows: tuple[int, ...]
    """Rows that need a sampled token, ascending: the rows of the logits, in this order. A request with
    drafts needs one after each of its tokens, so its row is there as often."""
    request_ids: tuple[str, ...]
    """The request of each row."""
    sampling: SamplingPlan | None = None
    """How the rows of the logits are sampled; None: all are greedy."""

    def advanced(self, num_steps: int, sampling: SamplingPlan | None) -> PreparedBatch:
        """The same batch some steps later: nothing but lengths and sampling has changed."""
        batch: PreparedBatch = object.__new__(_Advanced)
        # Three times as fast as `dataclasses.replace`, at every step.
        own = batch.__dict__
        own.update(self.__dict__, sampling=sampling, max_seq_len=self.max_seq_len + num_steps)
        own.update(shape=self.shape, lens_before=own.pop("seq_lens_cpu"), num_steps=num_steps)
        return batch

    def shares_tensors(self, other: PreparedBatch) -> bool:
        """Whether the device's tensors are the same objects."""
        return (
            self.input_ids is other.input_ids
            and self.positions is other.positions
            and self.slot_mapping is other.slot_mapping
            and self.logits_indices is other.logits_indices
            and self.query_start_loc is other.query_start_loc
            and self.seq_lens is other.seq_lens
            and self.block_table is other.block_table
        )

    @property
    def num_sampled(self) -> int:
        """How many rows of logits the step needs; 0 when all requests are inside their prompt."""
        return len(self.sampled_rows)

    @cached_property
    def shape(self) -> BatchShape:
        """What decides how the batch runs; the same object for batches that are `advanced` from this one."""
        return BatchShape(self.num_tokens, self.num_reqs, self.max_query_len, self.is_pure_decode)

    @property
    def is_pure_decode(self) -> bool:
        """Every request has finished its prompt and computes its newest token, and drafts."""
        return self.num_decodes == self.num_reqs


class _Advanced(PreparedBatch):
    """Its lengths on the host are made when they are asked for, which a replay does not."""

    lens_before: Tensor
    num_steps: int

    @cached_property
    def seq_lens_cpu(self) -> Tensor:
        return torch.where(self.lens_before > 0, self.lens_before + self.num_steps, 0)
