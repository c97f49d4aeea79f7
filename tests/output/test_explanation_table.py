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


def test_a_factor_has_its_interval_where_it_has_an_end():
    assert ratio_words(part("precision", 1.5)) == "×1.50 (1.35 to 1.65)"
    endless = part("precision", 1.5).model_copy(update={"interval": Interval(low=0.0, high=math.inf)})
    assert ratio_words(endless) == "×1.50"
