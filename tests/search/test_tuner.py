"""The conductor of a search, with trials that take no time: what it runs, when it ends, what survives."""

import itertools
from collections.abc import Callable

import pytest
from exporting import answer_of
from factories import (
    CRASHED,
    OUT_OF_MEMORY,
    SEPARABLE,
    Clock,
    legal_points,
    make_budget,
    make_config,
    make_facts,
    make_failure,
    make_hardware,
    make_measurement,
    make_plan,
    make_result,
    make_workload,
)
from factories import SEPARABLE_BEST as BEST
from factories import separable_rate as rate
from optuna.trial import TrialState
from profiles import MB, make_family, make_model, make_profile, make_work
from scripted_searches import Search

from autotune.errors import InfrastructureError, NothingFitsError, NothingPassedError
from autotune.exports.launch_files import gain_of_flags
from autotune.output.gather import gather
from autotune.output.table import device_lines, verdict_line
from autotune.planning.plan import SearchState
from autotune.search.candidates import SAME_FAILURES
from autotune.search.tuner import Pace, SearchInterrupted, leader_of
from autotune.space.file import load_space
from autotune.space.knobs import make_point
from autotune.space.space import History
from autotune.storage.run_directory import ANSWER_FILE, RunDirectory, read_result
from autotune.units import GIB
from autotune.values.budget import Budget, Effort, LossCurve, Soaked
from autotune.values.config import TrainConfig
from autotune.values.problem import Event, Objective, TrialEnded, TrialStarted
from autotune.values.trial import Measurement, Memory, Outcome, Purpose, TrialRequest, TrialStatus
from autotune.values.workload import FEW_MICRO_STEPS, OwnCode
from autotune.verification.checks import Check
from autotune.verification.finals import Finals
from autotune.verification.verdict import assemble

BASE = make_config()
SMALL, HALF = {"precision": ["fp32", "bf16"]}, make_config(precision="bf16")  # a space of two, and the second


@pytest.fixture
def search(tmp_path):
    """Return a function that makes the search of the test."""
    return lambda *args, **fields: Search(tmp_path, *args, **fields)


NUMBERS = {"parallelism.world_size": [1, 2, 4], "per_device_train_batch_size": [1, 2, 4, 8]}


@pytest.mark.parametrize(
    ("scales", "said", "most"),
    [
        ({1: 1.0, 2: 1.8, 4: 3.1}, "devices 4",
         "devices: 1: 40 samples/s, 40 each; 2: 72 samples/s, 36 each; 4: 124 samples/s, 31 each"),
        ({1: 1.0, 2: 0.7, 4: 0.5}, "; 2 devices are slower than 1; 4 devices are slower than 1",
         "1 of them has the most"),
    ],
)  # fmt: skip
def test_each_number_of_devices_is_tried_and_measured_again_and_the_answer_compares_them(search, scales, said, most):
    def measured(request):
        config = request.config  # a scripted step has 16 samples, half of this workload's
        return 2.5 * config.per_device_train_batch_size * scales[config.parallelism.world_size]

    hardware, workload = make_hardware(count=4), make_workload(global_batch_size=32)
    base, kept = make_config(4), {"hardware": hardware, "workload": workload}
    run = search(measured, NUMBERS, baseline=base, budget=make_budget(max_trials=8, finalists=1), **kept)
    result = run.run()
    again = {r.config.parallelism.world_size for r in run.finished if r.purpose is Purpose.FINAL}
    assert again == {1, 2, 4}
    assert said in verdict_line(result)
    assert most in device_lines(result)[0]


def test_the_winner_of_an_earlier_answer_is_tried_after_the_baseline_and_measured_again_however_slow(search):
    earlier = make_config(2, optim="adafactor")
    run = search(rate, earlier=answer_of(earlier), budget=make_budget(max_trials=6, finalists=1))
    result = run.run()
    assert [r.config for r in run.finished[:2]] == [run.plan.baseline, earlier]
    assert earlier in [r.config for r in run.finished if r.purpose is Purpose.FINAL]
    assert next(c for c in result.runners_up if c.config == earlier).confirmed
    assert result.best.config not in (earlier, run.plan.baseline)


