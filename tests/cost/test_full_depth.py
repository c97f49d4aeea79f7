"""A model that is traced with few layers, and their trace repeated, equals the same model traced whole."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from profiles import parts_of

from autotune.cost.full_depth import NotLinear, Pass, storages_of, unlike_share, work_of
from autotune.cost.profile import CONTRACTION, ELEMENTWISE
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
    *((model, "mixed on a GPU") for model in ("llama", "bert", "vit")), ("llama", "adapter"), ("bert", "checkpointing"),
]  # fmt: skip
SIZES = (1, 3, 8, 100)
BY_DEFAULT = {("t5", "plain"), ("mixtral", "plain"), ("llama", "adapter")}


@pytest.mark.parametrize(
    ("model", "way"), [pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow) for case in CASES]
)
def test_a_trace_of_few_layers_that_are_repeated_is_that_of_all_layers(profile_of, model, way):
    extended, whole = (profile_of(model, whole=all_layers, **WAYS[way]) for all_layers in (False, True))
    assert extended.made == whole.made
    assert Counter(extended.parameters) == Counter(whole.parameters)
    assert (extended.buffers_bytes, extended.needed_flops) == (whole.buffers_bytes, whole.needed_flops)
    for size, accumulation in itertools.product(SIZES, (1, 2)):
        peaks = [parts_of(one, "sgd", size, accumulation).allocated for one in (extended, whole)]
        assert peaks[0] == pytest.approx(peaks[1], rel=1e-9)
    for kind, width in itertools.product(range(4), (4, 2)):
        assert totals(extended, kind, width) == pytest.approx(totals(whole, kind, width), rel=0.005)
    passes = ([one.storages, *([one.evaluation.storages] if one.evaluation else [])] for one in (extended, whole))
    for found, expected in zip(*passes, strict=True):
        assert (found.forward_end, found.workspaces) == (expected.forward_end, expected.workspaces)
        rows = [np.array(sorted(one.rows[:, :6].tolist())) for one in (found, expected)]
        # Of T5 3 % end elsewhere, though the peak is the same.
        assert (rows[0] != rows[1]).any(axis=1).mean() <= (0.04 if model == "t5" else 0)


def totals(profile, kind: int, width: int) -> list[float]:
    """Operators, their FLOPs and their bytes, of three samples."""
    chosen = [w for w in profile.work if (w.kind, w.width) == (kind, width)]
    figures = [(1, w.flops.at(3), w.moved_bytes.at(3)) for w in chosen]
    return [sum(w.count * f for w, f in zip(chosen, column, strict=True)) for column in zip(*figures, strict=True)]


def tape(names: str, flops=None, **fields) -> Tape:
    """A tape whose operators are letters, all of the forward pass."""
    count = len(names)
    defaults = {
        "kinds": np.full(count, CONTRACTION, dtype=np.int8), "flops": np.array(flops or [0.0] * count, dtype=float),
        "moved_bytes": np.zeros(count), "widths": np.full(count, 4), "recomputed": np.zeros(count, dtype=bool),
        "forward_end": count, "storages": np.zeros((0, 5)), "calls": ("",) * count,
    }  # fmt: skip
    return Tape(names=tuple(names), **{**defaults, **fields})


def one(names: str, **fields):
    """Of equal tapes at two micro-batches: nothing depends on the batch."""
    return Pass.of(tape(names, **fields), tape(names, **fields))


def test_two_micro_batches_make_lines_unless_the_operators_change():
    both_tapes = Pass.of(tape("a", flops=[30.0]), tape("a", flops=[50.0]))
    assert both_tapes.lines("flops").tolist() == [[10.0, 10.0]]
    with pytest.raises(NotLinear, match="micro-batch"):
        Pass.of(tape("ab"), tape("ac"))


@pytest.mark.parametrize("deeper", ["pXlXq", "plq", "plll", "qlllp"])
def test_a_deeper_model_that_does_not_repeat_its_layers_is_not_linear(deeper):
    with pytest.raises(NotLinear):
        storages_of(one(deeper), [one("pllq")], [3])


def test_needed_work_is_neither_element_wise_nor_run_again():
    kinds, again = np.array([CONTRACTION, ELEMENTWISE, CONTRACTION], dtype=np.int8), np.array([False, False, True])
    work, needed = work_of(one("abc", flops=[3.0, 4.0, 5.0], kinds=kinds, recomputed=again), [], [])
    assert needed.at(1) == 3
    assert sum(w.flops.at(1) for w in work) == 12


def test_what_each_layer_leaves_to_the_next_one_is_there_twice_at_any_depth():
    """As the scores that RemBERT's layers return: those of the last two layers end at once, behind the loop."""

    def of(layers: int):
        names, end = "psbc" + "sxbc" * (layers - 1) + "q", 4 * layers
        storages = [(max(1, 4 * at), min(4 * at + 8, end), 10, 0, 0) for at in range(layers)]
        return one(names, storages=np.array(storages, dtype=float), origins=(("module", "s"),) * layers)

    found, truth = storages_of(of(3), [of(2)], [5]), storages_of(of(8), [], [])
    assert found.alive.sum(axis=1)[:, 0].max() == truth.alive.sum(axis=1)[:, 0].max() == 20


def scrambled(layers: int):
    """As inductor may write a step: layers' operators in an order of their own, unlike names; a loss on 50 bytes."""
    order, names, storages = random.Random(layers).sample(range(layers), layers), list[str](), []
    freed = {layer: 2 * layers + 1 + 2 * at + 1 for at, layer in enumerate(reversed(range(layers)))}
    for at, layer in enumerate(order):
        names += [f"first{layer} of {layers}", "second"]
        storages += [(2 * at, freed[layer], 10, 0, 0), (2 * at, 2 * at + 1, 7, 0, 0)]
    names.append("loss")
    storages.append((2 * layers, 2 * layers + 2, 50, 0, 0))
    for layer in range(layers):
        names += [f"back{layer % 2}", "gradient"]
        storages.append((2 * layers + 2 * layer + 2, 4 * layers + 1, 4, 1, 0))
    names += ["last"]
    storages.append((len(names), len(names), 1, 1, 0))  # a gradient that is made at the very end
    return one(
        names, storages=np.array(storages, dtype=float), forward_end=2 * layers + 1,
        origins=(("module", "made"),) * len(storages),
    )  # fmt: skip


def test_layers_whose_operators_stand_in_any_order_add_what_they_save_and_their_gradients():
    deep, short, whole = (scrambled(layers) for layers in (3, 2, 8))
    with pytest.raises(NotLinear):
        storages_of(deep, [short], [5])
    assert unlike_share(deep.low, short.low) > 0.1
    found, truth = (
        storages_of(*made, exact=False).alive[:, :3, 0].sum(axis=1) for made in ((deep, [short], [5]), (whole, [], []))
    )
    assert found.max() == truth.max() == 8 * 10 + 50
    assert found[-1] == truth[-1] == 8 * 4 + 1
    rows = storages_of(deep, [short], [5], exact=False).rows
    assert (rows[:, 1] > rows[:, 0]).all(), "each is there for an operator, as the allocator's replay expects"
