"""The trials of a search so far, and which configurations they rule out without a cost model.

A configuration that ran out of memory rules out those that surely need as much. Other ways of loading data are ruled
out unless steps wait for data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autotune.values.config import TrainConfig
from autotune.values.problem import Objective
from autotune.values.techniques import keeps_less
from autotune.values.trial import TrialResult, TrialStatus

# For an optimizer, those whose states and temporaries are surely no larger; others are not compared.
_LIGHTER = {
    "adamw_torch": frozenset({"adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "adafactor"}),
    "adamw_torch_fused": frozenset({"adamw_bnb_8bit", "paged_adamw_8bit", "adafactor"}),
    "adamw_bnb_8bit": frozenset({"paged_adamw_8bit"}),
}

# Least share of a step spent waiting for data for which other ways of loading data are tried.
WORTHWHILE_DATA_WAIT = 0.02

# Knobs of data loading, which have no influence on device memory, with the values that replace them in comparisons.
LOADING = {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_pin_memory": False}


class History:
    """The finished trials of a search, by configuration; the objective is by default the rate of the steady state."""

    def __init__(self, objective: Objective | None = None) -> None:
        self._objective = objective or Objective()
        self._results: list[TrialResult] = []
        self._by_config: dict[TrainConfig, TrialResult] = {}
        self._shortages: list[TrialResult] = []
        self._ranking: list[TrialResult] | None = None

    def add(self, result: TrialResult) -> None:
        """Add a finished trial."""
        config = result.request.config
        self._results.append(result)
        self._by_config[config] = result
        self._ranking = None
        if result.status is TrialStatus.OUT_OF_MEMORY:
            self._shortages.append(result)

    def with_results(self, results: Iterable[TrialResult]) -> History:
        """Return a history that holds `results` too; this one stays as it is."""
        other = History(self._objective)
        for result in (*self._results, *results):
            other.add(result)
        return other

    def __len__(self) -> int:
        return len(self._results)

    @property
    def results(self) -> Sequence[TrialResult]:
        """All trials in the order they ended."""
        return self._results

    def known(self, config: TrainConfig) -> TrialResult | None:
        """Return the latest trial of `config`, if it has run."""
        return self._by_config.get(config)

    def best(self) -> TrialResult | None:
        """Return the completed trial with the highest throughput."""
        return next(iter(self.ranking()), None)

    def ranking(self) -> list[TrialResult]:
        """Return the latest completed trial of each configuration, the fastest first."""
        if self._ranking is None:
            completed = (r for r in self._by_config.values() if r.measurement)
            self._ranking = sorted(completed, key=self.rate, reverse=True)
        return self._ranking

    def rate(self, result: TrialResult) -> float:
        """Return the samples per second of a trial by the objective; 0 if it didn't complete."""
        return self._objective.rate(result.measurement) if result.measurement else 0.0

    @property
    def memory_bound(self) -> bool:
        """Whether any trial has run out of memory."""
        return bool(self._shortages)

    def refusal(self, config: TrainConfig) -> str | None:
        """Return why the trials rule `config` out, or None.

        A trial that was no harder on memory ran out of it, or another way of loading data isn't worth a trial.
        """
        for result in self._shortages:
            if is_no_harder(result.request.config, config):
                return f"trial {result.request.number}, no harder on memory, ran out of it"
        first, leader = next(iter(self._results), None), self.best()
        usual = [r.request.config for r in (first, leader) if r is not None]
        if not usual or any(_loading(config) == _loading(known) for known in usual):
            return None
        if leader is None or leader.measurement is None:
            return "nothing measured says that a step waits for its data"
        share = leader.measurement.data_wait_share
        if share is not None and share < WORTHWHILE_DATA_WAIT:
            return f"a step of the leader waits for data {share:.1%} of its time: loading them otherwise can't pay"
        if config.model_copy(update=_loading(leader.request.config)) != leader.request.config:
            return "another way of loading data is tried with the leader alone"
        return None


def _loading(config: TrainConfig) -> dict[str, Any]:
    return config.model_dump(include=set(LOADING))


def is_no_harder(easy: TrainConfig, hard: TrainConfig) -> bool:
    """Return whether `easy` surely needs no more memory than `hard`: a partial order, False where not comparable."""
    if easy.per_device_train_batch_size > hard.per_device_train_batch_size:
        return False
    if easy.checkpointing != hard.checkpointing and not keeps_less(easy.checkpointing, hard.checkpointing):
        return False
    if easy.optim != hard.optim and easy.optim not in _LIGHTER.get(hard.optim, frozenset()):
        return False
    if easy.is_balanced != hard.is_balanced:
        return False
    # Another order of the samples needs no other memory, as trials start with the longest in any case.
    rest = {"per_device_train_batch_size": 1, "checkpointing": "none", "optim": "", "tf32": False, **LOADING}
    rest["train_sampling_strategy"] = "random"
    return easy.model_copy(update=rest) == hard.model_copy(update=rest)
