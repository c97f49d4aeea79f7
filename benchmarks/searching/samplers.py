"""Samplers for a search of a table: autotune's and Optuna's."""

from __future__ import annotations

import warnings
from dataclasses import replace

import optuna
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from searching.tables import Table

from autotune.cost.model import CostModel
from autotune.planning.plan import SearchPlan
from autotune.search.cost_model import model_by_data_sheet
from autotune.search.sampler import CostModelSampler

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