def test_a_baseline_whose_states_alone_exceed_the_budget_is_not_run(search):
    # 2,000 million parameters: AdamW takes 29.8 GiB for them, Adafactor 14.9 GiB.
    run = search(lambda request: 10.0, facts=make_facts(parameters=2 * 10**9), memory_bytes=20 * GIB)
    result = run.run()
    assert {r.config.optim for r in run.runner.requests if r.config.precision != "pure_bf16"} == {"adafactor"}
    assert BASE not in [r.config for r in run.runner.requests]
    (baseline,) = [r for r in run.results if r.request.purpose is Purpose.BASELINE]
    assert baseline.status is TrialStatus.OUT_OF_MEMORY
    assert "not run: weights, gradients and optimizer states alone take 29.80 GiB" in baseline.outcome.cause
    assert result.best.config != BASE
    assert result.speedup is None


def test_experts_and_the_users_own_training_are_not_refused_by_arithmetic(search):
    run = search(lambda request: 10.0, facts=make_facts(parameters=2 * 10**9, experts=8), memory_bytes=20 * GIB)
    run.run()
    assert run.runner.requests[0].config == BASE


def only(*configs: TrainConfig) -> Callable[[TrialRequest], Outcome | float]:
    """Every trial crashes, each of a cause of its own, but those of `configs`."""

    def outcome(request: TrialRequest) -> Outcome | float:
        return 10.0 if request.config in configs else make_failure(cause=f"trial {request.number} broke")

    return outcome


@pytest.mark.parametrize(("parameters", "most", "trials"), [(None, 1, 1), (None, 4, 4), (SMALL, 12, 1)], ids=str)
def test_the_search_ends_at_its_number_of_trials_or_with_its_space(search, parameters, most, trials):
    run = search(rate, parameters, budget=make_budget(max_trials=most, finalists=1, final_rounds=2))
    result = run.run()
    assert run.count(Purpose.SEARCH) == trials
    assert run.count(Purpose.FINAL) == 4
    assert (result.untried or "").startswith(f"all {most} trials have run" if trials == most else "")
    assert (result.untried is None) == (trials < most)


@pytest.mark.slow
def test_a_combination_beyond_single_steps_is_the_samplers(search):
    """Each change alone is worse than the baseline, both together are the best."""

    def deceptive(request: TrialRequest) -> float:
        return (10.0, 9.0, 20.0)[(request.config.precision == "bf16") + (request.config.optim == "adafactor")]

    parameters = {"precision": ["fp32", "bf16"], "optim": ["adamw_torch_fused", "adafactor"]}
    result = search(deceptive, parameters, patience=60).run()
    assert result.best.config == make_config(precision="bf16", optim="adafactor")


def memory_bound(request: TrialRequest) -> Outcome | float:
    """Without checkpointing only a micro-batch of 2 fits; checkpointing costs a quarter."""
    config = request.config
    checkpointed = config.checkpointing == "full"
    if config.per_device_train_batch_size > (8 if checkpointed else 2):
        return OUT_OF_MEMORY
    return rate(request) * (0.75 if checkpointed else 1.0)


@pytest.mark.parametrize("outcome", [rate, memory_bound])
def test_every_legal_neighbour_of_the_winner_was_measured_or_ruled_out(search, outcome):
    budget = make_budget(max_trials=20)
    run = search(outcome, {**SEPARABLE, "checkpointing": ["none", "full"]}, budget=budget)
    result = run.run()
    space, history = run.plan.search_space, History()
    for finished in run.results:
        if finished.request.purpose is not Purpose.FINAL:
            history.add(finished)
    winner = history.best().request.config
    assert result.best.config == winner
    sizes = sorted(next(d.choices for d in space.dimensions if d.name == "per_device_train_batch_size"))
    here, neighbours = space.complete(make_point(winner)), 0
    for point in legal_points(space):
        different = [name for name in here if point[name] != here[name]]
        if len(different) != 1 or (different == ["checkpointing"] and not history.shortages):
            continue
        if different == ["per_device_train_batch_size"]:
            steps = [sizes.index(p["per_device_train_batch_size"]) for p in (here, point)]
            if abs(steps[0] - steps[1]) > 1:
                continue
        config = space.config(point)
        assert history.known(config) is not None or history.refusal(config) is not None
        neighbours += 1
    assert neighbours >= 6


@pytest.mark.parametrize("fits", [True, False])
def test_the_lightest_is_the_answer_if_it_alone_fits_and_if_not_nothing_does(search, fits):
    lightest = make_config(1, checkpointing="full", precision="pure_bf16", adapter={"kind": "lora"})
    run = search(lambda r: 10.0 if fits and r.config == lightest else OUT_OF_MEMORY, space=load_space("cpu"))
    if fits:
        assert run.run().best.config == lightest
        return
    with pytest.raises(NothingFitsError):
        run.run()
    assert run.finished[-1].config == lightest
    assert not (run.directory / ANSWER_FILE).exists()


