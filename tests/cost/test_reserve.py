"""What the allocator holds follows its rules; storages at full depth are those of the real, deep trace."""

from collections import Counter

import pytest
from profiles import line, make_family, make_group, make_profile, make_storages

from autotune.cost.profile import ForwardPass, Profile
from autotune.cost.reserve import Buckets, CachingAllocator, grouped, held_bytes, sum_bytes
from autotune.values.estimate import Evaluation

MIB = 1 << 20
WEIGHT = make_group(4 * MIB)  # 16 MiB


def model(*storages, parameters=(WEIGHT,), **fields) -> Profile:
    """Rows of (made, freed, MiB constant, MiB per sample, whether a gradient)."""
    rows = [(made, freed, constant * MIB, slope * MIB, gradient) for made, freed, constant, slope, gradient in storages]
    counted = Counter(parameters)
    groups = tuple(group.model_copy(update={"count": count}) for group, count in counted.items())
    return make_profile(make_family(device="cuda"), parameters=groups, storages=make_storages(*rows), **fields)


GRADIENT = (3, 4, 16, 0, True)


@pytest.mark.parametrize(
    ("storages", "unused"),
    [
        ([(0, 2, 0, 32, False)], 0),  # blocks that fit exactly
        ([(0, 2, 3, 0, False)], 4),  # of 3 MiB out of a segment of 20, which the gradient then uses 16 of
        ([(0, 1, 30, 0, False), (1, 2, 32, 0, False)], 30),  # a block that no later one fits into
        ([(0, 1, 32, 0, False), (1, 2, 32, 0, False)], 0),  # what ends before an operator makes room for its results
        ([(*row, 0, False) for row in ((0, 1, 48), (2, 4, 32), (3, 4, 16), (3, 6, 16), (4, 6, 48))], 48),
    ],
    ids=["exact", "part of a segment", "growing", "equal", "segments below those before"],
)
def test_blocks_that_no_other_fits_into_stay_unused(storages, unused):
    found = held_bytes(model(*storages, GRADIENT), "sgd", 1, accumulated=False).unused
    assert found == pytest.approx(unused * MIB, abs=2 * MIB if unused == 30 else 0)


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch", "adamw_torch_fused", "adafactor", "adamw_bnb_8bit"])
@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("keeps_gradients", [False, True])
def test_no_more_is_ever_allocated_than_reserved(optim, accumulated, keeps_gradients):
    mixed = model((0, 2, 3, 5, False), (1, 4, 1, 0, False), GRADIENT, parameters=(WEIGHT, make_group(1000, 7)))
    assert held_bytes(mixed, optim, 3, accumulated=accumulated, keeps_gradients=keeps_gradients).unused >= 0


def test_a_block_whose_rest_is_too_small_to_be_split_off_counts_as_allocated():
    """The 17 matrices of 1.125 MiB that a segment of 20 MiB has room for leave 0.875 MiB, which goes to the last."""
    matrices = (make_group(9 << 15, trained=False),) * 17  # frozen, so without states
    held = held_bytes(model((0, 1, 30, 0, False), parameters=matrices), "adamw_torch", 1, accumulated=False)
    assert held.allocated == held.reserved == 50 * MIB


def test_adafactor_copies_16_bit_weights_and_gradients_to_fp32():
    update = model((3, 4, 32, 0, True), parameters=(make_group(16 * MIB, element_bytes=2),))
    assert held_bytes(update, "adafactor", 1, accumulated=False).allocated >= (2 * 32 + 4 * 64) * MIB


def test_ddp_buckets_are_full_at_their_limits():
    assert grouped([16, 16, 1, 1], 1, 25) == [16, 18]
    assert grouped([1, 16, 16, 1], 1, 25) == [1, 32, 1]


@pytest.mark.parametrize("rebuilt", [False, True], ids=["parts from the beginning", "one that is rebuilt"])
def test_ddp_holds_a_copy_of_the_gradients(rebuilt):
    one, two = (
        held_bytes(model((0, 2, 0, 32, False), GRADIENT), "sgd", 1, accumulated=False, buckets=buckets)
        for buckets in (None, Buckets(1 * MIB, 25 * MIB, rebuilt=rebuilt))
    )
    assert two.allocated == one.allocated + 16 * MIB
    assert two.reserved >= one.reserved + 16 * MIB


