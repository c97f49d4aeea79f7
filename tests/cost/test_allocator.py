"""Reserving follows the rules of torch's caching allocator, c10/cuda/CUDACachingAllocator.cpp."""

import pytest

from autotune.cost.allocator import CachingAllocator

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(("asked", "given"), [(0, 512), (1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_sizes_are_rounded_up_to_512_bytes(asked, given):
    allocator = CachingAllocator()
    assert allocator.allocate(asked).size == given
    assert allocator.allocated == given


@pytest.mark.parametrize(
    ("expandable", "asked", "reserved"),
    [
        (False, [512], 2), (False, [MIB], 2), (False, [MIB + 512], 20), (False, [10 * MIB - 512], 20),
        (False, [10 * MIB], 10), (False, [11 * MIB], 12), (False, [33 * MIB], 34),
        # small blocks share a segment
        (False, [512 * KIB] * 4, 2), (False, [512 * KIB] * 4 + [1], 4),
        # a segment grows by 20 MiB, and that of small blocks by 2
        (True, [512], 2), (True, [512, 3 * MIB], 22), (True, [512, 3 * MIB, 18 * MIB], 42),
    ],
)  # fmt: skip
def test_segments_have_the_size_of_their_class(expandable, asked, reserved):
    allocator = CachingAllocator(expandable=expandable)
    for size in asked:
        allocator.allocate(size)
    assert allocator.reserved == reserved * MIB


@pytest.mark.parametrize(
    ("expandable", "held", "freed", "asked", "size", "reserved"),
    [
        (False, [5], [0], 512 / MIB, 512 / MIB, 22),  # small and large blocks don't share
        (False, [40, 16, 24], [0, 1, 2], 15, 16, 80),  # the smallest that is large enough; its rest is too small
        (False, [20], [0], 19, 20, 20),  # a rest of 1 MiB stays with its block
        (False, [20], [0], 18, 18, 20),
        (False, [5, 5, 5, 5], [0, 2, 1], 15, 15, 20),  # neighbours are joined when freed
        (False, [5, 5, 5, 5], [0, 2], 10, 10, 30),  # but not across a block in use
        (False, [30], [0], 30, 30, 30),  # what is freed stays reserved and is used again
        (False, [20, 20], [0, 1], 60, 60, 100),  # separate segments are too small
        (True, [20, 20], [0, 1], 60, 60, 60),  # where one that expands has room
    ],
)
def test_a_block_is_taken_of_what_was_freed(expandable, held, freed, asked, size, reserved):
    allocator = CachingAllocator(expandable=expandable)
    blocks = [allocator.allocate(n * MIB) for n in held]
    for position in freed:
        allocator.release(blocks[position])
    assert allocator.allocate(asked * MIB).size == size * MIB
    assert allocator.reserved == reserved * MIB


def test_peaks_are_the_highest_of_all_times():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(30 * MIB))
    allocator.allocate(10 * MIB)
    assert allocator.peak_allocated == allocator.peak_reserved == 30 * MIB
    assert (allocator.take_peak(), allocator.take_peak()) == (30 * MIB, 10 * MIB)


def test_segments_that_are_wholly_free_can_be_given_back_and_others_not():
    allocator = CachingAllocator()
    first, _, free = (allocator.allocate(size * MIB) for size in (5, 5, 30))
    for block in (first, free):
        allocator.release(block)
    allocator.return_unused()
    assert (allocator.reserved, allocator.peak_reserved) == (20 * MIB, 50 * MIB)


def test_the_end_of_an_expandable_segment_is_taken_last():
    allocator = CachingAllocator(expandable=True)
    first, _, third = (allocator.allocate(size * MIB) for size in (12, 4, 8))
    for block in (first, third):
        allocator.release(block)  # at the end are 24 MiB free
    assert allocator.allocate(10 * MIB).address == 0
    assert allocator.allocate(30 * MIB).address == 16 * MIB
    assert allocator.reserved == 60 * MIB
