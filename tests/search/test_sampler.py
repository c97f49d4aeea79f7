"""The search as a sampler of its own study and of anyone's, with pruners or without."""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from factories import make_config, make_measurement, make_plan, make_result, make_space_file
from optuna.distributions import CategoricalDistribution
from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner
from optuna.trial import Trial, TrialState
from predicted_space import GB, SPACE, make_model_of
from searching.replay import ReplayRunner
from searching.tables import load_table, plan_of

from autotune.search.cost_model import model_by_data_sheet
from autotune.search.sampler import CostModelSampler
from autotune.search.tuner import Tuner
from autotune.storage.run_directory import RunDirectory
from autotune.units import GIB
from autotune.values.config import TrainConfig
from autotune.values.problem import ignore
from autotune.values.trial import Measurement, Memory, Purpose

BASE, BEST = make_config(), make_config(16, precision="bf16")
ROOMY = 100 << 30
TABLE = Path(__file__).parents[2] / "benchmarks" / "tables" / "llama-1m.jsonl"

Answer = Callable[[TrainConfig], Measurement | float | None]


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def study_of(sampler: CostModelSampler, **options) -> optuna.Study:
    return optuna.create_study(direction="maximize", sampler=sampler, **options)


def make_sampler(*, guided: bool = True, **plan) -> CostModelSampler:
    fields = {"space": SPACE, "memory_bytes": ROOMY, **plan}
    return CostModelSampler(make_plan(**fields), make_model_of() if guided else None)


def asked(sampler: CostModelSampler, study: optuna.Study) -> tuple[Trial, TrainConfig]:
    trial = study.ask()
    return trial, sampler.suggest(trial)


def plain_loop(sampler: CostModelSampler, answer: Answer, *, most: int = 100) -> list[TrainConfig]:
    """Ask and tell until the sampler is done, as anyone would; return what was tried. None: it ran out of memory."""
    study, tried = study_of(sampler), []
    while len(tried) < most and not sampler.is_done(study):
        trial, config = asked(sampler, study)
        rate = measured = answer(config)
        if isinstance(measured, Measurement):
            trial.set_constraint("memory", measured.memory.peak_bytes / sampler.state.plan.memory_bytes - 1)
            rate = measured.samples_per_second
        elif rate is None:
            trial.set_constraint("memory", 0.01)
        study.tell(trial, rate, state=TrialState.COMPLETE if rate is not None else TrialState.PRUNED)
        tried.append(config)
    return tried


def predicted(config: TrainConfig) -> float:
    return make_model_of().estimate(config).samples_per_second


def run(sampler: CostModelSampler, study: optuna.Study, trials: int) -> list[TrainConfig]:
    """Run trials that give what is predicted; return what was tried."""
    tried = []
    for _ in range(trials):
        trial, config = asked(sampler, study)
        study.tell(trial, predicted(config))
        tried.append(config)
    return tried


def test_a_plain_loop_finds_the_best_and_is_told_when_nothing_is_worth_a_trial():
    sampler = make_sampler()
    tried = plain_loop(sampler, predicted)
    assert max(tried, key=predicted) == BEST
    assert len(tried) == len(set(tried)) < 6
    assert re.search(r"left untried; \d+ more trials? (is|are) expected to gain 0\.\d% at most", sampler.conclusion)


def test_whoever_asks_although_it_is_done_gets_a_point_of_the_space():
    sampler = make_sampler()
    study = study_of(sampler)
    run(sampler, study, 8)
    assert sampler.is_done(study)


@pytest.mark.parametrize("guided", [True, False])
def test_a_study_that_is_loaded_is_learned_from(guided):
    first, again = make_sampler(guided=guided), make_sampler(guided=guided)
    study = study_of(first)
    known = run(first, study, 2)
    study.sampler = again
    assert asked(again, study)[1] not in known
    assert [r.request.config for r in again.state.history.results] == known