@pytest.mark.parametrize(
    ("rows", "columns", "generation", "nbytes"),
    [
        (6107, 768, "ampere", 37_748_736), (6107, 3072, "ampere", 113_246_208), (1021, 768, "ampere", 6_291_456),
        (1020, 768, "ampere", 0), (4096, 30_522, "ampere", 15_627_264), (4096, 130, "ampere", 1_064_960),
        (4096, 50_257, "ampere", 0), (6107, 3072, "turing", 22_020_096), (6107, 3072, "small_ampere", 66_060_288),
    ],
)  # fmt: skip
def test_a_sum_over_many_rows_takes_the_scratch_that_torch_takes(rows, columns, generation, nbytes):
    """Seen on torch's allocator, where it is rounded up to a block."""
    assert sum_bytes(rows, columns, generation) == nbytes


def test_scratch_of_sums_grows_in_steps_with_the_micro_batch():
    """Of 768 columns and 1,000 rows a sample."""
    summing = model().model_copy(update={"storages": make_storages((0, 1, 0, 1000, False, 768))})
    one, two, six = (held_bytes(summing, "sgd", size, accumulated=False).allocated for size in (1, 2, 6))
    assert one == held_bytes(model(), "sgd", 6, accumulated=False).allocated
    assert two - one == sum_bytes(2000, 768, "ampere")
    assert six - one == pytest.approx(sum_bytes(6000, 768, "ampere"), abs=MIB)


@pytest.mark.parametrize(("element_bytes", "unused"), [(1, (128 - 16) * MIB), (0.5, (256 - 8) * MIB)])
def test_weights_are_quantized_one_after_the_other(element_bytes, unused):
    """The second is packed into a segment of the first one's 16 or 32 bits, which so isn't given back."""
    weights = tuple(make_group(size * MIB, element_bytes=element_bytes, trained=False) for size in (64, 16))
    held = held_bytes(model(parameters=weights), "sgd", 1, accumulated=False)
    assert held.allocated == 80 * MIB * element_bytes
    assert held.unused == unused


def evaluated(batch: int, kept: int = 0, *, outputs: float = 0.0):
    """A training that frees a block of 40 MiB, with an evaluation whose passes take 30 MiB a sample."""
    forward = ForwardPass(outputs_bytes=line(0, outputs * MIB), storages=make_storages((0, 1, 0, 30 * MIB)))
    how = Evaluation(batch=batch, kept_samples=kept)
    trained = model((0, 1, 40, 0, False), evaluation=forward)
    return held_bytes(trained, "sgd", 1, accumulated=False, evaluation=how)


def test_an_evaluation_takes_the_blocks_that_training_has_left_and_reserves_more_for_larger_ones():
    training = held_bytes(model((0, 1, 40, 0, False)), "sgd", 1, accumulated=False)
    assert evaluated(1).reserved == training.reserved
    assert evaluated(2).reserved == training.reserved + 60 * MIB
    assert evaluated(2).evaluation - evaluated(1).evaluation == 30 * MIB


def test_kept_logits_grow_in_new_blocks_and_are_twice_there_while_they_are_joined():
    """16, 32, 48 and 64 MiB, of which none fits where those before it were."""
    kept, dropped = (evaluated(1, samples, outputs=16) for samples in (4, 0))
    assert kept.evaluation - dropped.evaluation == (2 * 64 - 30) * MIB
    assert kept.reserved - dropped.reserved >= 64 * MIB
    # The last batch may be smaller.
    assert evaluated(4, 6, outputs=32).evaluation == evaluated(1, 6, outputs=32).evaluation


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
        (False, [MIB // 2] * 4, 2), (False, [MIB // 2] * 4 + [1], 4),
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
def test_freed_blocks_are_taken_again(expandable, held, freed, asked, size, reserved):
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
