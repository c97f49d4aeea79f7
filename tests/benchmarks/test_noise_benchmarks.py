"""What the benchmarks of noise, repetition and overhead make of answers and trials; nothing runs here."""

import sys
from pathlib import Path

import pytest
from factories import make_config, make_measurement, make_plan, make_request, make_result

from autotune.planning.plan import SearchState
from autotune.values.conditions import Conditions
from autotune.values.trial import Phases, Purpose, TrialResult
from autotune.verification.finals import Finals
from autotune.verification.verdict import assemble

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import noise
import overhead
import repeat

PLAN = make_plan()
BASE = PLAN.baseline
FAST = make_config(16)
OTHER = make_config(4)


def answer(*finals):
    """Return the answer of a search that saw these rates, and again in two rounds of finals."""
    searched = [make_result(c, rate, number=n) for n, (c, rate) in enumerate(finals)]
    again = [
        make_result(c, rate, number=10 + n, purpose=Purpose.FINAL) for n, (c, rate) in enumerate([*finals, *finals])
    ]
    return assemble(Finals(SearchState(PLAN, [*searched, *again])), 100.0)


def test_an_answer_under_noise_is_the_same_alike_honest_or_wrong():
    quiet = [answer((BASE, 10.0), (FAST, 13.0), (OTHER, 12.7))]
    assert quiet[0].best.config == FAST
    assert noise.classify(quiet[0], quiet) == "same"
    assert noise.classify(answer((BASE, 10.0), (OTHER, 13.0)), quiet) == "alike"
    assert noise.classify(answer((BASE, 10.0), (FAST, 10.0)), quiet) == "honest"
    slow = make_config(2)
    assert noise.classify(answer((BASE, 10.0), (slow, 13.0)), quiet) == "wrong"


def test_runs_inside_the_stated_interval_are_counted():
    result = answer((BASE, 10.0), (FAST, 13.0))
    low, high = repeat.finite(result.best.measurement.samples_per_second_interval)
    found = repeat.summary(result, [13.0] * 19 + [high * 1.1])
    assert (found["inside"], found["runs"], found["met"]) == (19, 20, True)
    found = repeat.summary(result, [13.0] * 18 + [low * 0.9, high * 1.1])
    assert (found["inside"], found["met"]) == (18, False)


def test_a_bias_shows_as_the_ratio_to_the_stated_rate():
    result = answer((BASE, 10.0), (FAST, 13.0))
    stated = result.best.measurement.samples_per_second
    found = repeat.summary(result, [stated * 0.9, stated * 0.9])
    assert (found["ratio"], found["spread"]) == (pytest.approx(0.9), pytest.approx(0.0))


def test_overhead_on_a_free_core_leaves_out_the_waiting():
    phases = Phases(model_s=1.0, first_step_s=2.0, measured_s=5.0)
    measured = make_measurement(phases=phases, conditions=Conditions(waited_share=0.75))
    found = overhead.row(TrialResult(request=make_request(number=3), outcome=measured, duration_s=9.0))
    assert (found["overhead_s"], found["overhead_on_a_free_core_s"]) == (pytest.approx(2.0), pytest.approx(0.5))
    assert found["process_s"] == pytest.approx(1.0)


def test_the_targets_are_held_against_what_was_recorded():
    quick = make_measurement(
        phases=Phases(model_s=0.3, measured_s=9.0), conditions=Conditions(waited_share=0.0, others_share=0.0)
    )
    trials = [TrialResult(request=make_request(number=n), outcome=quick, duration_s=9.5) for n in range(3)]
    found = overhead.summary(trials, answer((BASE, 10.0), (FAST, 13.0)))
    assert found["trial_overhead_s"] == pytest.approx(0.5)
    assert found["targets"]["trial"] is True
