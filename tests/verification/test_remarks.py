"""What of a search was disturbed, in a few lines."""

from factories import make_measurement, make_request

from autotune.values.conditions import Conditions
from autotune.values.trial import TrialResult
from autotune.verification.remarks import disturbance_notes


def trial(number, conditions=None, times=(1.0, 1.01, 0.99)):
    measured = make_measurement().model_copy(update={"conditions": conditions, "step_times_s": times})
    return TrialResult(request=make_request(number=number), outcome=measured, duration_s=5.0)


def test_a_quiet_search_has_nothing_to_tell():
    results = [trial(n, Conditions(others_share=0.01, stolen_share=0.0)) for n in range(3)]
    assert disturbance_notes(results, results[:2]) == ()
    assert disturbance_notes([trial(0)], []) == ()


def test_disturbed_measurements_are_counted_and_their_extent_told():
    shares = [0.02, 0.3, 0.6]
    (line,) = disturbance_notes([trial(n, Conditions(others_share=s)) for n, s in enumerate(shares)], [])
    assert "other processes took 30% to 60% of the cores' time during 2 of 3 measurements" in line


def test_throttling_is_told_once_for_all_trials():
    hot = Conditions(throttled={"heat": 0.5}, temperature_c=90)
    (line,) = disturbance_notes([trial(0, hot), trial(1, hot), trial(2, Conditions())], [])
    assert "slowed down by heat, at up to 90 °C during 2 of 3 measurements" in line


def test_a_baseline_that_became_slower_shows_the_machines_drift():
    finals = [trial(5), trial(7, times=(1.12, 1.13, 1.11))]
    (line,) = disturbance_notes(finals, finals)
    assert "drifted by 12% between trials of the baseline (5 and 7)" in line
