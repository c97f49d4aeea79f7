"""Chooses trials by the cost model: what to refuse without a trial, what to try next, and when to stop.

The next trial is the untried configuration with the largest expected improvement over the leader, times its chance to
fit. Before a trial has completed, it is the one with the highest predicted throughput, with a bonus for an uncertain
prediction. Each measurement corrects the model before the next choice. The search ends when no untried configuration
has a chance of at least `WORTHWHILE_CHANCE` to be faster by `WORTHWHILE_GAIN`.
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

# Configurations that are ranked and traced; of a larger space the first ones are.
_MOST_CONFIGS = 20_000

# Standard deviations that are added to a predicted rate before the first trial has completed.
_CURIOSITY = 0.5

# A smaller gain is lost in the noise; a configuration with a smaller chance of that gain is not worth a trial.
WORTHWHILE_GAIN = 1.01
WORTHWHILE_CHANCE = 0.05

# Exponent of the chance to fit: a trial that runs out of memory is lost, and says little about other configurations.
_CAUTION = 2

# The least chance to fit with which a configuration is tried: after a trial has completed, and before.
_FAIR_FIT = 0.5
_LEAST_FIT = 0.1

# Assumed time of a cold compile. Inductor took 20 to 79 s for small models on two cores; larger models on a GPU take
# minutes.
_COMPILE_S = 60.0

# Trials after the baseline that run whatever their chances, so that predictions alone never end a search.
LEAST_TRIALS = 2


def configs_of(space: SearchSpace) -> list[TrainConfig]:
    """Return the legal configurations of a space, each once; of a large space the first 20,000 points."""
    return list(dict.fromkeys(map(space.config, itertools.islice(space.points(), _MOST_CONFIGS))))


class Guide:
    """The cost model of one search, and its predictions for all configurations of the space."""

    def __init__(self, model: CostModel, plan: SearchPlan, space: SearchSpace) -> None:
        self._model = model
        self._budget_bytes = plan.memory_bytes
        self._host_bytes = plan.hardware.host_memory_bytes
        self._run_samples = plan.objective.run_samples
        self._configs = configs_of(space)

    @functools.cached_property
    def _predicted(self) -> Predictions:
        """The current predictions for all configurations."""
        return self._model.predict(self._configs)

    @functools.cached_property
    def _rates(self) -> Vector:
        return self._over_the_run(self._predicted.samples_per_second, self._configs)

    @functools.cached_property
    def _fits(self) -> Vector:
        return self._predicted.chance_to_fit(self._budget_bytes)

    def _over_the_run(self, rates: Vector, configs: Sequence[TrainConfig]) -> Vector:
        """Return rates that include the time of compiling, if the objective is the time of a run of given length."""
        if self._run_samples is None:
            return rates
        compiled = [config.torch_compile_backend == "inductor" for config in configs]
        slowed: Vector = 1.0 / (1.0 / rates + np.array(compiled) * _COMPILE_S / self._run_samples)
        return slowed

    @property
    def knows_all(self) -> bool:
        """Whether every configuration has a prediction."""
        return not bool(np.isnan(self._rates).any())

    def observe(self, *results: TrialResult) -> None:
        """Correct the model by finished trials, of this search or recorded ones."""
        learned = self._model.observe(*results)
        if learned is not self._model:
            self._model = learned
            for outdated in ("_predicted", "_rates", "_fits"):
                self.__dict__.pop(outdated, None)

    def assuming(self, results: Sequence[TrialResult]) -> Guide:
        """Return a copy of this guide that has also learned from `results`."""
        other = copy.copy(self)
        other.observe(*results)
        return other

    def prediction(self, config: TrainConfig) -> Prediction | None:
        """Return the current prediction for a configuration; None if there is none."""
        estimate = self._model.estimate(config)
        if estimate is None:
            return None
        return Prediction(
            samples_per_second=estimate.samples_per_second, peak_bytes=max(0, estimate.memory.device_peak_bytes)
        )

    def refusal(self, config: TrainConfig) -> str | None:
        """Return the reason why a configuration surely exceeds the memory of device or host, or None."""
        host = self._model.host_bytes(config) * config.parallelism.world_size
        if host > self._host_bytes:
            there = show_memory(self._host_bytes)
            return f"offload is predicted to take {show_memory(int(host))} of the host's memory; it has {there}"
        least = float(self._model.predict([config]).least_bytes[0])
        if least <= self._budget_bytes or math.isnan(least):
            return None
        return f"predicted to need at least {show_memory(int(least))}; the budget is {show_memory(self._budget_bytes)}"

    @functools.cached_property
    def lightest(self) -> TrainConfig | None:
        """The configuration with the least predicted memory; None if none is predicted to fit."""
        needed = self._predicted.needed_bytes
        if not (needed <= self._budget_bytes).any():
            return None
        return self._configs[int(np.nanargmin(needed))]

    def count_beyond_memory(self) -> int:
        """Return the number of configurations that surely exceed the memory of the device."""
        return int((self._predicted.least_bytes > self._budget_bytes).sum())

    def next(
        self, history: History, is_open: Callable[[TrainConfig], bool], *, recalled: int = 0
    ) -> TrainConfig | None:
        """Return the configuration to try next, of those that are open; None if none is worth a trial.

        So many `recalled` trials of earlier searches count as run.
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
        """Return for each configuration the worth of a trial, and the chance that it beats the leader by 1 %.

        With a leader, the worth is the expected improvement of the logarithm of the rate (Jones and others, "Efficient
        global optimization of expensive black-box functions", 1998). The leader's rate is the one that the model
        predicts after learning from its measurement, as the highest of many measurements is biased upwards. Without a
        leader, the worth is the optimistic throughput. Either is weighed with the chance to fit.
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
        """Return the fastest completed configuration by the corrected model, and its rate.

        If the best by measurement has no prediction, its measured rate is returned with None for the configuration.
        """
        ranking = history.ranking()
        configs = [r.request.config for r in ranking]
        rates = self._over_the_run(self._model.predict(configs).samples_per_second, configs)
        if np.isnan(rates[0]):
            return None, history.rate(ranking[0])
        index = int(np.nanargmax(rates))
        return configs[index], float(rates[index])
