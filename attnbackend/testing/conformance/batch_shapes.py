"""The batches that cases run over: each is one thing that a kernel's indexing can get wrong."""

from __future__ import annotations

from typing import Any

__all__ = ["BATCHES", "DECODE", "LARGEST", "LARGE_BATCHES", "MIXED", "ONE_REQUEST", "PADDED", "UNEVEN_DECODE"]

MIXED, DECODE, PADDED, ONE_REQUEST, UNEVEN_DECODE = (
    "mixed",
    "decode",
    "padded",
    "one_request",
    "uneven_decode",
)

LARGEST: dict[str, Any] = {"query_lens": (1, 5, 0, 17, 1), "context_lens": (40, 0, 9, 20, 0)}

BATCHES: dict[str, dict[str, Any]] = {
    MIXED: LARGEST,
    DECODE: {"query_lens": (1, 1, 1), "context_lens": (0, 33, 70)},
    "uniform_of_four": {"query_lens": (4, 4, 4), "context_lens": (12, 60, 3)},
    "prefill": {"query_lens": (19, 3, 16), "context_lens": (0, 0, 0)},
    "chunked_prefill": {"query_lens": (16, 9), "context_lens": (32, 16)},
    "one_token": {"query_lens": (1,), "context_lens": (0,)},
    ONE_REQUEST: {"query_lens": (1,), "context_lens": (45,)},
    "page_edges": {"query_lens": (1,) * 6, "context_lens": (15, 16, 22, 31, 47, 63)},
    "decode_with_gaps": {"query_lens": (0, 1, 0, 0, 1, 1), "context_lens": (9, 20, 0, 5, 0, 40)},
    "as_many_tokens_as_rows": {"query_lens": (2, 0, 1), "context_lens": (30, 5, 12)},
    "zero_length_rows": {"query_lens": (0, 2, 0), "context_lens": (5, 30, 0)},
    PADDED: {
        "query_lens": (1, 0, 3),
        "context_lens": (16, 0, 15),
        "num_padded_rows": 3,
        "num_padded_tokens": 2,
    },
    "graph_padding_requests": {"query_lens": (1,) * 5, "context_lens": (20, -1, 33, -1, -1)},
    "queries_before_the_first_key": {"query_lens": (4, 1), "context_lens": (-2, 3)},
}
"""Name -> lengths of an `AttentionCase`."""

LARGE_BATCHES: dict[str, dict[str, Any]] = {
    "long_context": {"query_lens": (1, 3), "context_lens": (1301, 700)},
    UNEVEN_DECODE: {"query_lens": (1,) * 4, "context_lens": (1500, 0, 7, 511)},
    "long_prompt": {"query_lens": (150,), "context_lens": (21,)},
    "full_tiles": {"query_lens": (128, 64), "context_lens": (0, 64)},
    "many_requests": {"query_lens": (1,) * 133, "context_lens": tuple(i % 37 for i in range(133))},
}
"""As `BATCHES`, beyond what one tile of a kernel holds; for a few features only; all have uneven decodes."""
