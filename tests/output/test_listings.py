"""Tables of what there is, and of what a search would do."""

import pytest
from answers import drawn
from factories import make_plan
from predicted_space import GB, SPACE, make_model_of

from autotune.output.listings import preview_table
from autotune.search.run import Preview, preview


@pytest.fixture(scope="module")
def found() -> Preview:
    return preview(make_plan(space=SPACE, memory_bytes=100 * GB), make_model_of())


def test_a_dry_run_has_the_extent_of_the_search_its_knobs_and_first_trials(found):
    text = drawn(preview_table(found))
    assert "20 configurations (--allow method); at most" in text
    assert "micro-batch   │ 1, 2, 4, 8, 16" in text
    assert "│ the baseline" in text
    assert "more than the budget" not in text
    assert "\n1 configuration (--allow" in drawn(preview_table(found.model_copy(update={"configurations": 1})))
    small = found.model_copy(update={"memory_bytes": found.first_trials[0].predicted.peak_bytes - 1})
    assert "the baseline (more than the budget)" in drawn(preview_table(small))


def test_the_most_frequent_reasons_are_shown_and_the_others_counted(found):
    refused = {f"reason {n}": 20 - n for n in range(10)}
    text = drawn(preview_table(found.model_copy(update={"refused": refused})))
    assert "refused: 20 configurations: reason 0" in text
    assert "refused: 23 configurations for 2 other reasons (--json)" in text
    assert "reason 8" not in text
