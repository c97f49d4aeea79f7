"""What a knob brought, in words; a waterfall that starts at the baseline and ends at the winner."""

import itertools
import math

import pytest
from factories import make_config
from factories import make_contribution as part

from autotune.output.drawing import styled
from autotune.output.explanation import how_known, ratio_words, waterfall, waterfall_steps
from autotune.values.result import Contribution, Explanation
from autotune.values.trial import Interval


def test_a_knob_without_a_factor_says_why():
    assert ratio_words(part("precision", None, "fails")) == "needed"
    assert ratio_words(part("precision", None, "slow")) == "too slow"
    assert ratio_words(part("precision", None, "unknown")) == "not told"


def test_how_a_factor_is_known_names_the_trials():
    said = "measured in turn with the winner (explain trials 0, 1, 10)"
    assert how_known(part("precision", 1.5, trials=("explain 10", "explain 0", "explain 1"))) == said
    once = how_known(part("precision", 1.5, "once", trials=("4", "3")))
    assert once == "told by one trial of the search each (trials 3, 4)"
    assert how_known(part("precision", None, "fails", cause="no memory", trials=("3",))) == "no memory"


def test_a_factor_has_its_interval_and_is_not_shown_where_that_is_wider_than_a_factor_of_two():
    assert ratio_words(part("precision", 1.5)) == "1.50 (1.35 to 1.65)"
    for low, high in ((0.0, math.inf), (0.9, 2.0), (-1.0, 1.0)):
        wide = part("precision", 1.5).model_copy(update={"interval": Interval(low=low, high=high)})
        assert ratio_words(wide) == "couldn't tell"
    faster = part("precision", 1.5).model_copy(update={"interval": Interval(low=1.2, high=3.0)})
    slower = part("precision", 0.3).model_copy(update={"interval": Interval(low=0.1, high=0.9)})
    assert (ratio_words(faster), ratio_words(slower)) == ("at least 1.20", "at most 0.90")


def explained(*parts: Contribution, baseline: float | None = 10.0, total: float | None = 3.0) -> Explanation:
    return Explanation(
        winner=make_config(),
        winner_samples_per_second=30.0,
        baseline_samples_per_second=baseline,
        total=total,
        contributions=parts,
    )


def test_a_waterfall_leads_from_baseline_to_winner():
    steps = waterfall_steps(explained(part("precision", 2.0), part("optim", 1.2)))
    assert [(round(s.start, 6), round(s.end, 6)) for s in steps] == [(10.0, 20.0), (20.0, 24.0), (24.0, 30.0)]
    assert [s.words for s in steps] == ["precision a → b", "optim a → b", "together"]


def test_a_loss_leads_back():
    steps = waterfall_steps(explained(part("precision", 4.0), part("optim", 1.5)))
    assert [s.kind for s in steps] == ["gain", "gain", "rest loss"]
    assert steps[-1].end == pytest.approx(30.0)


def test_what_was_not_measured_in_turn_looks_otherwise():
    steps = waterfall_steps(explained(part("precision", 3.0, "once")))
    assert steps[0].kind == "gain weak"


def test_what_could_not_be_told_looks_so_too_and_has_no_whisker():
    (step,) = waterfall_steps(explained(part("precision", 3.0, interval=Interval(low=0.09, high=469.0))))
    assert (step.kind, step.value, step.low, step.high) == ("gain weak", "couldn't tell", None, None)
    told, *_ = waterfall_steps(explained(part("precision", 3.0)))
    assert (told.kind, told.low, told.high) == ("gain", pytest.approx(27.0), pytest.approx(33.0))


def test_a_knob_without_which_nothing_runs_has_words_for_a_bar():
    needed = waterfall_steps(explained(part("precision", 3.0), part("checkpointing", None, "fails", cause="no memory")))
    assert (needed[1].value, needed[1].start, needed[1].tip) == ("needed", None, "no memory")


def test_without_a_baseline_each_bar_ends_at_the_winner():
    steps = waterfall_steps(explained(part("precision", 2.0), part("optim", 1.5), baseline=None, total=None))
    assert [(s.start, s.end) for s in steps] == [(15.0, 30.0), (20.0, 30.0)]


@pytest.mark.parametrize("width", [346.0, 620.0])
def test_bars_join_where_the_last_one_ended(width):
    with styled("light"):
        axes = waterfall(explained(part("precision", 2.0), part("optim", 1.2)), width).axes[0]
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert len(ends) == 3
    for (_, end), (start, _) in itertools.pairwise(ends):
        assert start == pytest.approx(end)
    assert axes.get_xscale() == "log"
    assert len([line for line in axes.lines if "interval" in (line.get_gid() or "")]) == 2


def test_nothing_is_drawn_where_nothing_is_told():
    assert waterfall(explained(part("precision", None, "unknown"), total=None), 620.0) is None