@pytest.mark.parametrize(("told", "cause"), [(lambda request: CRASHED, "it broke"), (only(), "trial 0 broke")])
def test_crashes_of_one_cause_end_soon_and_of_many_too_and_blame_the_infrastructure(search, told, cause):
    run = search(told, space=load_space("cpu"))
    with pytest.raises(InfrastructureError, match=f"trial 0 crashed: {cause}"):
        run.run()
    if cause == "it broke":
        assert len(run.finished) == SAME_FAILURES
    else:
        assert SAME_FAILURES < len(run.finished) <= 1 + len(run.plan.search_space.dimensions)


@pytest.mark.parametrize(
    "survivor",
    [make_config(attn_implementation="eager"), make_config(precision="bf16"), make_config(optim="adamw_torch")],
    ids=["attention", "precision", "optimizer"],
)
def test_the_one_configuration_that_works_is_the_answer(search, survivor):
    result = search(only(survivor)).run()
    assert (result.verdict, result.best.config) == ("baseline_failed", survivor)
    assert result.baseline_cause == "crashed: trial 0 broke"


ADAPTERS = {
    "adapter": [None, "lora"],
    "adapter.rank": {"choices": [8, 64], "when": {"adapter": ["lora"]}},
    "precision": ["fp32", "bf16"],
}


def test_the_study_was_told_of_the_very_configurations_that_ran(search):
    def rank_matters(request: TrialRequest) -> float:
        adapter = request.config.adapter
        return 10.0 + (adapter.rank / 8 if adapter else 0) + 2 * (request.config.precision == "bf16")

    run = search(rank_matters, ADAPTERS)
    assert run.run().best.config.adapter.rank == 64
    space = run.plan.search_space
    told = [space.config(trial.params) for trial in run.study.trials if trial.state is TrialState.COMPLETE]
    assert told == [r.config for r in run.finished if r.purpose is not Purpose.FINAL]


@pytest.mark.parametrize(
    ("places", "stop_after"),
    [*((1, n) for n in (0, 1, 3, 6)), (4, 5), *(pytest.param(4, n, marks=pytest.mark.slow) for n in (0, 1, 12))],
)
def test_a_stopped_search_goes_on_without_running_anything_again(search, places, stop_after):
    run = search(rate, places=places)
    with pytest.raises(SearchInterrupted):
        run.run(stop_after=stop_after)
    before = {r.request.number: r for r in run.results}
    assert len(before) == stop_after
    result = run.run()
    again = {r.request.number: r for r in run.results}
    assert before.items() <= again.items()
    assert len(again) == len(run.results)
    explored = [r.config for r in run.finished if r.purpose.explores]
    assert len(set(explored)) == len(explored) == 13
    assert not {r.request.config for r in before.values()} & set(run.runner.searched)
    assert result.best.config == BEST


@pytest.mark.parametrize("excuse", ["device_failed", "crowded_out"])
def test_what_the_device_or_others_brought_down_is_run_again_when_the_search_goes_on(search, excuse):
    failure = make_failure(**{excuse: True})
    run = search(lambda request: failure if request.number == 1 else rate(request))
    with pytest.raises(SearchInterrupted):
        run.run(stop_after=3)
    brought_down = run.finished[1].config
    run.run()
    assert brought_down in run.runner.searched


@pytest.mark.parametrize("excuse", ["device_failed", "crowded_out"])
def test_a_final_that_others_brought_down_says_nothing_of_the_baseline_and_runs_again(search, excuse):
    failing = [make_failure(**{excuse: True})]

    def told(request: TrialRequest) -> Outcome | float:
        is_baselines = (request.purpose, request.config) == (Purpose.FINAL, BASE)
        return failing.pop() if failing and is_baselines else rate(request)

    run = search(told, SMALL, budget=make_budget(max_trials=3, finalists=1, final_rounds=1))
    result = run.run()
    assert (failing, result.verdict, result.baseline_cause) == ([], "unconfirmed", None)
    assert run.run().verdict == "faster"
    assert [r.config for r in run.runner.requests if r.purpose is Purpose.FINAL] == [BASE]


def all_alike(request: TrialRequest) -> Outcome:
    """Whatever differs from the baseline is twice as fast."""
    return make_measurement(20.0 if request.config != BASE else 10.0, startup_s=9.0, samples=4)


