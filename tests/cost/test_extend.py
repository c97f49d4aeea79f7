"""A model that is traced with few layers and extended equals the same model traced whole."""

from collections import Counter

import numpy as np
import pytest

from autotune.cost.extend import Extended, NotLinear, Pair, extend, peaks
from autotune.cost.memory import components
from autotune.cost.profile import CONTRACTION, ELEMENTWISE, Line
from autotune.cost.tape import Tape
from autotune.values.adapters import LoraAdapter

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


SLOW = {"a leading dense layer", "layers of two kinds", "vit", "bert"}  # models
PARAMS = [pytest.param(c, id=", ".join(c), marks=[pytest.mark.slow] if c[0] in SLOW else []) for c in CASES]


@pytest.fixture(params=PARAMS)
def both(request, profile_of):
    """The extended profile and the whole one."""
    model, way = request.param
    return profile_of(model, **WAYS[way]), profile_of(model, whole=True, **WAYS[way])


@pytest.mark.parametrize("accumulated", [False, True])
def test_the_peak_is_the_same(both, accumulated):
    extended, whole = ([components(p, "sgd", size, 1 + accumulated).allocated for size in SIZES] for p in both)
    assert extended == pytest.approx(whole, rel=1e-9)


def test_the_parameters_are_the_same(both):
    extended, whole = both
    assert Counter(extended.parameters) == Counter(whole.parameters)
    assert extended.buffers_bytes == whole.buffers_bytes


def test_the_work_is_the_same(both):
    extended, whole = both
    for kind in range(4):
        for half in (False, True):
            assert totals(extended, kind, half) == pytest.approx(totals(whole, kind, half), rel=0.005)


def test_the_needed_work_is_the_same(both):
    extended, whole = both
    assert extended.needed_flops == whole.needed_flops


def totals(profile, kind: int, half: bool) -> list[float]:
    """Operators, their FLOPs and their bytes, of three samples."""
    chosen = [w for w in profile.work if (w.kind, w.half) == (kind, half)]
    return [
        sum(w.count for w in chosen),
        sum(w.count * w.flops.at(3) for w in chosen),
        sum(w.count * w.moved_bytes.at(3) for w in chosen),
    ]


# By hand


def tape(names: str, live=None, flops=None, *, forward_end: int | None = None) -> Tape:
    """A tape whose operators are letters; `live` are temporaries."""
    count = len(names)
    columns = np.zeros((count, 4))
    columns[:, 1] = live if live is not None else 0.0
    return Tape(
        names=tuple(names),
        kinds=np.full(count, CONTRACTION, dtype=np.int8),
        flops=np.array(flops if flops is not None else [0.0] * count, dtype=float),
        moved_bytes=np.zeros(count),
        half=np.zeros(count, dtype=bool),
        live=columns,
        recomputed=np.zeros(count, dtype=bool),
        forward_end=count if forward_end is None else forward_end,
        storages=np.zeros((0, 4)),
        calls=("",) * count,
    )


def pair(names: str, live=None, flops=None, **fields) -> Pair:
    """Of equal tapes at two micro-batches: nothing depends on the batch."""
    one = tape(names, live, flops, **fields)
    return Pair(samples=(2, 4), tapes=(one, one))


def test_two_micro_batches_make_lines():
    both_tapes = Pair(samples=(2, 4), tapes=(tape("a", flops=[30.0]), tape("a", flops=[50.0])))
    assert both_tapes.lines("flops").tolist() == [[10.0, 10.0]]


def test_operators_that_change_with_the_micro_batch_are_not_linear():
    with pytest.raises(NotLinear, match="micro-batch"):
        Pair(samples=(2, 4), tapes=(tape("ab"), tape("ac")))


@pytest.mark.parametrize("deeper", ["pXlXq", "plq", "plll", "qlllp"])
def test_a_deeper_model_that_does_not_repeat_its_layers_is_not_linear(deeper):
    with pytest.raises(NotLinear):
        extend(pair("pllq"), [pair(deeper)], [3])


