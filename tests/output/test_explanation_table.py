"""What a knob brought, in words."""

import math

from factories import make_contribution as part

from autotune.output.explanation_table import how_known, ratio_words
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
