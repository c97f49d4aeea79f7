"""Optuna's samplers on a recorded table, and running its points in any order."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable

import optuna
from searching.oracle import Oracle, Replayed, Spent, Strategy

from autotune.planning.plan import SearchPlan
from autotune.space.space import Point
from autotune.values.recorded_table import Table

# A sampler that asks so often in a row for what is known already has nothing left to say.
_PATIENCE = 200

# What failed is told as this much of the worst that was seen, beside a constraint that it breaks.
_FAILED = 0.5


def in_any_order(table: Table, plan: SearchPlan) -> list[Replayed]:
    """Run every point, in an order drawn from the seed."""
    points = random.Random(plan.workload.seed).sample(table.points, len(table.points))
    oracle = Oracle(table, plan)
    with contextlib.suppress(Spent):
        for point in points:
            oracle.run(point.config)
    return oracle.trials


def sampled(sampler: Callable[[int], optuna.samplers.BaseSampler]) -> Strategy:
    """Return the strategy of a sampler, made from a seed; it starts at the baseline, as every search here."""

    def strategy(table: Table, plan: SearchPlan) -> list[Replayed]:
        oracle = Oracle(table, plan)
        with contextlib.suppress(Spent):
            _sample(sampler(plan.workload.seed), plan, oracle, len(table.points))
        return oracle.trials

    return strategy


def _sample(sampler: optuna.samplers.BaseSampler, plan: SearchPlan, oracle: Oracle, points: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = plan.search_space()
    study = optuna.create_study(direction="maximize", sampler=sampler)
    choices = {d.name: list(d.choices) for d in space.dimensions}
    study.enqueue_trial({name: value for name, value in space.point(plan.baseline).items() if name in choices})
    worst, idle = float("inf"), 0
    while idle < _PATIENCE and len(oracle.trials) < points:
        trial = study.ask()
        point: Point = {}
        for dimension in space.dimensions:
            if space.is_active(dimension, point):
                point[dimension.name] = trial.suggest_categorical(dimension.name, choices[dimension.name])
        config, before = space.config(point), len(oracle.trials)
        if not oracle.is_legal(config):
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            idle += 1
            continue
        rate = oracle.run(config)
        worst = min(worst, rate or worst)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            trial.set_constraint("memory", 1.0 if rate is None else -1.0)
        study.tell(trial, rate if rate is not None else _FAILED * (worst if worst < float("inf") else 1.0))
        idle = 0 if len(oracle.trials) > before else idle + 1


def tpe(seed: int) -> optuna.samplers.BaseSampler:
    """Return Optuna's default sampler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True)


def gaussian_process(seed: int) -> optuna.samplers.BaseSampler:
    """Return Optuna's Gaussian process; it needs scipy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.GPSampler(seed=seed, deterministic_objective=False)