def test_finals_that_go_on_have_the_finalists_that_they_had(search):
    """There is time for one finalist of two that are near each other."""
    run = search(all_alike, budget=within(110.0, 60.0, max_trials=3, finalists=3, measure_time_s=4.0))
    with pytest.raises(SearchInterrupted):
        run.run(stop_after=4 + 3)
    assert run.run().verdict == "faster"
    again = [r.config for r in run.finished if r.purpose is Purpose.FINAL]
    assert (len(again), len(set(again))) == (4, 2)


def lose(run: Search, last: int) -> None:
    """Remove the last trials, as if the search had been killed before them."""
    for request in run.finished[-last:]:
        trial = run.directory / "trials" / f"{request.number:04d}"
        (trial / "result.json").unlink()
        trial.rmdir()


def given(run, **limits):
    """Give a search other limits, as its run directory has it then."""
    run.plan = run.plan.reopened(run.results, **limits)


def test_a_finished_search_that_is_given_more_trials_searches_on_and_has_finals_of_its_own(search):
    run = search(rate, budget=make_budget(max_trials=2, finalists=1, final_rounds=2))
    assert run.run().best.config != BEST
    given(run, max_trials=12)
    result = run.run()
    purposes = [r.purpose for r in run.runner.requests]
    assert purposes.count(Purpose.SEARCH) == 10
    assert purposes[-4:] == [Purpose.FINAL] * 4
    assert [r.config for r in run.runner.requests[-4:]].count(BASE) == 2
    assert result.best.config == BEST
    assert result.verdict == "faster"
    assert len(result.best.trials) == len(result.baseline.trials) == 3  # one of the search, two of the latest finals


def test_a_finished_search_that_finds_nothing_better_keeps_its_finals(search):
    run = search(rate, SMALL)
    first = run.run()
    assert first.best.confirmed
    given(run, max_trials=40)
    again = run.run()
    assert run.runner.requests == []
    assert again.best == first.best


def test_a_baseline_that_ended_at_a_shorter_limit_is_run_again_with_more_time(search):
    slow = make_failure(TrialStatus.TIMED_OUT)
    run = search(lambda request: 10.0 if request.limits.timeout_s > 120 else slow, budget=Budget.of(Effort.QUICK))
    with pytest.raises(InfrastructureError):
        run.run()
    given(run, effort=Effort.STANDARD)
    run.run()
    assert run.runner.requests[0].purpose is Purpose.BASELINE


def test_ctrl_c_writes_and_hands_over_the_best_so_far_if_there_is_one(search):
    run = search(rate)
    with pytest.raises(SearchInterrupted) as stop:
        run.run(stop_after=0)
    assert stop.value.result is None
    assert not stop.value.path.exists()
    with pytest.raises(SearchInterrupted) as stop:
        run.run(stop_after=5)
    rates = {r.config: rate(r) for r in run.finished}
    result = stop.value.result
    assert result.best.config == max(rates, key=rates.__getitem__)
    assert read_result(stop.value.path) == result
    assert str(run.directory) in str(stop.value)


def test_ctrl_c_in_the_finals_does_not_make_the_baseline_the_winner(search):
    """The baseline has been measured again, the leader not yet."""
    run = search(rate)
    run.run()
    lose(run, run.count(Purpose.FINAL) - 1)
    with pytest.raises(SearchInterrupted) as stop:
        run.run(stop_after=0)
    assert stop.value.result.verdict == "unconfirmed"
    assert stop.value.result.best.config == BEST


def test_the_answer_is_on_disk_after_every_trial_also_when_no_more_can_be_run(search):
    def dying(request: TrialRequest) -> float:
        if request.number == 18:  # the last of the finals
            raise InfrastructureError("the launcher is gone")
        return rate(request)

    run = search(dying)
    seen = []

    def look(event: Event) -> None:
        if isinstance(event, TrialStarted) and event.request.number > 0:
            seen.append(len([t for t in read_result(run.directory / ANSWER_FILE).trials if t.number is not None]))

    run.events = type("Listener", (), {"append": staticmethod(look)})()
    with pytest.raises(InfrastructureError, match="the launcher is gone"):
        run.run()
    assert seen == list(range(1, 19))
    assert read_result(run.directory / ANSWER_FILE).best.measurement is not None


def steady(request: TrialRequest) -> Outcome:
    """Of a final trial it is expected to take 13 to 20 s."""
    return make_measurement(rate(request), startup_s=9.0, first_step_s=1.0, samples=4)


