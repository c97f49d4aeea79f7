"""A model that is traced with few layers, and their trace repeated, equals the same model traced whole."""

import itertools
from collections import Counter

import numpy as np
import pytest

from autotune.cost.memory import components
from autotune.cost.profile import CONTRACTION, ELEMENTWISE
from autotune.cost.profiler import NotLinear, joined, order_of, storages_of, work_of
from autotune.cost.tape import Tape
from autotune.values.techniques import LoraAdapter

MIXED = {"device": "cuda", "autocast": "bfloat16"}
WAYS = {
    "plain": {},
    "mixed on a GPU": MIXED,
    "checkpointing": {"device": "cuda", "dtype": "bfloat16", "checkpointing": "full"},
    "adapter": {**MIXED, "adapter": LoraAdapter(rank=4)},
}
CASES = [
    *((model, "plain") for model in ("t5", "mixtral", "a leading dense layer", "layers of two kinds")),
    *((model, "mixed on a GPU") for model in ("llama", "bert", "vit")),
    ("llama", "adapter"),
    ("bert", "checkpointing"),
]
SIZES = (1, 3, 8, 100)
BY_DEFAULT = {("t5", "plain"), ("mixtral", "plain"), ("llama", "adapter")}


@pytest.mark.parametrize(
    ("model", "way"),
    [pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow) for case in CASES],
)
def test_a_trace_of_few_layers_that_are_repeated_is_that_of_all_layers(profile_of, model, way):
    extended, whole = (profile_of(model, whole=all_layers, **WAYS[way]) for all_layers in (False, True))
    assert extended.made == whole.made
    assert Counter(extended.parameters) == Counter(whole.parameters)
    assert (extended.buffers_bytes, extended.needed_flops) == (whole.buffers_bytes, whole.needed_flops)
    for size, accumulation in itertools.product(SIZES, (1, 2)):
        peaks = [components(one, "sgd", size, accumulation).allocated for one in (extended, whole)]
        assert peaks[0] == pytest.approx(peaks[1], rel=1e-9)
    for kind, half in itertools.product(range(4), (False, True)):
        assert totals(extended, kind, half) == pytest.approx(totals(whole, kind, half), rel=0.005)
    passes = ([one.storages, *([one.evaluation.storages] if one.evaluation else [])] for one in (extended, whole))
    for found, expected in zip(*passes, strict=True):
        assert len(found.rows) == len(expected.rows)
        assert (found.forward_end, found.workspaces) == (expected.forward_end, expected.workspaces)
        most = [(one.alive[:, :3].sum(axis=1) @ [np.ones(4), SIZES]).max(axis=0) for one in (found, expected)]
        assert most[0] == pytest.approx(most[1], rel=1e-9)


def totals(profile, kind: int, half: bool) -> list[float]:
    """Operators, their FLOPs and their bytes, of three samples."""
    chosen = [w for w in profile.work if (w.kind, w.half) == (kind, half)]
    figures = [(1, w.flops.at(3), w.moved_bytes.at(3)) for w in chosen]
    return [sum(w.count * f for w, f in zip(chosen, column, strict=True)) for column in zip(*figures, strict=True)]


# By hand


def tape(names: str, *storages: tuple[int, int, int], flops=None, forward_end: int | None = None, **fields) -> Tape:
    """A tape whose operators are letters; storages are (made, freed, bytes)."""
    count = len(names)
    rows = [(*storage, 0, 0) for storage in storages]
    defaults = {
        "kinds": np.full(count, CONTRACTION, dtype=np.int8),
        "flops": np.array(flops or [0.0] * count, dtype=float),
        "moved_bytes": np.zeros(count),
        "half": np.zeros(count, dtype=bool),
        "recomputed": np.zeros(count, dtype=bool),
        "forward_end": count if forward_end is None else forward_end,
        "storages": np.array(rows, dtype=float).reshape(-1, 5),
        "origins": (("", ""),) * len(rows),
        "calls": ("",) * count,
    }
    return Tape(names=tuple(names), **{**defaults, **fields})


def one(*args, **fields):
    """Of equal tapes at two micro-batches: nothing depends on the batch."""
    made = tape(*args, **fields)
    return joined((2, 4), made, made)


