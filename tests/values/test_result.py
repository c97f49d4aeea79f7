"""Trials in a line each: what they are called, and when they ended."""

from factories import OUT_OF_MEMORY, make_config, make_result

from autotune.values.result import TrialRow, rows_of
from autotune.values.trial import Purpose, TrialStatus


def test_trials_ended_one_after_the_other_where_they_do_not_tell():
    trials = [make_result(number=n, duration_s=s) for n, s in enumerate((3.0, 4.0, 5.0))]
    assert [row.ended_s for row in rows_of(trials)] == [3.0, 7.0, 12.0]


def test_pauses_are_left_out_and_what_ran_at_once_counts_once():
    began = [(100.0, 10.0), (102.0, 4.0), (110.0, 5.0), (9000.0, 2.0)]  # at once, after it, and the day after
    trials = [make_result(number=n, duration_s=s).model_copy(update={"began": b}) for n, (b, s) in enumerate(began)]
    assert [row.ended_s for row in rows_of(trials)] == [10.0, 6.0, 15.0, 17.0]


def test_trials_that_explain_have_numbers_of_their_own():
    assert TrialRow.of(make_result(number=3)).label == "3"
    assert TrialRow.of(make_result(number=3, purpose=Purpose.EXPLAIN)).label == "explain 3"
    assert TrialRow(number=None, config=make_config(), status=TrialStatus.REJECTED).label == ""


def test_a_failure_has_its_cause_and_no_figures():
    row = TrialRow.of(make_result(outcome=OUT_OF_MEMORY))
    assert (row.status, row.cause) == (TrialStatus.OUT_OF_MEMORY, OUT_OF_MEMORY.cause)
    assert (row.samples_per_second, row.interval, row.peak_bytes) == (None, None, None)
    assert not row.is_compared


def test_a_line_written_before_is_read():
    written = TrialRow.of(make_result()).model_dump(mode="json")
    for name in ("interval", "tokens_per_second", "duration_s", "ended_s"):
        del written[name]
    assert TrialRow.model_validate({**written, "depths": None}).duration_s is None