def test_what_ran_out_of_memory_makes_it_try_less():
    sampler = make_sampler(memory_bytes=19 * GB)
    tried = plain_loop(sampler, lambda config: None if config == BEST else predicted(config), most=3)
    assert tried[:2] == [BASE, BEST]
    assert tried[2].per_device_train_batch_size < 16


def test_without_a_model_every_point_is_tried_in_the_end():
    sampler = make_sampler(
        guided=False, space=make_space_file({"precision": ["fp32", "bf16"], "optim": ["adamw_torch", "adafactor"]})
    )
    tried = plain_loop(sampler, lambda config: 10.0)
    assert sorted(tried, key=str) == sorted(make_plan(space=sampler.space.file).every_config(), key=str)


def test_while_the_baseline_runs_nothing_is_proposed_that_nothing_is_known_of():
    sampler = make_sampler(guided=False)
    study = study_of(sampler)
    trial, _ = asked(sampler, study)
    assert sampler.is_done(study)
    study.tell(trial, 10.0)
    assert not sampler.is_done(study)


def test_running_trials_are_taken_to_give_what_is_predicted_and_nothing_is_learned_from_that():
    sampler = make_sampler()
    study = study_of(sampler)
    expected, running = sampler.prediction(BEST), []
    while not sampler.is_done(study):
        running.append(asked(sampler, study)[1])
    assert running[:2] == [BASE, BEST]
    assert len(set(running)) == len(running) < 8  # of twenty: what these are expected to reach leaves no other a chance
    assert sampler.prediction(BEST) == expected
    assert len(sampler.state.history.results) == 0


def test_until_a_step_is_seen_to_wait_for_data_they_are_loaded_as_by_the_baseline():
    parameters = {name: list(p.choices) for name, p in SPACE.parameters.items() if p.choices != "lattice"}
    space = make_space_file({**parameters, "per_device_train_batch_size": "lattice", "dataloader_num_workers": [0, 2]})
    sampler = make_sampler(space=space)
    assert len(sampler.space.loadings) == 2
    assert {config.dataloader_num_workers for config in sampler.foreseen(6)} == {0}


def test_a_whole_result_is_handed_over_and_learned_from_and_one_from_elsewhere_does_not_count_as_run():
    sampler = make_sampler()
    before = sampler.prediction(BEST)
    sampler.observe(make_result(BASE, predicted(BASE) / 3))
    assert sampler.prediction(BEST).samples_per_second < 0.6 * before.samples_per_second
    assert len(sampler.state.history.results) == 0
    study = study_of(sampler)
    trial, config = asked(sampler, study)
    measured = make_measurement(12.0, memory=Memory(resident_bytes=GIB))
    sampler.tell(study, trial, make_result(config, measured, number=7))
    (frozen,) = study.trials
    assert (frozen.state, frozen.value) == (TrialState.COMPLETE, 12.0)
    assert frozen.constraints["memory"] == pytest.approx(GIB / ROOMY - 1)
    assert sampler.state.history.known(BASE).request.number == 7
    assert sampler.prediction(BASE).samples_per_second == pytest.approx(12.0, rel=0.1)


def objective_of(sampler: CostModelSampler, *, pruned: TrainConfig | None = None) -> Callable[[optuna.Trial], float]:
    """Returns the predicted rate, step by step as a pruner sees it; prunes one configuration in any case."""

    def objective(trial: optuna.Trial) -> float:
        config = sampler.suggest(trial)
        for step in range(3):
            trial.report(predicted(config), step)
            if trial.should_prune() or config == pruned:
                raise optuna.TrialPruned
        return predicted(config)

    return objective


