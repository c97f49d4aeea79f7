"""A search's trials as studies for optuna-dashboard, in memory: what is done to them changes nothing of the search.

The study that a search keeps is made for its sampler; these are made to be looked at. There are two of the same trials:
one of the speed alone, and one of speed and memory, for which the dashboard draws the Pareto front.
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from autotune.config import TrainConfig
from autotune.objective import Objective
from autotune.search.space import Dimension, SearchSpace
from autotune.trial import Purpose, TrialResult, TrialStatus
from autotune.units import GIB

# Trials whose rates belong beside each other: checks train otherwise, and probes are of shallower models.
_SHOWN = (Purpose.BASELINE, Purpose.SEARCH, Purpose.FINAL)


class ShownStudy:
    """The trials of one search, for who draws them.

    Args:
        name: Of the study.
        space: What was searched; its parameters are the study's.
        objective: What was maximised.
        words: Says a configuration in words.
        about: What is told of the search.
    """

    def __init__(
        self,
        name: str,
        space: SearchSpace,
        *,
        objective: Objective,
        words: Callable[[TrainConfig], str],
        about: Mapping[str, str | float],
    ) -> None:
        self._space = space
        self._objective = objective
        self._words = words
        self._distributions = {d.name: _distribution(d) for d in space.dimensions}
        self._known: set[int] = set()
        self._storage = InMemoryStorage()
        rate = "samples/s" if objective.run_samples is None else "samples/s over the run"
        self._speed = self._made(name, {rate: "maximize"}, about)
        self._both = self._made(f"{name}: speed and memory", {rate: "maximize", "peak memory GiB": "minimize"}, about)

    def _made(
        self, name: str, metrics: Mapping[str, Literal["maximize", "minimize"]], about: Mapping[str, str | float]
    ) -> optuna.Study:
        """Return a new study with these metrics and their directions."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(study_name=name, storage=self._storage, directions=list(metrics.values()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # names of metrics
            study.set_metric_names(list(metrics))
        for attribute, told in about.items():
            study.set_user_attr(attribute, told)
        return study

    @property
    def storage(self) -> BaseStorage:
        """Where the studies are."""
        return self._storage

    def add(self, results: Iterable[TrialResult]) -> None:
        """Add the trials that aren't there yet."""
        for result in results:
            if result.request.number not in self._known and result.request.purpose in _SHOWN:
                self._known.add(result.request.number)
                self._speed.add_trial(self._trial(result, _state(result.status), self._rate(result)))
                both = [*self._rate(result), *_peak(result)]
                state = TrialState.COMPLETE if len(both) == 2 else TrialState.FAIL
                self._both.add_trial(self._trial(result, state, both if len(both) == 2 else []))

    def _rate(self, result: TrialResult) -> list[float]:
        return [self._objective.rate(result.measurement)] if result.measurement is not None else []

    def _trial(self, result: TrialResult, state: TrialState, values: list[float]) -> FrozenTrial:
        params = self._params(result.request.config)
        trial = optuna.create_trial(
            state=state,
            values=values or None,
            params=params,
            distributions={name: self._distributions[name] for name in params},
            user_attrs=self._attributes(result),
        )
        if result.began is not None:
            trial.datetime_start = datetime.datetime.fromtimestamp(result.began)
            trial.datetime_complete = datetime.datetime.fromtimestamp(result.began + result.duration_s)
        return trial

    def _params(self, config: TrainConfig) -> dict[str, Any]:
        """Return the parameters of `config`, but for values that the space hasn't."""
        whole = self._space.complete(self._space.point(config))
        choices = {d.name: d.choices for d in self._space.dimensions}
        return {name: value for name, value in whole.items() if value in choices[name]}

    def _attributes(self, result: TrialResult) -> dict[str, Any]:
        """Return what is told of a trial beside its value; numbers can be plotted."""
        measured, prediction = result.measurement, result.request.prediction
        peak = _peak(result)
        told = {
            "trial": result.request.number,
            "purpose": str(result.request.purpose),
            "status": str(result.status),
            "configuration": self._words(result.request.config),
            "peak memory GiB": peak[0] if peak else None,
            "tokens/s": measured.tokens_per_second if measured is not None else None,
            "predicted samples/s": prediction.samples_per_second if prediction is not None else None,
            "predicted peak GiB": _gib(prediction.peak_bytes) if prediction is not None else None,
            "seconds": round(result.duration_s, 1),
            "cause": result.outcome.cause if result.outcome.kind == "failure" else None,
        }
        return {name: value for name, value in told.items() if value is not None}


def _distribution(dimension: Dimension) -> BaseDistribution:
    """Return a scale of numbers where all choices are some, so that it is drawn as one; otherwise categories."""
    numbers = [choice for choice in dimension.choices if isinstance(choice, int) and not isinstance(choice, bool)]
    if len(numbers) == len(dimension.choices) > 1:
        return IntDistribution(min(numbers), max(numbers), log=min(numbers) > 0)
    return CategoricalDistribution(list(dimension.choices))


def _state(status: TrialStatus) -> TrialState:
    if status is TrialStatus.COMPLETED:
        return TrialState.COMPLETE
    return TrialState.PRUNED if status is TrialStatus.OUT_OF_MEMORY else TrialState.FAIL


def _peak(result: TrialResult) -> list[float]:
    """Return the peak in GiB, if it is known."""
    memory = result.outcome.memory
    return [_gib(memory.peak_bytes)] if memory is not None and memory.is_known else []


def _gib(size: float) -> float:
    return round(size / GIB, 3)