def test_two_micro_batches_make_lines_unless_the_operators_change():
    both_tapes = joined((2, 4), tape("a", flops=[30.0]), tape("a", flops=[50.0]))
    assert both_tapes.lines("flops").tolist() == [[10.0, 10.0]]
    with pytest.raises(NotLinear, match="micro-batch"):
        joined((2, 4), tape("ab"), tape("ac"))


@pytest.mark.parametrize("deeper", ["pXlXq", "plq", "plll", "qlllp"])
def test_a_deeper_model_that_does_not_repeat_its_layers_is_not_linear(deeper):
    with pytest.raises(NotLinear):
        storages_of(one(deeper), [one("pllq")], [3])


def test_a_layers_work_counts_for_each_further_one():
    work, needed = work_of(one("plllq", flops=[1, 10, 10, 10, 2]), [one("pllq", flops=[1, 10, 10, 2])], [6])
    assert sum(w.count * w.flops.at(1) for w in work) == 1 + 9 * 10 + 2
    assert needed.at(1) == 1 + 9 * 10 + 2


def test_two_stacks_are_repeated_apart():
    deep = one("eeeddd", flops=[1, 1, 1, 10, 10, 10])
    lacking = [one("eeddd", flops=[1, 1, 10, 10, 10]), one("eeedd", flops=[1, 1, 1, 10, 10])]
    assert work_of(deep, lacking, [3, 1])[1].at(1) == 6 * 1 + 4 * 10
    assert storages_of(deep, lacking, [3, 1]).forward_end == 10
    assert "".join("eeeddd"[at] for at in order_of("eeeddd", ["eeddd", "eeedd"], [3, 1])) == "eeeeeedddd"


def test_needed_work_is_neither_element_wise_nor_run_again():
    kinds, again = np.array([CONTRACTION, ELEMENTWISE, CONTRACTION], dtype=np.int8), np.array([False, False, True])
    work, needed = work_of(one("abc", flops=[3.0, 4.0, 5.0], kinds=kinds, recomputed=again), [], [])
    assert needed.at(1) == 3
    assert sum(w.flops.at(1) for w in work) == 12


def three_layers(*storages: tuple[int, int, int], times: int = 2):
    """Of ten operators a layer, 10 to 39 forward and 50 to 79 backward, with ten before, between and after them."""
    names = "a" * 10 + "l" * 30 + "m" * 10 + "r" * 30 + "z" * 10
    short = one(names.replace("l" * 10, "", 1).replace("r" * 10, "", 1), forward_end=35)
    return storages_of(one(names, *storages, forward_end=45), [short], [times])


# Of five layers 10 to 59 are forward and 70 to 119 backward.
REPEATED = {
    "what a layer keeps is kept by each and freed in the opposite order": (
        [(15, 75, 1), (25, 65, 1), (35, 55, 1)], [[15, 115], [25, 105], [35, 95], [45, 85], [55, 75]]
    ),
    "what a layer drops is dropped by each": (
        [(15, 17, 1), (25, 27, 1), (35, 37, 1)], [[15, 17], [25, 27], [35, 37], [45, 47], [55, 57]]
    ),
    # The first layer's lasts until the second is over, which is where the repeated one ends.
    "what a layer hands to the next is gone with that": (
        [(19, 30, 1), (29, 40, 1), (39, 45, 1)], [[19, 30], [29, 40], [39, 50], [49, 60], [59, 65]]
    ),
    "what all keep until the end of the forward pass, as casts of weights, ends there": (
        [(15, 41, 1), (25, 41, 1), (35, 41, 1)], [[15, 61], [25, 61], [35, 61], [45, 61], [55, 61]]
    ),
    "what surrounds the layers is there once": ([(0, 85, 1), (42, 51, 1)], [[0, 125], [62, 71]]),
}  # fmt: skip


@pytest.mark.parametrize(("made", "repeated"), REPEATED.values(), ids=list(REPEATED))
def test_storages_of_a_layer_are_repeated(made, repeated):
    assert sorted(three_layers(*made).rows[:, :3].tolist()) == [[*row, 1] for row in repeated]