def within(max_time_s: float, trial_timeout_s: float | None = None, **fields) -> Budget:
    limits = {"max_time_s": max_time_s, "trial_timeout_s": trial_timeout_s or max_time_s}
    return make_budget(**{"finalists": 1, "final_rounds": 2, **limits, **fields})


def test_a_baseline_beyond_the_usual_limit_takes_what_is_left_if_no_other_trial_could_follow(search):
    run = search(rate, duration_s=lambda request: 140.0, budget=within(160.0, 120.0))
    assert run.run().verdict == "unconfirmed"
    assert run.finished[0].limits.timeout_s > 140.0


@pytest.mark.parametrize(("max_time_s", "finalists"), [(300.0, 3), (150.0, 2), (110.0, 1)])
def test_as_many_finalists_are_measured_again_as_there_is_time_for(search, max_time_s, finalists):
    """Two rounds of each take 20 to 40 s; the three fastest are within a tenth of each other."""
    run = search(all_alike, budget=within(max_time_s, 60.0, max_trials=3, finalists=3, measure_time_s=4.0))
    assert run.run().verdict == "faster"
    again = {r.config for r in run.finished if r.purpose is Purpose.FINAL}
    assert len(again) == 1 + finalists
    assert run.count(Purpose.FINAL) == 2 * len(again)


@pytest.mark.parametrize("trial_s", [3.0, 10.0, 40.0, 1e6])
@pytest.mark.parametrize("starting_s", [0.0, 50.0, 150.0])
def test_the_seconds_before_the_first_trial_count_and_no_trial_outlasts_the_limit(search, trial_s, starting_s):
    budget, starting = within(200.0, max_trials=15), {"launching": starting_s}
    run = search(steady, duration_s=lambda request: trial_s, budget=budget, starting=starting)
    if trial_s > 200.0 - starting_s:
        with pytest.raises(InfrastructureError, match="no trial completed"):
            run.run()
    else:
        run.run()
    assert len(run.finished) >= 1
    assert starting_s + run.clock.now_s <= 200.0


def test_the_seconds_before_the_first_trial_of_all_parts_of_a_search_count(search):
    budget, starting = within(200.0, max_trials=3), {"launching": 20.0, "tracing": 5.0}
    first, again = (search(steady, budget=budget, starting=starting).run() for _ in range(2))
    assert first.spent.starting == starting
    assert again.spent.starting == {"launching": 40.0, "tracing": 10.0}


def test_a_trial_that_hangs_does_not_take_the_time_of_the_finals(search):
    def hangs_sometimes(request: TrialRequest) -> float:
        return 1e6 if request.config.precision == "pure_bf16" else 15.0

    precisions = {"precision": ["fp32", "bf16", "pure_bf16"]}
    run = search(steady, precisions, duration_s=hangs_sometimes, budget=within(200.0))
    result = run.run()
    assert any(t.status is TrialStatus.TIMED_OUT for t in result.trials)
    assert run.clock.now_s <= 200.0
    assert run.count(Purpose.FINAL) == 4


@pytest.mark.parametrize(("max_time_s", "searched", "finals"), [(110.0, 1, 2), (70.0, 1, 0), (45.0, 0, 0)])
def test_where_time_is_short_one_trial_comes_before_the_finals(search, max_time_s, searched, finals):
    """A trial takes 25 s; the baseline and one other twice each would take 100 s and more."""

    def slow(request: TrialRequest) -> Outcome:
        return make_measurement(rate(request), startup_s=15.0, first_step_s=2.0, samples=4)

    run = search(slow, duration_s=lambda request: 25.0, budget=within(max_time_s))
    run.run()
    assert (run.count(Purpose.SEARCH), run.count(Purpose.FINAL)) == (searched, finals)
    assert run.clock.now_s <= max_time_s


def test_a_final_that_there_is_no_time_for_is_not_begun(search):
    def slow_at_last(request: TrialRequest) -> float:
        return 150.0 if request.purpose is Purpose.FINAL else 10.0

    run = search(steady, SMALL, duration_s=slow_at_last, budget=within(300.0, 200.0))
    run.run()
    assert run.count(Purpose.FINAL) == 2
    assert run.clock.now_s <= 320.0