def test_a_layers_work_counts_for_each_further_one():
    step = extend(pair("pllq", flops=[1, 10, 10, 2]), [pair("plllq", flops=[1, 10, 10, 10, 2])], [7])
    assert sum(w.count * w.flops.at(1) for w in step.work) == 1 + 9 * 10 + 2
    assert step.needed_flops.at(1) == 1 + 9 * 10 + 2


def test_what_is_alive_grows_by_as_much_with_each_further_layer():
    """Layers keep 5 each, the head takes 7 beside them."""
    step = extend(pair("pllq", live=[1, 6, 11, 18]), [pair("plllq", live=[1, 6, 11, 16, 23])], [7])
    assert step.live[:, 1, 0].max() == 1 + 9 * 5 + 7


def test_two_stacks_are_extended_apart():
    base = pair("eedd", flops=[1, 1, 10, 10])
    deeper = [pair("eeedd", flops=[1, 1, 1, 10, 10]), pair("eeddd", flops=[1, 1, 10, 10, 10])]
    assert extend(base, deeper, [4, 2]).needed_flops.at(1) == 6 * 1 + 4 * 10


def test_without_a_deeper_one_the_base_is_the_model():
    step = extend(pair("abc", live=[1, 3, 2], flops=[1, 2, 3]), [], [])
    assert step.live[:, 1, 0].max() == 3
    assert step.needed_flops.at(1) == 6


def moments(*rows: tuple[tuple[float, float], ...]) -> Extended:
    """Rows of (activations, temporaries, gradients, fresh), each (constant, per sample)."""
    names = tuple("abcdefg"[: len(rows)])
    return Extended(names=names, live=np.array(rows, dtype=float), work=(), needed_flops=Line(constant=0, per_sample=0))


NOTHING = (0.0, 0.0)


def test_only_moments_that_are_the_peak_at_some_micro_batch_stay():
    step = moments(
        ((100, 1), NOTHING, NOTHING, NOTHING),
        ((0, 10), NOTHING, NOTHING, NOTHING),
        ((50, 2), NOTHING, NOTHING, NOTHING),
        ((60, 5), NOTHING, NOTHING, NOTHING),
    )
    assert {point.operator for point in peaks(step, accumulated=False)} == {"a", "b", "d"}


def test_earlier_gradients_are_no_part_of_a_later_micro_steps_peak():
    step = moments((NOTHING, NOTHING, (100, 0), (1, 0)), ((50, 0), NOTHING, NOTHING, NOTHING))
    assert "a" in {p.operator for p in peaks(step, accumulated=False)}
    assert [p.operator for p in peaks(step, accumulated=True)] == ["b"]


def test_moments_that_are_the_peak_where_gradients_are_dealt_out_stay_too():
    step = moments((NOTHING, NOTHING, (100, 0), (1, 0)), ((50, 0), NOTHING, NOTHING, NOTHING), (NOTHING,) * 4)
    assert [p.operator for p in peaks(step, accumulated=False)] == ["a", "b"]


def test_element_wise_work_is_not_needed_work():
    one = tape("ab", flops=[3.0, 4.0])
    mixed = Tape(**{**vars(one), "kinds": np.array([CONTRACTION, ELEMENTWISE], dtype=np.int8)})
    assert extend(Pair(samples=(2, 4), tapes=(mixed, mixed)), [], []).needed_flops.at(1) == 3


def test_what_runs_again_is_not_needed_work():
    one = tape("ab", flops=[3.0, 4.0])
    again = Tape(**{**vars(one), "recomputed": np.array([False, True])})
    step = extend(Pair(samples=(2, 4), tapes=(again, again)), [], [])
    assert step.needed_flops.at(1) == 3
    assert sum(w.flops.at(1) for w in step.work) == 7
