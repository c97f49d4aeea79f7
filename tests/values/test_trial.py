"""A trial as a value: what follows from its figures, and that they survive JSON."""

import pytest
from factories import make_measurement, make_result

from autotune.values.conditions import Conditions
from autotune.values.trial import Failure, Interval, Memory, Phases, Purpose, TrialResult, TrialStatus


def test_the_peak_is_the_most_complete_figure_that_is_known_and_of_several_ranks_the_highest_of_each_kind():
    assert Memory(allocated_bytes=1, resident_bytes=2).peak_bytes == 2
    assert Memory(allocated_bytes=1, reserved_bytes=3).peak_bytes == 3
    assert Memory(allocated_bytes=1, reserved_bytes=3, device_bytes=4).peak_bytes == 4
    assert Memory(device_bytes=0, reserved_bytes=3).peak_bytes == 0
    assert (Memory(allocated_bytes=1).is_known, Memory().is_known) == (True, False)
    with pytest.raises(ValueError, match="without any memory figure"):
        _ = Memory().peak_bytes
    ranks = [Memory(allocated_bytes=5, reserved_bytes=6), Memory(allocated_bytes=4, reserved_bytes=9), Memory()]
    assert Memory.worst_of(ranks) == Memory(allocated_bytes=5, reserved_bytes=9)
    assert Memory.worst_of([]) == Memory()


def test_a_rate_that_was_measured_beside_others_is_shown_no_surer_than_by_their_share():
    known = {"samples_per_second": 100.0, "samples_per_second_interval": Interval(low=99.0, high=101.0)}
    assert make_measurement(**known).shown_interval == Interval(low=99.0, high=101.0)
    disturbed = make_measurement(**known, conditions=Conditions(others_share=0.1))
    assert (disturbed.shown_interval.low, disturbed.shown_interval.high) == pytest.approx((90.0, 110.0))


def test_the_outcome_decides_how_a_trial_ended():
    completed = make_result()
    assert TrialResult.model_validate_json(completed.model_dump_json()) == completed
    assert (completed.status, completed.has_failed) == (TrialStatus.COMPLETED, False)
    for status, has_failed in ((TrialStatus.TIMED_OUT, False), (TrialStatus.OUT_OF_MEMORY, True)):
        failed = completed.model_copy(update={"outcome": Failure(status=status, cause="x")})
        assert (failed.status, failed.has_failed, failed.measurement) == (status, has_failed, None)


def test_the_overhead_of_a_trial_is_its_time_without_steps_and_checks():
    phases = Phases(model_s=4.0, first_step_s=2.0, discarded_s=1.0, measured_s=3.0, check_s=1.0)
    result = make_result()
    for duration_s, overhead_s in ((10.0, 3.0), (6.5, 0.0)):
        outcome = result.outcome.model_copy(update={"phases": phases})
        timed = result.model_copy(update={"outcome": outcome, "duration_s": duration_s})
        assert timed.overhead_s == pytest.approx(overhead_s)
    unknown = result.outcome.model_copy(update={"phases": None})
    assert result.model_copy(update={"outcome": unknown}).overhead_s is None


def test_a_purpose_either_explores_closes_or_explains():
    kinds = {purpose: (purpose.explores, purpose.closes) for purpose in Purpose}
    assert {p for p, kind in kinds.items() if kind == (True, False)} == {Purpose.BASELINE, Purpose.SEARCH}
    assert {p for p, kind in kinds.items() if kind == (False, False)} == {Purpose.EXPLAIN}
    assert (True, True) not in kinds.values()
    assert (Purpose.EXPLAIN.label(2), Purpose.FINAL.label(2)) == ("explain 2", "2")
