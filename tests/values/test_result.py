"""Trials in a line each, and when an explanation of the winner is settled."""

from factories import OUT_OF_MEMORY, make_config, make_contribution, make_result

from autotune.values.result import Explanation, TrialRow, rows_of
from autotune.values.trial import Purpose, TrialStatus


def test_trials_ended_one_after_the_other_where_they_do_not_tell_else_pauses_are_left_out():
    trials = [make_result(number=n, duration_s=s) for n, s in enumerate((3.0, 4.0, 5.0))]
    assert [row.ended_s for row in rows_of(trials)] == [3.0, 7.0, 12.0]
    began = [(100.0, 10.0), (102.0, 4.0), (110.0, 5.0), (9000.0, 2.0)]  # at once, after it, and the day after
    trials = [make_result(number=n, duration_s=s).model_copy(update={"began": b}) for n, (b, s) in enumerate(began)]
    assert [row.ended_s for row in rows_of(trials)] == [10.0, 6.0, 15.0, 17.0]


def test_trials_that_explain_have_numbers_of_their_own_and_a_failure_its_cause_and_no_figures():
    assert TrialRow.of(make_result(number=3)).label == "3"
    assert TrialRow.of(make_result(number=3, purpose=Purpose.EXPLAIN)).label == "explain 3"
    assert TrialRow(number=None, config=make_config(), status=TrialStatus.REJECTED).label == ""
    row = TrialRow.of(make_result(outcome=OUT_OF_MEMORY))
    assert (row.status, row.cause) == (TrialStatus.OUT_OF_MEMORY, OUT_OF_MEMORY.cause)
    assert (row.samples_per_second, row.interval, row.peak_bytes) == (None, None, None)
    assert not row.is_compared


def test_an_explanation_is_settled_when_no_knob_could_be_measured_better():
    def explained(*bases: str) -> Explanation:
        parts = tuple(
            make_contribution("tf32", 2.0 if basis in ("in turn", "once") else None, basis) for basis in bases
        )
        rates = {"winner_samples_per_second": 4.0, "baseline_samples_per_second": 1.0}
        return Explanation(winner=make_config(), **rates, total=4.0, contributions=parts)

    assert explained("in turn", "fails", "slow").is_settled
    assert not explained("in turn", "once").is_settled
