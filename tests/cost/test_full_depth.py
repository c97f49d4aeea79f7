"""Storages at full depth are those of the real, deep trace."""

from __future__ import annotations

import numpy as np
import pytest
from profiles import make_family, make_group

from autotune.cost import profiler
from autotune.cost.family import Shape
from autotune.cost.full_depth import deepened
from autotune.cost.profile import Excerpt, Repeat
from autotune.training.heads import default_task
from autotune.training.resolve import resolve

BASE, LAYER, HEAD = make_group(3), make_group(5), make_group(7)


def rows_of(excerpt: Excerpt) -> list[tuple[float, ...]]:
    return sorted(tuple(row[:3]) for row in deepened(excerpt).rows.tolist())


def three_layers(*storages: tuple[int, int, int], times: int = 2) -> Excerpt:
    """Of ten operators a layer, 0 to 29 forward and 40 to 69 backward."""
    return Excerpt(
        storages=tuple((made, freed, float(size), 0.0, False, 0) for made, freed, size in storages),
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
        ("t5-small", {"checkpointing": "full"}),
    ],
)
def test_a_deepened_excerpt_is_the_trace_of_the_whole_model(model, options, monkeypatch):
    """Storage for storage, but for where within the layers equal names leave the stretch's beginning open."""
    spec = resolve(model)
    shape = Shape(task=default_task(spec), length=32, target_length=32)
    family = make_family(device="cuda", **options)
    short = profiler.profile(spec, family, shape)
    monkeypatch.setattr(profiler, "stacks", lambda *_: ())
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
