"""Reserving follows the rules of torch's caching allocator, c10/cuda/CUDACachingAllocator.cpp."""

import pytest

from autotune.cost.allocator import CachingAllocator, OutOfMemory

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(("asked", "given"), [(0, 512), (1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_sizes_are_rounded_up_to_512_bytes(asked, given):
    allocator = CachingAllocator()
    assert allocator.allocate(asked).size == given
    assert allocator.allocated == given


@pytest.mark.parametrize(
    ("asked", "segment"),
    [(512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
     (11 * MIB, 12 * MIB), (33 * MIB, 34 * MIB)],
)  # fmt: skip
def test_a_segment_has_the_size_of_its_class(asked, segment):
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert allocator.reserved == segment


def test_small_blocks_share_a_segment():
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(512 * KIB)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved == 4 * MIB


def test_small_and_large_blocks_do_not_share():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(5 * MIB))
    allocator.allocate(512)
    assert allocator.reserved == 22 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 16, 24)]
    for block in blocks:
        allocator.release(block)
    assert allocator.allocate(15 * MIB).segment_size == 16 * MIB
    assert allocator.allocate(15 * MIB).segment_size == 24 * MIB


def test_the_rest_of_a_large_block_is_split_off_if_it_is_more_than_1_mib():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(20 * MIB))
    assert allocator.allocate(19 * MIB).size == 20 * MIB
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(20 * MIB))
    assert allocator.allocate(18 * MIB).size == 18 * MIB


def test_neighbours_are_joined_when_freed():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.release(block)
    assert allocator.allocate(15 * MIB).size == 15 * MIB
    assert allocator.reserved == 20 * MIB


def test_what_lies_between_blocks_in_use_is_not_joined():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.release(blocks[0])
    allocator.release(blocks[2])
    allocator.allocate(10 * MIB)
    assert allocator.reserved == 30 * MIB


def test_what_is_freed_stays_reserved_and_is_used_again():
    allocator = CachingAllocator()
    for _ in range(3):
        allocator.release(allocator.allocate(30 * MIB))
    assert allocator.allocated == 0
    assert allocator.reserved == 30 * MIB


def test_peaks_are_the_highest_of_all_times():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(30 * MIB))
    allocator.allocate(10 * MIB)
    assert allocator.peak_allocated == 30 * MIB
    assert allocator.peak_reserved == 30 * MIB


def test_at_capacity_unused_segments_are_given_back_first():
    allocator = CachingAllocator(capacity=50 * MIB)
    kept = allocator.allocate(20 * MIB)
    allocator.release(allocator.allocate(20 * MIB))
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 50 * MIB
    assert kept.size == 20 * MIB
    assert allocator.peak_reserved == 50 * MIB


def test_a_segment_that_is_partly_used_is_not_given_back():
    allocator = CachingAllocator(capacity=40 * MIB)
    first, _ = allocator.allocate(5 * MIB), allocator.allocate(5 * MIB)
    allocator.release(first)
    with pytest.raises(OutOfMemory):
        allocator.allocate(30 * MIB)


def test_out_of_memory_leaves_what_there_is_usable():
    allocator = CachingAllocator(capacity=40 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(50 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.allocated == 40 * MIB


def test_an_expandable_segment_grows_by_20_mib_and_one_of_small_blocks_by_2():
    allocator = CachingAllocator(expandable=True)
    allocator.allocate(512)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(3 * MIB)
    assert allocator.reserved == 22 * MIB
    allocator.allocate(18 * MIB)
    assert allocator.reserved == 42 * MIB


def test_an_expandable_segment_has_room_for_what_separate_segments_are_too_small_for():
    for expandable, reserved in ((False, 100 * MIB), (True, 60 * MIB)):
        allocator = CachingAllocator(expandable=expandable)
        for block in [allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)]:
            allocator.release(block)
        allocator.allocate(60 * MIB)
        assert allocator.reserved == reserved


def test_the_end_of_an_expandable_segment_is_taken_last():
    allocator = CachingAllocator(expandable=True)
    first, _, third = (allocator.allocate(size * MIB) for size in (12, 4, 8))
    for block in (first, third):
        allocator.release(block)  # at the end are 24 MiB free
    assert allocator.allocate(10 * MIB).address == 0
    assert allocator.allocate(30 * MIB).address == 16 * MIB
    assert allocator.reserved == 60 * MIB
