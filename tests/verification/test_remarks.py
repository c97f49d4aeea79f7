"""What is told beside an answer: disturbances, faster trials; and what is said when nothing completed."""

import pytest
from answers import BASE, BF16, BIG, COMPILED, Trials, answer, compiled, noisy
from factories import (
    CRASHED,
    OUT_OF_MEMORY,
    make_budget,
    make_config,
    make_failure,
    make_measurement,
    make_plan,
    make_request,
    make_result,
    make_workload,
)

from autotune.errors import InfrastructureError, InputError, NothingFitsError
from autotune.tuning_result import with_methods
from autotune.units import GIB
from autotune.values.conditions import Conditions
from autotune.values.config import Allowance
from autotune.values.problem import Objective
from autotune.values.trial import Memory, Phases, TrialResult, TrialStatus
from autotune.values.workload import OwnCode
from autotune.verification.remarks import disturbance_notes, nothing_found


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
    finals.append(trial(9, times=(10.4, 10.5, 10.3)))
    (line,) = disturbance_notes(finals, finals)
    assert "drifted by a factor of 10.4 between trials of the baseline (5, 7 and 9)" in line


def test_a_trial_that_was_faster_than_the_answer_is_explained_by_its_finals():
    result = answer([(BASE, 10.0), (BIG, 20.0), (BF16, 19.0)], [(BASE, 10.0), (BIG, 15.0), (BF16, 17.0)] * 2)
    assert result.best.config == BF16
    assert result.outshone == (
        "trial 1 (micro-batch 16) gave 20 samples/s in the search, more than the winner: "
        "measured again in turn it gave 15"
    )
    assert f"note: {result.outshone}" in " ".join(str(with_methods(result)).split())


def test_so_is_one_that_can_not_be_told_from_a_simpler_answer():
    result = answer([(BASE, 10.0), (BIG, noisy(12.0))], [(BASE, noisy(10.0)), (BIG, noisy(10.5))] * 2)
    assert result.best.config == BASE
    assert result.outshone == (
        "micro-batch 16 gave about 10 samples/s in the finals, not clearly more than your baseline, which changes less"
    )


def test_so_is_one_that_was_not_measured_again():
    searched = [(BASE, 10.0), (BIG, 20.0), (BF16, 19.8)]
    result = answer(searched, [(BASE, 10.0), (BIG, 19.0)] * 2, budget=make_budget(finalists=1))
    assert result.outshone == (
        "trial 2 (micro-batch 16, precision bf16) gave 19.8 samples/s in the search, more than the winner: "
        "the fastest of the search is measured again (--effort quick)"
    )


def test_so_is_one_that_there_was_no_time_for_or_that_failed():
    searched = [(BASE, 10.0), (BIG, 20.0), (BF16, 19.9)]
    assert answer(searched, [(BASE, 10.0), (BF16, 18.0)]).outshone.endswith("no time to measure it again")
    failed = [(BASE, 10.0), (BIG, OUT_OF_MEMORY), (BF16, 18.0), (BASE, 10.0), (BF16, 18.0)]
    assert answer(searched, failed).outshone.endswith("it failed when it was measured again")


def test_so_is_one_whose_start_is_not_won_back():
    trials = [(BASE, compiled(10.0, 0.0)), (COMPILED, compiled(15.0, 40.0))]
    result = answer(trials, trials * 2, objective=Objective(run_samples=160.0))
    assert result.best.config == BASE
    assert result.outshone.endswith("what it takes at the start isn't won back in a run of this length")


def refused(trials: Trials, **fields) -> Exception:
    results = [make_result(config, outcome, number=n) for n, (config, outcome) in enumerate(trials)]
    return nothing_found(make_plan(baseline=BASE, memory_bytes=2 * GIB, **fields), results, "runs/x")


def test_nothing_fits_names_the_closest_miss_and_what_would_help():
    seen = make_failure(TrialStatus.OUT_OF_MEMORY, memory=Memory(resident_bytes=GIB))
    error = refused([(BASE, OUT_OF_MEMORY), (make_config(1, checkpointing="full"), seen)], allowance=Allowance.EXACT)
    assert isinstance(error, NothingFitsError)
    assert str(error) == (
        "nothing fits 2.00 GiB: the closest, micro-batch 1, checkpointing full, still ran out "
        "(it had reached 1.00 GiB); what could make it fit: --allow method (LoRA, pure bf16), a larger --memory, "
        "a shorter --seq-len"
    )


def test_what_the_users_code_raised_is_no_fault_of_the_machine():
    code = OwnCode(kind="script", shown="train.py", command=("train.py",), directory="/")
    raised, killed = make_failure(cause="ValueError: no loss", phases=Phases()), make_failure(cause="killed by SIGKILL")
    own = {"workload": make_workload(own_code=code)}
    assert isinstance(refused([(BASE, raised), (BIG, raised)], **own), InputError)
    assert isinstance(refused([(BASE, raised), (BIG, killed)], **own), InfrastructureError)
    assert isinstance(refused([(BASE, raised)]), InfrastructureError), "a named model has no code of the user's"


def test_one_lack_of_memory_among_crashes_is_nothing_fits():
    assert isinstance(refused([(BASE, CRASHED), (BIG, OUT_OF_MEMORY), (BF16, CRASHED)]), NothingFitsError)


@pytest.mark.parametrize("status", [TrialStatus.CRASHED, TrialStatus.TIMED_OUT, TrialStatus.INVALID])
def test_failures_of_another_kind_name_the_first_and_its_log(status):
    error = refused([(BASE, make_failure(status, "it broke")), (BIG, make_failure(status, "again"))])
    assert isinstance(error, InfrastructureError)
    assert f"no trial completed; trial 0 {status}: it broke (its log: runs/x/trials/0000/log.txt)" in str(error)
    assert ("a shorter --seq-len" in str(error)) is (status is TrialStatus.TIMED_OUT)