def test_time_that_was_spent_before_a_stop_counts(search):
    run = search(steady, budget=within(200.0, 100.0))
    with pytest.raises(SearchInterrupted):
        run.run(stop_after=6)
    run.clock = Clock()
    result = run.run()
    assert result.search_time_s <= 200.0
    assert result.search_time_s == pytest.approx(10.0 * len(run.finished))


def test_a_listener_hears_of_each_trial_before_and_after_it(search):
    run = search(rate, budget=make_budget(max_trials=4))
    run.run()
    heard = [e for e in run.events if isinstance(e, TrialStarted | TrialEnded)]
    assert [type(e) for e in heard] == [TrialStarted, TrialEnded] * len(run.finished)
    started, ended = heard[::2], heard[1::2]
    assert [e.request for e in started] == [e.result.request for e in ended]
    assert [e.trials_left for e in started[:5]] == [4, 4, 3, 2, 1]
    rates = [e.leader.samples_per_second for e in ended if e.result.request.purpose is not Purpose.FINAL]
    assert rates == sorted(rates)


SECOND = make_config(16, precision="bf16", optim="adamw_torch_fused")
PROVEN = {"soak": True, "loss_steps": 20, "loss_insisted": True, "budget": make_budget(finalists=1, max_trials=20)}


def checked(*, unfit: tuple[TrainConfig, ...] = (), diverging: tuple[TrainConfig, ...] = ()):
    """Throughputs as of `rate`; `unfit` configurations run out of memory when soaked, `diverging` learn otherwise."""

    def outcome(request: TrialRequest) -> Outcome | float:
        if request.purpose is Purpose.SOAK:
            soaked = Soaked(eval_batch_size=request.task.eval_batch_sizes[0], checkpoint_bytes=3 << 20)
            return OUT_OF_MEMORY if request.config in unfit else make_measurement(rate(request), soaked=soaked)
        if request.purpose is Purpose.LOSS_CHECK:
            fall = 0.8 if request.config in diverging else 0.5
            losses = tuple(6.0 - fall * step / request.task.steps for step in range(request.task.steps))
            return make_measurement(rate(request), curve=LossCurve(losses=losses, dropout_spread=0.0))
        return rate(request)

    return outcome


def checks_of(run: Search) -> list[tuple[Purpose, TrainConfig]]:
    return [(r.purpose, r.config) for r in run.finished if r.task is not None]


def test_the_winner_is_soaked_and_compared_after_the_finals(search):
    run = search(checked(), **PROVEN)
    result = run.run()
    comparison = [(Purpose.LOSS_CHECK, BASE), (Purpose.LOSS_CHECK, BASE), (Purpose.LOSS_CHECK, BEST)]
    profiles = [(Purpose.PROFILE, BEST), (Purpose.PROFILE, BASE)]
    assert checks_of(run) == [(Purpose.SOAK, BEST), *comparison, *profiles]
    assert all(r.purpose is Purpose.FINAL for r in run.finished[-10:-6])
    assert (result.verdict, result.best.config) == ("faster", BEST)
    assert result.loss_check.passed
    assert (result.soaked.eval_batch_size, result.soaked.checkpoint_bytes) == (128, 3 << 20)
    assert result.proof_notes == ()
    assert len(run.study.trials) == sum(r.purpose.explores for r in run.finished)  # which knows of no check


def test_where_all_fail_their_soak_nothing_is_handed_out(search):
    run = search(checked(unfit=(BASE, HALF)), SMALL, **PROVEN)
    with pytest.raises(NothingPassedError, match=r"precision bf16: soak, trial \d+: out of memory.*the baseline: soak"):
        run.run()
    assert not (run.directory / ANSWER_FILE).exists()
    RunDirectory(run.directory).write_plan(run.plan)
    assert gather(run.directory).nothing.startswith("nothing passed: ")


def test_finals_measure_more_finely_checks_run_all_their_steps_and_trials_of_the_search_race_the_leader(search):
    run = search(checked(), SMALL, **{**PROVEN, "workload": make_workload(global_batch_size=32)})
    run.run()
    best = 0.0
    for request in run.finished:
        full, purpose = run.plan.workload.accumulation_steps(request.config), request.purpose
        whole = purpose in (Purpose.FINAL, Purpose.LOSS_CHECK)
        assert request.accumulation_steps == (full if whole else min(full, FEW_MICRO_STEPS))
        if purpose is Purpose.LOSS_CHECK:
            assert request.limits.measure_steps == request.task.steps == 20
            assert request.limits.discarded_steps == 1
        races = 32 / (0.9 * best) if purpose is Purpose.SEARCH else None
        assert request.limits.beaten_step_s == pytest.approx(races)
        best = max(best, rate(request)) if purpose.explores else best
    searched, again = ({r.purpose: r.limits for r in run.finished}[p] for p in (Purpose.SEARCH, Purpose.FINAL))
    assert again.measure_steps > searched.measure_steps
    assert again.relative_interval < searched.relative_interval
    assert again.measure_time_s == searched.measure_time_s
    assert not any(r.cold_compile for r in run.finished)


