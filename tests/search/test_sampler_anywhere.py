"""The sampler in studies that aren't of autotune: Optuna's own tests of samplers, pruners, and others' trials."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial

import optuna
import pytest
from factories import make_config, make_plan
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner
from optuna.testing.pytest_samplers import BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase
from optuna.trial import TrialState
from predicted_space import SPACE, make_model_of

from autotune.search.sampler import CostModelSampler
from autotune.values.config import TrainConfig

BASE, BEST = make_config(), make_config(16, precision="bf16")
ROOMY = 100 << 30


def make_sampler(*, guided: bool = True) -> CostModelSampler:
    plan = make_plan(space=SPACE, memory_bytes=ROOMY)
    return CostModelSampler(plan, make_model_of() if guided else None)


def make_study(sampler: CostModelSampler, **options) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="maximize", sampler=sampler, **options)


def predicted(config: TrainConfig) -> float:
    return make_model_of().estimate(config).samples_per_second


class OptunasTests(BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase):
    pass


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
class TestGuided(OptunasTests):
    @pytest.fixture
    def sampler(self) -> Callable[[], CostModelSampler]:
        return make_sampler


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
class TestUnguided(OptunasTests):
    @pytest.fixture
    def sampler(self) -> Callable[[], CostModelSampler]:
        return partial(make_sampler, guided=False)


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


@pytest.mark.parametrize("pruner", [NopPruner(), MedianPruner(n_startup_trials=1), HyperbandPruner(max_resource=3)])
@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_optimize_stops_by_itself_whatever_the_pruner(pruner, guided):
    sampler = make_sampler(guided=guided)
    study = make_study(sampler, pruner=pruner)
    study.optimize(objective_of(sampler), n_trials=40)
    assert len(study.trials) < 40
    assert study.best_value == predicted(BEST)


@pytest.mark.parametrize("guided", [True, False])
def test_a_pruned_trial_is_slow_and_rules_out_nothing_else(guided):
    sampler = make_sampler(guided=guided)
    study = make_study(sampler)
    study.optimize(objective_of(sampler, pruned=make_config(2)), n_trials=1)
    study.enqueue_trial({"per_device_train_batch_size": 2, "precision": "fp32"})
    study.optimize(objective_of(sampler, pruned=make_config(2)), n_trials=40)
    assert not sampler.state.history.memory_bound
    assert not any("ran out of it" in reason for reason in sampler.state.refused.values())
    assert study.best_value == predicted(BEST)


def test_a_constraint_of_another_name_says_nothing_of_memory():
    sampler = make_sampler()
    study = make_study(sampler)
    trial = study.ask()
    config = sampler.suggest(trial)
    trial.set_constraint("loss", 0.5)
    study.tell(trial, predicted(config))
    sampler.learn(study)
    assert sampler.state.history.best().request.config == config


@pytest.mark.parametrize(
    ("params", "distributions"),
    [
        ({"precision": "fp64"}, {"precision": CategoricalDistribution(["fp64", "fp32"])}),
        ({"per_device_train_batch_size": 3}, {"per_device_train_batch_size": IntDistribution(1, 64)}),
    ],
)
@pytest.mark.parametrize("guided", [True, False])
def test_trials_with_values_of_another_space_are_passed_over(params, distributions, guided):
    sampler = make_sampler(guided=guided)
    study = make_study(sampler)
    others = optuna.create_trial(value=1e9, params=params, distributions=distributions)
    for _ in range(8):
        study.add_trial(others)
    sampler.learn(study)
    assert len(sampler.state.history) == 0
    assert not sampler.is_done(study)
    point = sampler.sample_relative(study, others, sampler.infer_relative_search_space(study, others))
    assert sampler.space.config(point) == BASE


@pytest.mark.parametrize("value", [float("inf"), -1.0])
def test_a_value_that_is_no_rate_is_a_failure(value):
    sampler = make_sampler()
    study = make_study(sampler)
    trial = study.ask()
    config = sampler.suggest(trial)
    study.tell(trial, value)
    sampler.learn(study)
    assert sampler.state.history.known(config).has_failed


def test_one_sampler_serves_two_studies():
    sampler = make_sampler()
    first, second = make_study(sampler), make_study(sampler)
    first.optimize(objective_of(sampler), n_trials=40)
    second.optimize(objective_of(sampler), n_trials=40)
    assert second.trials[0].params == first.trials[0].params
    assert second.best_params == first.best_params
    assert sampler.is_done(first)


def test_a_trial_that_its_process_left_running_is_tried_again():
    sampler = make_sampler()
    study = make_study(sampler)
    point = {d.name: d.choices[0] for d in sampler.space.dimensions} | sampler.space.choices_of(BASE)
    dead = optuna.create_trial(
        state=TrialState.COMPLETE,
        value=1.0,
        params=point,
        distributions={d.name: CategoricalDistribution(d.choices) for d in sampler.space.dimensions},
    )
    dead.state, dead.value, dead.datetime_complete = TrialState.RUNNING, None, None
    dead.datetime_start = datetime.datetime.now() - datetime.timedelta(days=1)
    study.add_trial(dead)
    assert sampler.suggest(study.ask()) == BASE
    assert sampler.suggest(study.ask()) != BASE


def test_a_study_that_minimises_is_refused_where_configurations_are_asked_for():
    study = optuna.create_study(direction="minimize", sampler=make_sampler())
    with pytest.raises(ValueError, match='direction="maximize"'):
        study.sampler.suggest(study.ask())
