"""What the trials so far say about a configuration that hasn't run: known, hopeless, or open.

Pure. Two things are inferred before any cost model: an easier configuration that ran out of memory rules out the
harder ones of its kind, and the micro-batch stops growing where throughput has stopped growing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autotune.values.config import TrainConfig
from autotune.values.problem import Objective
from autotune.values.techniques import keeps_less
from autotune.values.trial import TrialResult, TrialStatus

# Growing the micro-batch has to bring more than this, about the noise of a trial, to be carried on.
GROWTH_THRESHOLD = 1.01

# Optimizers whose states and temporaries are surely no larger, per optimizer; what isn't listed isn't compared.
_LIGHTER = {
    "adamw_torch": frozenset({"adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "adafactor"}),
    "adamw_torch_fused": frozenset({"adamw_bnb_8bit", "paged_adamw_8bit", "adafactor"}),
    "adamw_bnb_8bit": frozenset({"paged_adamw_8bit"}),
}

# Workers can only win back time that a step spends waiting for data.
WORTHWHILE_DATA_WAIT = 0.02

# Knobs of how data are loaded.
LOADING = {"dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory"}

# Knobs that don't move the device's memory: they don't make another kind.
_FREE_OF_MEMORY = {
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataloader_pin_memory": False,
    "train_sampling_strategy": "random",  # the longest samples come first whatever the sampler
}


class History:
    """The finished trials of a search, by configuration.

    Args:
        objective: What they are compared by; the steady state's throughput by default.
    """

    def __init__(self, objective: Objective | None = None) -> None:
        self._objective = objective or Objective()
        self._results: list[TrialResult] = []
        self._by_config: dict[TrainConfig, TrialResult] = {}
        # Indexes, since every proposal asks for these, over up to a thousand trials.
        self._by_kind: dict[TrainConfig, dict[int, TrialResult]] = {}
        self._shortages: list[TrialResult] = []
        self._ranking: list[TrialResult] | None = None

    def add(self, result: TrialResult) -> None:
        """Take in a finished trial."""
        config = result.request.config
        self._results.append(result)
        self._by_config[config] = result
        self._by_kind.setdefault(_kind(config), {})[config.per_device_train_batch_size] = result
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
        """Return the samples per second that a completed trial counts for; tokens follow samples."""
        return self._objective.rate(result.measurement) if result.measurement else 0.0

    @property
    def memory_bound(self) -> bool:
        """Whether anything has run out of memory."""
        return bool(self._shortages)

    def refusal(self, config: TrainConfig) -> str | None:
        """Return why `config` is hopeless after what was seen, or None."""
        return self._out_of_memory(config) or self._no_growth(config) or self._no_waiting(config)

    def _out_of_memory(self, config: TrainConfig) -> str | None:
        for result in self._shortages:
            if is_no_harder(result.request.config, config):
                return f"trial {result.request.number}, no harder on memory, ran out of it"
        return None

    def _no_growth(self, config: TrainConfig) -> str | None:
        size = config.per_device_train_batch_size
        same = self._by_kind.get(_kind(config), {})
        rates = {size: self.rate(r) for size, r in same.items() if r.measurement}
        *smaller, largest = sorted(s for s in rates if s < size) or [0]
        best = max(smaller, key=lambda s: rates[s], default=None)
        if best is not None and rates[largest] < rates[best] * GROWTH_THRESHOLD:
            return f"throughput did not grow from micro-batch {best} to {largest}"
        return None

    def _no_waiting(self, config: TrainConfig) -> str | None:
        """Return why another way of loading data is not worth a trial: it can only win back what a step waits."""
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
    return config.model_dump(include=LOADING)


def _kind(config: TrainConfig) -> TrainConfig:
    """Return what configurations have in common that differ in the micro-batch alone."""
    return config.model_copy(update={"per_device_train_batch_size": 1})


def is_no_harder(easy: TrainConfig, hard: TrainConfig) -> bool:
    """Return whether `easy` surely needs no more memory than `hard`: a partial order, False where not comparable."""
    if easy.per_device_train_batch_size > hard.per_device_train_batch_size:
        return False
    if easy.checkpointing != hard.checkpointing and not keeps_less(easy.checkpointing, hard.checkpointing):
        return False
    if easy.optim != hard.optim and easy.optim not in _LIGHTER.get(hard.optim, frozenset()):
        return False
    rest = {
        "per_device_train_batch_size": 1,
        "checkpointing": "none",
        "optim": "",
        "tf32": False,
        **_FREE_OF_MEMORY,
    }
    return easy.model_copy(update=rest) == hard.model_copy(update=rest)
