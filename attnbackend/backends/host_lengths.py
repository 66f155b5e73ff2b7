"""What a plan may learn from the lengths of a batch where they are known on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnbackend.metadata import CommonAttentionMetadata

__all__ = ["BatchFacts", "with_host_lengths"]


def with_host_lengths(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The batch with its lengths on the host as well, copied from the device at once if need be.

    Inside a CUDA graph capture, where nothing can be waited for, it comes back as it is.
    """
    if common.query_start_loc_cpu is not None and common.seq_lens_cpu is not None:
        return common
    if common.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
        return common
    both = torch.cat([common.query_start_loc, common.seq_lens]).cpu()
    rows = common.seq_lens.shape[0]
    starts, lens = both[: rows + 1], both[rows + 1 :]
    longest = (int(starts.diff().max()), int(lens.max())) if rows else (0, 0)
    return common.replace(
        query_start_loc_cpu=starts, seq_lens_cpu=lens, max_query_len=longest[0], max_seq_len=longest[1]
    )


@dataclass(frozen=True)
class BatchFacts:
    """What decides whether a batch has rows that kernels leave unwritten."""

    covered_tokens: int
    """Tokens that belong to a request for certain; those behind may be padding."""
    may_see_no_key: bool
    """Whether there may be queries that see no key at all."""
    are_new_sequences: bool
    """There are tokens, and their requests have no others in the cache."""

    @classmethod
    def of(cls, common: CommonAttentionMetadata, *, causal: bool) -> BatchFacts:
        """From the host's copies; without them, the most that is possible."""
        starts, lens = common.query_start_loc_cpu, common.seq_lens_cpu
        if starts is None or lens is None:
            return cls(0, True, False)
        # numpy: a step waits for this, and its operations cost a third of torch's.
        starts_np, lens_np = starts.numpy(), lens.numpy()
        queries = starts_np[1:] - starts_np[:-1]
        empty = (lens_np < queries) if causal else (lens_np == 0) & (queries > 0)
        # Every row without tokens is as good as new.
        new = bool(((queries == lens_np) | (queries == 0)).all()) and bool(queries.any())
        return cls(int(starts_np[-1]), bool(empty.any()), new)

    @classmethod
    def of_capture(cls, common: CommonAttentionMetadata) -> BatchFacts:
        """What holds for every batch that a graph of this one will be replayed on.

        Graphs of uniform batches are padded with requests of seq_len 0 that bring tokens, so all of their
        tokens belong to requests; in graphs of other batches any token may be padding.
        """
        rows, tokens = common.seq_lens.shape[0], common.num_actual_tokens
        return cls(tokens if rows * common.max_query_len == tokens else 0, True, False)
