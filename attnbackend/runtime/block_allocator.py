"""Which cache blocks are free and which are owned."""

from __future__ import annotations

from collections.abc import Iterable

RESERVED_BLOCKS = 1
"""Block 0 is never handed out: padded rows of a block table point at it."""


class BlockAllocator:
    """Hands out the ids 1 .. num_blocks-1, O(1) a block; block 0 is reserved.

    The block freed last is handed out first, while it is still in a near cache.

    Args:
        num_blocks: blocks of the cache, the reserved one included.

    Raises:
        ValueError: num_blocks leaves no block to hand out.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks <= RESERVED_BLOCKS:
            raise ValueError(
                f"BlockAllocator: num_blocks={num_blocks} leaves no usable block; block 0 is "
                f"reserved, so give at least {RESERVED_BLOCKS + 1}"
            )
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, RESERVED_BLOCKS - 1, -1))
        self._is_owned = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that are ever handed out, free or not."""
        return self.num_blocks - RESERVED_BLOCKS

    def is_owned(self, block_id: int) -> bool:
        """Whether the block is handed out at present."""
        return bool(self._is_owned[block_id])

    def allocate(self, count: int) -> list[int]:
        """Return `count` distinct free block ids; asserts that there are so many."""
        assert 0 <= count <= len(self._free), f"allocate({count}) with {len(self._free)} free"
        if count == 0:
            return []
        blocks = self._free[-count:][::-1]
        del self._free[-count:]
        for block_id in blocks:
            self._is_owned[block_id] = 1
        return blocks

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back; asserts that each is one of ours and owned at present."""
        for block_id in block_ids:
            assert RESERVED_BLOCKS <= block_id < self.num_blocks, (
                f"free of block {block_id}, which is not one of 1..{self.num_blocks - 1}"
            )
            assert self._is_owned[block_id], f"free of block {block_id}, which is free already"
            self._is_owned[block_id] = 0
            self._free.append(block_id)
