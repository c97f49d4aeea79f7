"""Tables of what there is, and of what a search would do."""

from io import StringIO

from factories import make_plan
from predicted_space import GB, SPACE, make_model_of
from rich.console import Console

from autotune.output.listings import preview_table
from autotune.search.run import preview
from autotune.values.config import Allowance


def drawn(found) -> str:
    console = Console(width=120, file=StringIO())
    console.print(preview_table(found))
    return console.file.getvalue()


def test_a_dry_run_has_the_extent_of_the_search_its_knobs_and_first_trials():
    plan = make_plan(space=SPACE, memory_bytes=100 * GB, allowance=Allowance.OPTIMIZER)
    text = drawn(preview(plan, make_model_of()))
    assert "20 configurations (--allow optimizer); at most" in text
    assert "micro-batch   │ 1, 2, 4, 8, 16" in text
    assert "│ the baseline" in text
    assert "more than the budget" not in text


def test_a_first_trial_that_may_not_fit_says_so():
    found = preview(make_plan(space=SPACE, memory_bytes=100 * GB), make_model_of())
    (baseline, *_) = found.first_trials
    small = found.model_copy(update={"memory_bytes": baseline.predicted.peak_bytes - 1})
    assert "the baseline (more than the budget)" in drawn(small)


def test_the_most_frequent_reasons_are_shown_and_the_others_counted():
    found = preview(make_plan(space=SPACE, memory_bytes=100 * GB), make_model_of())
    text = drawn(found.model_copy(update={"refused": {f"reason {n}": 20 - n for n in range(10)}}))
    assert "refused: 20 configurations: reason 0" in text
    assert "refused: 23 configurations for 2 other reasons (--json)" in text
    assert "reason 8" not in text