@pytest.mark.parametrize(
    ("pruner", "guided"),
    [
        (NopPruner(), True), (MedianPruner(n_startup_trials=1), True), (HyperbandPruner(max_resource=3), True),
        (MedianPruner(n_startup_trials=1), False),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_optimize_finds_the_best_whatever_the_pruner(pruner, guided):
    sampler = make_sampler(guided=guided)
    study = study_of(sampler, pruner=pruner)
    study.optimize(objective_of(sampler), n_trials=40, callbacks=[lambda *_: sampler.is_done(study) and study.stop()])
    assert len(study.trials) < 40
    assert study.best_value == predicted(BEST)


@pytest.mark.parametrize("guided", [True, False])
def test_a_pruned_trial_is_slow_and_rules_out_nothing_else(guided):
    sampler = make_sampler(guided=guided)
    study = study_of(sampler)
    study.optimize(objective_of(sampler, pruned=make_config(2)), n_trials=1)
    study.enqueue_trial({"per_device_train_batch_size": 2, "precision": "fp32"})
    study.optimize(objective_of(sampler, pruned=make_config(2)), n_trials=40)
    assert not sampler.state.history.shortages
    assert not any("ran out of it" in reason for reason in sampler.state.refused.values())
    assert study.best_value == predicted(BEST)


@pytest.mark.parametrize(
    ("value", "constraint", "has_failed"),
    [(10.0, "loss", False), (10.0, "memory", True), (float("inf"), "loss", True), (-1.0, "loss", True)],
)
def test_a_value_that_is_no_rate_is_a_failure_and_so_is_a_constraint_on_memory_alone(value, constraint, has_failed):
    sampler = make_sampler()
    study = study_of(sampler)
    trial, config = asked(sampler, study)
    trial.set_constraint(constraint, 0.5)
    study.tell(trial, value)
    sampler.learn(study)
    assert sampler.state.history.known(config).has_failed == has_failed


def test_a_trial_that_its_process_left_running_is_tried_again():
    sampler = make_sampler()
    study = study_of(sampler)
    of_space = {d.name: CategoricalDistribution(d.choices) for d in sampler.space.dimensions}
    dead = optuna.create_trial(value=1.0, params=sampler.space.choices_of(BASE), distributions=of_space)
    dead.state, dead.value, dead.datetime_complete = TrialState.RUNNING, None, None
    dead.datetime_start = datetime.datetime.now() - datetime.timedelta(days=1)
    study.add_trial(dead)
    assert sampler.suggest(study.ask()) == BASE
    assert sampler.suggest(study.ask()) != BASE


def test_a_study_that_minimises_is_refused_where_configurations_are_asked_for():
    study = optuna.create_study(direction="minimize", sampler=make_sampler())
    with pytest.raises(ValueError, match='direction="maximize"'):
        study.sampler.suggest(study.ask())


@pytest.mark.parametrize(
    ("seed", "most", "is_guided", "share"),
    [(2, 15, False, 0.8), *(pytest.param(seed, None, True, 0.9, marks=pytest.mark.slow) for seed in (0, 1))],
)
def test_a_plain_loop_tries_what_a_search_tries_on_a_recorded_table(tmp_path, seed, most, is_guided, share):
    table = load_table(TABLE)
    plan = plan_of(table, seed=seed, max_trials=most)
    model = model_by_data_sheet(plan) if is_guided else None
    runner, again, numbers = ReplayRunner(table, seed=seed), ReplayRunner(table, seed=seed), itertools.count()
    tuner = Tuner(plan, RunDirectory(tmp_path), runner, ignore, clock=lambda: runner.now_s, model=model)
    tuner.run()

    def measured(config: TrainConfig) -> Measurement | None:
        request = plan.request_of(config, Purpose.SEARCH, number=next(numbers), timeout_s=1e6)
        return again.run(request).measurement

    tried = plain_loop(CostModelSampler(plan, model), measured, most=plan.budget.max_trials + 1)
    assert tried == [r.request.config for r in tuner.study.sampler.state.history.results]
    assert len(tried) > 5
    rates = {point.config: point.samples_per_second or 0.0 for point in table.points}
    assert max(rates[config] for config in tried) > share * max(rates.values())
