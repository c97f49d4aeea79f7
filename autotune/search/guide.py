"""Leads a search by the cost model: what to refuse without a trial, what to try next, when to stop.

The next trial is the untried configuration with the largest expected improvement over the leader, weighed with its
chance to fit; before anything has completed, the one with the highest predicted throughput, a little in favour of those
that the model is unsure of. Each measurement corrects the model before the next choice. The search is over when no
untried configuration has a fair chance of a gain that would show.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.cost.model import CostModel
from autotune.cost.predictions import Predictions, below, density
from autotune.planning.plan import SearchPlan
from autotune.space.history import History
from autotune.space.space import SearchSpace
from autotune.units import show_memory
from autotune.values.config import TrainConfig
from autotune.values.trial import Prediction, TrialResult

Vector = NDArray[np.float64]

# Configurations that are ranked and traced; of a larger space, those that come first.
_MOST_CONFIGS = 20_000

# Standard deviations by which a prediction counts for more than it says: what is unknown is worth a trial.
_CURIOSITY = 0.5

# A gain below this doesn't show over the noise; a chance of it below that isn't worth a trial.
WORTHWHILE_GAIN = 1.01
WORTHWHILE_CHANCE = 0.05

# What may not fit has to promise more: a trial that runs out of memory is lost, and says little of the others. Once
# something has completed, what rather doesn't fit isn't tried; before, memory is hardly known and anything is welcome.
_CAUTION = 2
_FAIR_FIT = 0.5
_LEAST_FIT = 0.1

# A cold compile of small models took inductor 20 to 79 s on two cores; larger ones on a GPU take minutes.
_COMPILE_S = 60.0

# So many trials after the baseline are run whatever the chances: a prediction alone never ends a search.
LEAST_TRIALS = 2


def configs_of(space: SearchSpace) -> list[TrainConfig]:
    """Return the legal configurations of a space, each once; of a large one, those that come first."""
    return list(dict.fromkeys(map(space.config, itertools.islice(space.points(), _MOST_CONFIGS))))


class Guide:
    """The cost model of one search, with all configurations of its space.

    Args:
        model: What is known before the first trial.
        plan: The search.
        space: Its space.
    """

    def __init__(self, model: CostModel, plan: SearchPlan, space: SearchSpace) -> None:
        self._model = model
        self._budget_bytes = plan.memory_bytes
        self._host_bytes = plan.hardware.host_memory_bytes
        self._run_samples = plan.objective.run_samples
        self._configs = configs_of(space)

    @functools.cached_property
    def _predicted(self) -> Predictions:
        """What the model says now of all configurations."""
        return self._model.predict(self._configs)

    @functools.cached_property
    def _rates(self) -> Vector:
        return self._over_the_run(self._predicted.samples_per_second, self._configs)

    @functools.cached_property
    def _fits(self) -> Vector:
        return self._predicted.chance_to_fit(self._budget_bytes)

    def _over_the_run(self, rates: Vector, configs: Sequence[TrainConfig]) -> Vector:
        """Return the rates with the time of compiling spread over the run, where the objective knows its length."""
        if self._run_samples is None:
            return rates
        compiled = [config.torch_compile_backend == "inductor" for config in configs]
        slowed: Vector = 1.0 / (1.0 / rates + np.array(compiled) * _COMPILE_S / self._run_samples)
        return slowed

    @property
    def knows_all(self) -> bool:
        """Whether there is a prediction for every configuration."""
        return not bool(np.isnan(self._rates).any())

    def observe(self, *results: TrialResult) -> None:
        """Learn from finished trials, of this search or recorded ones."""
        learned = self._model.observe(*results)
        if learned is not self._model:
            self._model = learned
            for outdated in ("_predicted", "_rates", "_fits"):
                self.__dict__.pop(outdated, None)

    def assuming(self, results: Sequence[TrialResult]) -> Guide:
        """Return a guide that has learned from `results` too; this one stays as it is."""
        other = copy.copy(self)
        other.observe(*results)
        return other

    def prediction(self, config: TrainConfig) -> Prediction | None:
        """Return what is expected of a configuration now, None if nothing is known."""
        estimate = self._model.estimate(config)
        if estimate is None:
            return None
        return Prediction(
            samples_per_second=estimate.samples_per_second, peak_bytes=max(0, estimate.memory.device_peak_bytes)
        )

    def refusal(self, config: TrainConfig) -> str | None:
        """Return why a configuration surely doesn't fit, or None."""
        host = self._model.host_bytes(config) * config.parallelism.world_size
        if host > self._host_bytes:
            there = show_memory(self._host_bytes)
            return f"offload is predicted to take {show_memory(int(host))} of the host's memory; it has {there}"
        least = float(self._model.predict([config]).least_bytes[0])
        if least <= self._budget_bytes or math.isnan(least):
            return None
        return f"predicted to need at least {show_memory(int(least))}; the budget is {show_memory(self._budget_bytes)}"

    def next(
        self, history: History, is_open: Callable[[TrainConfig], bool], *, recalled: int = 0
    ) -> TrainConfig | None:
        """Return the configuration that is worth the next trial, None if none is.

        Args:
            history: The trials so far.
            is_open: Whether a configuration may still be tried.
            recalled: Trials of earlier searches that count as run.
        """
        scores, chances = self._worth(history)
        least_fit = _LEAST_FIT if history.best() is None else _FAIR_FIT
        least_chance = WORTHWHILE_CHANCE if len(history) + recalled > LEAST_TRIALS else 0.0
        for index in np.argsort(-np.nan_to_num(scores, nan=-1.0)).tolist():
            if math.isnan(self._rates[index]):
                return None
            if self._fits[index] < least_fit or self._fits[index] * chances[index] < least_chance:
                continue
            config: TrainConfig = self._configs[index]
            if is_open(config):
                return config
        return None

    def _worth(self, history: History) -> tuple[Vector, Vector]:
        """Return for each configuration what a trial of it is worth, and the chance that it is faster than the leader.

        With a leader, a trial is worth the improvement to be expected of it (Jones and others, "Efficient global
        optimization of expensive black-box functions", 1998); the leader counts for what model and measurement say
        together, since who is first of many is lucky, too. Without one, it is worth the throughput to be expected.
        """
        best, fits = history.best(), self._fits**_CAUTION
        if best is None:
            return fits * self._rates * np.exp(_CURIOSITY * self._predicted.log_deviation), np.ones(len(self._configs))
        leader, rate = self._leader(history)
        deviations = (
            self._predicted.log_deviation if leader is None else self._model.gain_deviations(self._configs, leader)
        )
        gains = np.log(self._rates / rate)
        improvement = gains * below(gains / deviations) + deviations * density(gains / deviations)
        return fits * improvement, below((gains - math.log(WORTHWHILE_GAIN)) / deviations)

    def _leader(self, history: History) -> tuple[TrainConfig | None, float]:
        """Return who is fastest by all that is known, and how fast; None for who, if nothing is predicted of it."""
        ranking = history.ranking()
        configs = [r.request.config for r in ranking]
        rates = self._over_the_run(self._model.predict(configs).samples_per_second, configs)
        if np.isnan(rates[0]):
            return None, history.rate(ranking[0])
        index = int(np.nanargmax(rates))
        return configs[index], float(rates[index])
