"""What is told beside an answer: disturbances, faster trials; and what is said when nothing completed."""

import pytest
from answers import BASE, BF16, BIG, COMPILED, Trials, answer, compiled, noisy
from factories import (
    CRASHED,
    OUT_OF_MEMORY,
    make_config,
    make_failure,
    make_measurement,
    make_plan,
    make_result,
    make_workload,
)

from autotune.errors import InfrastructureError, InputError, NothingFitsError
from autotune.planning.plan import SearchState
from autotune.tuning_result import with_methods
from autotune.units import GIB
from autotune.values.conditions import Conditions
from autotune.values.config import Allowance
from autotune.values.problem import Objective
from autotune.values.trial import Memory, Phases, Purpose, TrialStatus
from autotune.values.workload import OwnCode
from autotune.verification.finals import Finals
from autotune.verification.verdict import disturbance, nothing_found, plain_notes

STEADY = (1.0, 1.01, 0.99)
SLOWER = (1.12, 1.13, 1.11)


@pytest.mark.parametrize(
    ("trials", "said"),
    [
        ([(STEADY, None)], None),
        ([(STEADY, Conditions(others_share=0.01, stolen_share=0.0))] * 3, None),
        (
            [(STEADY, Conditions(others_share=s)) for s in (0.02, 0.6, 0.3)],
            "other processes took 60% of the cores' time",
        ),
        ([(STEADY, Conditions(stolen_share=0.1, throttled={"heat": 0.5}))], "the GPU was slowed down by heat"),
        ([(STEADY, Conditions(throttled={"power cap": 1.0}))] * 3, None),
        ([(STEADY, None), (SLOWER, None)], "its speed drifted by 12% between trials of the baseline"),
        ([(STEADY, Conditions(others_share=0.06)), (SLOWER, None)], "its speed drifted by 12% between trials of the"),
    ],
    ids=["unknown", "quiet", "others", "heat", "power cap", "drift", "the worst"],
)
def test_a_disturbed_machine_is_told_once_with_the_worst_figure(trials, said):
    seen = [make_measurement(conditions=conditions).model_copy(update={"step_times_s": t}) for t, conditions in trials]
    results = [make_result(BASE, each, number=n, purpose=Purpose.FINAL) for n, each in enumerate(seen)]
    found = disturbance(Finals(SearchState(make_plan(baseline=BASE), results)))
    assert found is None if said is None else f"noise: the machine was disturbed: {said}" in found


def test_a_power_limit_is_told_once():
    seen = [Conditions(throttled={"power cap": share}) for share in (1.0, 0.9, 0.1)]
    measured = [make_measurement().model_copy(update={"conditions": conditions}) for conditions in seen]
    state = SearchState(make_plan(baseline=BASE), [make_result(BASE, m, number=n) for n, m in enumerate(measured)])
    assert sum("at its power limit in 2 of 3 trials" in note for note in plain_notes(state)) == 1


def test_a_gpu_whose_host_others_keep_busy_is_disturbed_as_far_as_it_waits():
    seen = make_measurement().model_copy(update={"conditions": Conditions(others_share=0.9, idle_share=0.01)})
    state = SearchState(make_plan(baseline=BASE), [make_result(BASE, seen)])
    assert disturbance(Finals(state)) is None


def test_a_trial_that_was_faster_than_the_answer_is_explained_by_its_finals():
    result = answer([(BASE, 10.0), (BIG, 20.0), (BF16, 19.0)], [(BASE, 10.0), (BIG, 15.0), (BF16, 17.0)] * 2)
    assert result.best.config == BF16
    assert result.outshone == (
        "trial 1 (micro-batch 16) gave 20 samples/s in the search, more than the winner: "
        "measured again in turn it gave 15"
    )
    assert f"note: {result.outshone}" in " ".join(str(with_methods(result)).split())


ENDINGS = {
    "not clearly more": (
        [(BASE, 10.0), (BIG, noisy(12.0))],
        [(BASE, noisy(10.0)), (BIG, noisy(10.5))] * 2,
        "in the search, more than your baseline: measured again in turn it gave about 10, not clearly more",
    ),
    "not measured again": (
        [(BASE, 10.0), (BIG, 20.0), (BF16, 19.8)],
        [(BASE, 10.0), (BF16, 18.0)],
        "more than the winner: it was not measured again, for which there is time for few",
    ),
    "failed": (
        [(BASE, 10.0), (BIG, 20.0), (BF16, 19.9)],
        [(BASE, 10.0), (BIG, OUT_OF_MEMORY), (BF16, 18.0), (BASE, 10.0), (BF16, 18.0)],
        "it failed when it was measured again or checked",
    ),
}


@pytest.mark.parametrize(("searched", "finals", "said"), ENDINGS.values(), ids=ENDINGS)
def test_so_is_one_of_which_the_finals_tell_less_or_nothing(searched, finals, said):
    assert answer(searched, finals).outshone.endswith(said)


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
