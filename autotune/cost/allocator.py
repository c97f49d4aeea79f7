"""What torch's caching allocator would reserve for a sequence of allocations. Pure.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with its default settings: sizes rounded up to 512 bytes;
blocks up to 1 MiB cut out of segments of 2 MiB, below 10 MiB out of 20 MiB, larger ones out of a segment of their own
rounded up to 2 MiB; the smallest free block that is large enough is taken and the rest of it split off; neighbours are
joined when freed; segments are never given back. One stream, and a device that is never full.

Expandable segments are one for small blocks and one for large ones, which grow at their end by 2 or 20 MiB at a time
where no free block is large enough.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

_MIN_BLOCK = 512
_SMALL_SIZE = 1 << 20
_SMALL_BUFFER = 2 << 20
_LARGE_BUFFER = 20 << 20
_MIN_LARGE_ALLOC = 10 << 20
_ROUND_LARGE = 2 << 20


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment."""

    size: int
    segment_size: int
    small: bool
    address: int
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """Allocates and frees; counts what is allocated and reserved. `expandable`: whether segments are."""

    def __init__(self, *, expandable: bool = False) -> None:
        self._expandable = expandable
        self._last: list[Block | None] = [None, None]  # of each expandable segment
        # By size, then by address, of which no two are alike.
        self._pools: tuple[list[tuple[int, int, Block]], ...] = ([], [])
        self._end = 0  # of the highest segment
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0

    def allocate(self, nbytes: float) -> Block:
        """Return a block of at least `nbytes`."""
        size = max(_MIN_BLOCK, -(-int(nbytes) // _MIN_BLOCK) * _MIN_BLOCK)
        small = size <= _SMALL_SIZE
        block = self._take(size, small) or (self._grown if self._expandable else self._new_segment)(size, small)
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def take_peak(self) -> int:
        """Return the most that was allocated since this was last asked."""
        peak, self.peak_allocated = self.peak_allocated, self.allocated
        return peak

    def release(self, block: Block) -> None:
        """Give a block back; it stays reserved."""
        self.allocated -= block.size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._remove(neighbour)
                self._join(block, neighbour)
        self._insert(block)

    def _take(self, size: int, small: bool) -> Block | None:
        pool = self._pools[small]
        position = bisect.bisect_left(pool, (size,))
        # The end of an expandable segment could grow, and is the last to be taken.
        if position + 1 < len(pool) and pool[position][2] is self._last[small]:
            position += 1
        return pool.pop(position)[2] if position < len(pool) else None

    def _new_segment(self, size: int, small: bool) -> Block:
        if small:
            segment = _SMALL_BUFFER
        elif size < _MIN_LARGE_ALLOC:
            segment = _LARGE_BUFFER
        else:
            segment = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        self._reserve(segment)
        self._end += segment
        return Block(size=segment, segment_size=segment, small=small, address=self._end - segment)

    def _grown(self, size: int, small: bool) -> Block:
        """Return the last block of an expandable segment, made as large as `size`."""
        step, last = _SMALL_BUFFER if small else _LARGE_BUFFER, self._last[small]
        free = last if last is not None and last.free else None
        more = -(-(size - (free.size if free else 0)) // step) * step
        self._reserve(more)
        if free is not None:
            self._remove(free)
            free.size += more
            return free
        block = Block(more, segment_size=0, small=small, address=last.address + last.size if last else 0, before=last)
        if last is not None:
            last.after = block
        self._last[small] = block
        return block

    def _reserve(self, segment: int) -> None:
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if rest < _MIN_BLOCK or (not block.small and not self._expandable and rest <= _SMALL_SIZE):
            return
        other = Block(
            rest, block.segment_size, block.small, block.address + size, free=True, before=block, after=block.after
        )
        if block.after is not None:
            block.after.before = other
        elif self._expandable:
            self._last[block.small] = other
        block.after = other
        block.size = size
        self._insert(other)

    def _join(self, block: Block, neighbour: Block) -> None:
        block.size += neighbour.size
        if neighbour is block.before:
            block.address = neighbour.address
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        if self._last[block.small] is neighbour:
            self._last[block.small] = block

    def return_unused(self) -> None:
        """Give back segments that are wholly free, as `torch.cuda.empty_cache` does."""
        for pool in self._pools:
            unused = [entry for entry in pool if entry[2].size == entry[2].segment_size]
            for entry in unused:
                pool.remove(entry)
                self.reserved -= entry[2].segment_size

    def _insert(self, block: Block) -> None:
        bisect.insort(self._pools[block.small], (block.size, block.address, block))

    def _remove(self, block: Block) -> None:
        pool = self._pools[block.small]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]