def test_a_run_of_given_length_counts_compiling_anew_in_the_first_final_of_each(search):
    run = search(checked(), SMALL, objective=Objective(run_samples=1e6), **PROVEN)
    run.run()
    finals = [r.cold_compile for r in run.finished if r.purpose is Purpose.FINAL]
    assert finals == [True, True, False, False]
    assert not any(r.cold_compile for r in run.finished if r.purpose is not Purpose.FINAL)


@pytest.mark.parametrize("fault", ["unfit", "diverging"])
def test_a_winner_that_fails_a_check_is_refused_with_its_reason_and_the_next_is_measured_and_checked(search, fault):
    run = search(checked(**{fault: (BEST,)}), **PROVEN)
    result = run.run()
    assert (result.verdict, result.best.config) == ("faster", SECOND)
    assert result.loss_check.passed
    assert result.soaked is not None
    reason = {"unfit": "soak, trial", "diverging": "its losses leave the baseline's"}[fault]
    assert len(result.proof_notes) == 1
    assert result.proof_notes[0].startswith("refused as the winner: micro-batch 16, precision bf16")
    assert reason in result.proof_notes[0]
    assert BEST not in [c.config for c in (*result.runners_up, *result.best_by_allowance.values())]
    purpose = {"unfit": Purpose.SOAK, "diverging": Purpose.LOSS_CHECK}[fault]
    line = next(t for t in result.trials if t.config == BEST and t.purpose is purpose)
    assert line.cause
    assert line.status is {"unfit": TrialStatus.OUT_OF_MEMORY, "diverging": TrialStatus.INVALID}[fault]
    finals = [r.config for r in run.finished if r.purpose is Purpose.FINAL]
    assert finals.count(SECOND) == finals.count(BASE) == 2


def test_where_everything_diverges_the_baseline_is_the_answer(search):
    run = search(checked(diverging=(HALF,)), SMALL, **PROVEN)
    result = run.run()
    assert (result.verdict, result.best.config) == ("no_clear_winner", BASE)
    assert result.soaked is not None
    assert result.loss_check is None
    assert checks_of(run)[-2:] == [(Purpose.SOAK, BASE), (Purpose.PROFILE, BASE)]


@pytest.mark.parametrize("lost", [1, 2, 3, 4, 6])
def test_a_search_that_was_stopped_in_its_finals_or_checks_does_only_the_rest_of_them(search, lost):
    run = search(checked(), SMALL, **PROVEN)
    first = run.run()
    lose(run, lost)
    again = run.run()
    assert len(run.runner.requests) == lost
    assert (again.best, again.soaked, again.loss_check) == (first.best, first.soaked, first.loss_check)


def test_time_is_kept_for_the_checks(search):
    """A step of a loss run takes as long as one of the search: 20 of them 8 s and more, thrice."""

    def timed(request: TrialRequest) -> Outcome | float:
        outcome = checked()(request)
        return outcome if isinstance(outcome, Measurement) else steady(request)

    def duration_s(request: TrialRequest) -> float:
        return 15.0 if request.purpose is Purpose.LOSS_CHECK else 10.0

    run = search(timed, SMALL, duration_s=duration_s, **{**PROVEN, "budget": within(300.0, 100.0)})
    result = run.run()
    assert run.clock.now_s <= 300.0
    assert run.count(Purpose.SOAK) == 1
    assert run.count(Purpose.LOSS_CHECK) == 3
    assert result.loss_check.passed


def test_checks_that_there_is_no_time_for_are_not_begun_and_that_is_told(search):
    def duration_s(request: TrialRequest) -> float:
        return 60.0 if request.purpose is Purpose.FINAL else 10.0

    run = search(checked(), SMALL, duration_s=duration_s, **{**PROVEN, "budget": within(300.0, 200.0)})
    result = run.run()
    assert run.count(Purpose.LOSS_CHECK) < 3
    assert result.loss_check is None
    assert any("too little time was left, or the search was stopped" in note for note in result.proof_notes)


