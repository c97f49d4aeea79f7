"""Samplers for a search of a table: autotune's, Optuna's, and other ways to tune as samplers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from searching.tables import Table

from autotune.cost.model import CostModel
from autotune.planning.plan import SearchPlan
from autotune.search.cost_model import model_by_data_sheet
from autotune.search.sampler import CostModelSampler
from autotune.storage.writer import TrialConverter
from autotune.values.config import TrainConfig

# Configurations one by one; it is sent the samples/s that each gave, None for what failed.
Script = Generator[TrainConfig, float | None, None]

# By table: what is traced is the same for every seed.
_MODELS: dict[tuple[str, str], CostModel] = {}


def model_of(table: Table, plan: SearchPlan) -> CostModel:
    """Return the cost model of a table, with the rates that a data sheet gives its device."""
    key = (table.header.date, table.header.workload.model.name)
    if key not in _MODELS:
        _MODELS[key] = model_by_data_sheet(plan)
    return replace(_MODELS[key], workload=plan.workload)


def autotune(table: Table, plan: SearchPlan) -> BaseSampler:
    """Return the sampler of `autotune find`, on a device that nothing has been learned of."""
    return CostModelSampler(plan, model_of(table, plan))


def unguided(table: Table, plan: SearchPlan) -> BaseSampler:
    """Return the same without the cost model."""
    return CostModelSampler(plan)


def tpe(table: Table, plan: SearchPlan) -> BaseSampler:
    """Return Optuna's default sampler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=plan.workload.seed, multivariate=True, group=True)


def gaussian_process(table: Table, plan: SearchPlan) -> BaseSampler:
    """Return Optuna's Gaussian process; it needs scipy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return GPSampler(seed=plan.workload.seed, deterministic_objective=False)


def in_any_order(table: Table, plan: SearchPlan) -> BaseSampler:
    """Return a sampler of every point, in an order drawn from the seed."""

    def every(plan: SearchPlan) -> Script:
        for point in random.Random(plan.workload.seed).sample(table.points, len(table.points)):
            yield point.config

    return Scripted(plan, every(plan))


class Scripted(BaseSampler):
    """A way to tune as a sampler: proposes what its script yields, and is done when that ends."""

    def __init__(self, plan: SearchPlan, script: Script) -> None:
        self._trials = TrialConverter(plan, plan.search_space)
        self._script = script
        self._next: TrainConfig | None = next(script, None)

    def is_done(self, study: Study) -> bool:
        """Whether the script has ended."""
        return self._next is None

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return all parameters."""
        return dict(self._trials.distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the configuration that the script waits for."""
        assert self._next is not None, "the script has ended"
        return self._trials.params(self._next)

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        """Refuse: all parameters are the script's."""
        raise ValueError(f"{param_name} is not a parameter of the space")

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Send the script what its configuration gave."""
        failed = state is not TrialState.COMPLETE or any(value > 0 for value in trial.constraints.values())
        try:
            self._next = self._script.send(None if failed or values is None else values[0])
        except StopIteration:
            self._next = None
