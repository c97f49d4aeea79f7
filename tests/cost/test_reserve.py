"""What the allocator holds follows its rules; storages at full depth are those of the real, deep trace."""

from __future__ import annotations

import numpy as np
import pytest
from profiles import make_family, make_group

from autotune.cost import profiler
from autotune.cost.family import Shape
from autotune.cost.profile import Excerpt, Repeat
from autotune.cost.reserve import deepened, held_bytes
from autotune.training.heads import default_task
from autotune.training.resolve import resolve

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


BASE, LAYER, HEAD = make_group(3), make_group(5), make_group(7)


def rows_of(excerpt: Excerpt) -> list[tuple[float, ...]]:
    return sorted(tuple(row[:3]) for row in deepened(excerpt).rows.tolist())


def three_layers(*storages: tuple[int, int, int], times: int = 2) -> Excerpt:
    """Of ten operators a layer, 0 to 29 forward and 40 to 69 backward."""
    return Excerpt(
        storages=tuple((made, freed, float(size), 0.0, False) for made, freed, size in storages),
        parameters=(BASE, LAYER, LAYER, LAYER, HEAD),
        repeats=(Repeat(forward=(10, 10), backward=(50, 10), parameters=(2, 1), times=times),),
        forward_end=40,
    )


def test_parameters_are_those_of_all_layers_in_order():
    parameters = deepened(three_layers(times=3)).parameters
    assert parameters == [BASE, *[LAYER] * 6, HEAD]


def test_what_a_layer_keeps_is_kept_by_each_and_freed_in_the_opposite_order():
    kept = three_layers((5, 65, 1), (15, 55, 1), (25, 45, 1))
    # five layers: 0 to 49 forward, 60 to 109 backward
    assert rows_of(kept) == [(5, 105, 1), (15, 95, 1), (25, 85, 1), (35, 75, 1), (45, 65, 1)]


def test_what_a_layer_drops_is_dropped_by_each():
    dropped = three_layers((5, 7, 1), (15, 17, 1), (25, 27, 1))
    assert rows_of(dropped) == [(5, 7, 1), (15, 17, 1), (25, 27, 1), (35, 37, 1), (45, 47, 1)]


def test_what_all_layers_keep_until_the_end_of_the_forward_pass_ends_there_for_each():
    """As weights that autocast has cast."""
    casts = three_layers((5, 31, 1), (15, 31, 1), (25, 31, 1))
    assert [end for _, end, _ in rows_of(casts)] == [51] * 5


def test_what_surrounds_the_layers_is_there_once():
    once = three_layers((0, 69, 1), (32, 41, 2))
    assert rows_of(once) == [(0, 109, 1), (52, 61, 2)]


def test_workspaces_move_with_what_is_around_them():
    excerpt = three_layers().model_copy(update={"workspaces": (0, 41)})
    assert deepened(excerpt).workspaces == (0, 61)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("distilgpt2", {}),
        ("distilgpt2", {"autocast": "bfloat16", "checkpointing": "full"}),
        ("t5-small", {"autocast": "bfloat16", "checkpointing": "full"}),
        ("t5-small", {"checkpointing": "reentrant"}),
    ],
)
def test_a_deepened_excerpt_is_the_trace_of_the_whole_model(model, options, monkeypatch):
    """Storage for storage, but for where within the layers equal names leave the stretch's beginning open."""
    spec = resolve(model)
    shape = Shape(task=default_task(spec), length=32, target_length=32)
    family = make_family(device="cuda", **options)
    short = profiler.profile(spec, family, shape)
    monkeypatch.setattr(profiler, "stacks", lambda config, every=1: ())
    whole = profiler.profile(spec, family, shape)
    assert whole.excerpt.repeats == ()
    assert _peaks(short.excerpt) == pytest.approx(_peaks(whole.excerpt), rel=1e-6)
    assert len(deepened(short.excerpt).rows) == len(whole.excerpt.storages)
    assert deepened(short.excerpt).parameters == list(whole.excerpt.parameters)
    assert len(deepened(short.excerpt).names) == len(whole.excerpt.names)


def _peaks(excerpt: Excerpt) -> float:
    """Return the most bytes alive at once."""
    rows = deepened(excerpt).rows
    ends, begins = [(end, 0, -size) for _, end, size in rows[:, :3]], [(made, 1, size) for made, _, size in rows[:, :3]]
    return float(np.cumsum([size for _, _, size in sorted(ends + begins)]).max())