def test_what_can_not_be_measured_again_is_checked_all_the_same(search, monkeypatch):
    monkeypatch.setattr(Pace, "has_time_for", lambda pace, configs: False)
    run = search(checked(), SMALL, **{**PROVEN, "budget": within(300.0, 200.0)})
    result = run.run()
    assert (run.count(Purpose.FINAL), run.count(Purpose.SOAK)) == (0, 1)
    assert (result.verdict, result.soaked is not None) == ("unconfirmed", True)


def test_what_flags_alone_say_of_a_scripts_leader_is_measured_with_it(search):
    """Eager attention, which needs a line of code, is predicted and found to be eight times as fast as sdpa."""

    def profile_of(kernel: str, precision: str):
        autocast = "bfloat16" if precision == "bf16" else None
        work = make_work((10 if kernel == "eager" else 80) * MB, width=2 if precision == "bf16" else 4)
        return make_profile(make_family(autocast=autocast, attn_implementation=kernel), work=(work,))

    model = make_model([profile_of(*kind) for kind in itertools.product(("sdpa", "eager"), ("fp32", "bf16"))])
    own = OwnCode(kind="script", shown="python train.py", command=("train.py",), directory="/")
    knobs = {"attn_implementation": ["sdpa", "eager"], "precision": ["fp32", "bf16"]}
    plan = {"model": model, "workload": make_workload(own_code=own)}
    run = search(lambda request: model.estimate(request.config).samples_per_second, knobs, **plan)
    result = run.run()
    leader, flags_alone = make_config(attn_implementation="eager", precision="bf16"), make_config(precision="bf16")
    assert result.best.config == leader
    assert run.runner.searched[-1] == flags_alone
    finals = [r.config for r in run.runner.requests if r.purpose is Purpose.FINAL]
    assert {BASE, leader, flags_alone} <= set(finals)
    assert gain_of_flags(result).startswith("the flags alone have ")


# The leader that is told, and how long a trial may take.


def after(*trials, finals=(), **budget) -> Finals:
    """Return a search in which these trials and finals have ended."""
    plan = make_plan(baseline=BASE, budget=make_budget(**{"finalists": 1, "final_rounds": 2, **budget}))
    every = [*((*trial, Purpose.SEARCH) for trial in trials), *((*trial, Purpose.FINAL) for trial in finals)]
    return Finals(SearchState(plan, (make_result(c, r, purpose=p, number=n) for n, (c, r, p) in enumerate(every))))


LARGE, SMALLER = make_config(16), make_config(4)


@pytest.mark.parametrize(
    ("trials", "failed", "changed", "fastest", "speedup"),
    [
        ([(BASE, 10.0), (LARGE, 25.0), (SMALLER, 20.0)], [], "16", 25.0, 2.5),
        ([(BASE, OUT_OF_MEMORY), (LARGE, 25.0)], [], "16", 25.0, None),
        ([(BASE, 10.0), (SMALLER, 20.0), (LARGE, 25.0)], [(LARGE, OUT_OF_MEMORY)], "4", 20.0, 2.0),
    ],
    ids=["the fastest", "without a baseline", "without one that failed its final"],
)
def test_the_leader_is_the_fastest_of_the_search_beside_the_baseline(trials, failed, changed, fastest, speedup):
    leader = leader_of(after(*trials, finals=failed))
    assert [(c.knob, c.after) for c in leader.changes] == [("per_device_train_batch_size", changed)]
    assert (leader.samples_per_second, leader.speedup) == (fastest, speedup)
    assert leader_of(after((BASE, OUT_OF_MEMORY))) is None


def test_the_leader_is_revised_when_the_finals_put_it_lower():
    finals = after((BASE, 20.0), (LARGE, 80.0), finals=[(BASE, 21.0), (LARGE, 21.7)] * 2)
    answer = assemble(finals, 60.0)
    assert leader_of(finals).samples_per_second == answer.best.measurement.samples_per_second < 22.0


def test_a_soak_has_time_to_write_what_the_training_holds_to_a_slow_disk():
    large = make_measurement(memory=Memory(resident_bytes=30 * 10**9))
    pace = Pace(after((BASE, large), trial_timeout_s=100.0, max_time_s=3600.0), Clock())
    check = Check(BASE, Purpose.SOAK, None, 10.0)
    assert pace.timeout_s(BASE, Purpose.FINAL, check) == 100.0
    assert pace.timeout_s(BASE, Purpose.SOAK, check) == pytest.approx(400.0)
