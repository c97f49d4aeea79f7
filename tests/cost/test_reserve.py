"""What the allocator holds follows its rules; storages at full depth are those of the real, deep trace."""

from __future__ import annotations

import pytest
from profiles import make_group

from autotune.cost.profile import Excerpt
from autotune.cost.reserve import Buckets, grouped, held_bytes

MIB = 1 << 20
WEIGHT = make_group(4 * MIB)  # 16 MiB


def excerpt(*storages, parameters=(WEIGHT,)) -> Excerpt:
    """Rows of (made, freed, MiB constant, MiB per sample, whether a gradient)."""
    rows = tuple(
        (made, freed, constant * MIB, slope * MIB, gradient) for made, freed, constant, slope, gradient in storages
    )
    return Excerpt(storages=rows, parameters=parameters)


GRADIENT = (3, 4, 16, 0, True)


def test_blocks_that_fit_exactly_leave_nothing_unused():
    assert held_bytes(excerpt((0, 2, 0, 32, False), GRADIENT), "sgd", 1, accumulated=False).unused == 0


def test_a_segment_that_is_partly_used_is_reserved_whole():
    """Blocks of 3 MiB come out of 20 MiB, which the gradient then uses 16 of."""
    assert held_bytes(excerpt((0, 2, 3, 0, False), GRADIENT), "sgd", 1, accumulated=False).unused == 4 * MIB


def test_a_block_that_no_later_one_fits_into_stays_unused():
    growing = excerpt((0, 1, 30, 0, False), (1, 2, 32, 0, False), GRADIENT)
    assert held_bytes(growing, "sgd", 1, accumulated=False).unused == pytest.approx(30 * MIB, abs=2 * MIB)


def test_what_ends_before_an_operator_makes_room_for_its_results():
    equal = excerpt((0, 1, 32, 0, False), (1, 2, 32, 0, False), GRADIENT)
    assert held_bytes(equal, "sgd", 1, accumulated=False).unused == 0


def test_sizes_follow_the_micro_batch():
    growing = excerpt((0, 1, 0, 30, False), (1, 2, 0, 32, False), GRADIENT)
    one, four = (held_bytes(growing, "sgd", size, accumulated=False).unused for size in (1, 4))
    assert four == pytest.approx(4 * one, rel=0.1)


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch", "adamw_torch_fused", "adafactor", "adamw_bnb_8bit"])
@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("keeps_gradients", [False, True])
def test_no_more_is_ever_allocated_than_reserved(optim, accumulated, keeps_gradients):
    mixed = excerpt((0, 2, 3, 5, False), (1, 4, 1, 0, False), GRADIENT, parameters=(WEIGHT, make_group(1000, 7)))
    assert held_bytes(mixed, optim, 3, accumulated=accumulated, keeps_gradients=keeps_gradients).unused >= 0


def test_frozen_weights_make_no_states():
    frozen = excerpt((0, 1, 32, 0, False), parameters=(make_group(4 * MIB, trained=False),))
    assert held_bytes(frozen, "adamw_torch", 1, accumulated=False).unused == 0


def test_a_block_whose_rest_is_too_small_to_be_split_off_counts_as_allocated():
    """The 17 matrices of 1.125 MiB that a segment of 20 MiB has room for leave 0.875 MiB, which goes to the last."""
    matrices = (make_group(9 << 15, trained=False),) * 17
    held = held_bytes(excerpt((0, 1, 30, 0, False), parameters=matrices), "sgd", 1, accumulated=False)
    assert held.allocated == 50 * MIB
    assert held.reserved == 50 * MIB


def test_adafactor_copies_16_bit_weights_and_gradients_to_fp32():
    weight = make_group(16 * MIB, element_bytes=2)
    update = excerpt((3, 4, 32, 0, True), parameters=(weight,))
    held = held_bytes(update, "adafactor", 1, accumulated=False)
    assert held.allocated >= (2 * 32 + 4 * 64) * MIB


def test_ddp_buckets_are_full_at_their_limits():
    weights = (WEIGHT, WEIGHT, make_group(1 << 18), make_group(1 << 18))  # 16, 16, 1 and 1 MiB
    found = grouped([g.elements * g.element_bytes / MIB for g in weights], 1, 25)
    assert found == [16, 18]


@pytest.mark.parametrize("rebuilt", [False, True], ids=["parts from the beginning", "one that is rebuilt"])
def test_ddp_holds_a_copy_of_the_gradients(rebuilt):
    one, two = (
        held_bytes(excerpt((0, 2, 0, 32, False), GRADIENT), "sgd", 1, accumulated=False, buckets=buckets)
        for buckets in (None, Buckets(1 * MIB, 25 * MIB, rebuilt=rebuilt))
    )
    assert two.allocated == one.allocated + 16 * MIB
    assert two.reserved >= one.reserved + 16 * MIB
