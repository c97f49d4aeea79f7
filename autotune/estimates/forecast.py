"""What the cost model says of one device: what fits, which configurations are best, what would make one fit.

One trace of a family of configurations serves all devices of a kind. Predictions only: nothing is run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autotune.cost.family import family_of
from autotune.cost.model import CostModel
from autotune.cost.network import Network
from autotune.cost.optimizers import OPTIMIZERS
from autotune.errors import InputError, NothingFitsError
from autotune.estimates.profiles import Profiles
from autotune.estimates.report import Device, Predicted, RunCost, miss, predicted
from autotune.estimates.request import EstimateOptions, Target, as_options, plan_of
from autotune.estimates.run_cost import Prices, run_cost
from autotune.planning.plan import SearchPlan
from autotune.space.knobs import allowance_of, knobs, shown
from autotune.space.points import Scalar
from autotune.space.space import micro_batches
from autotune.storage.home import read_observations
from autotune.units import show_memory
from autotune.values.catalogue.gpus import gpus
from autotune.values.config import TrainConfig
from autotune.values.estimate import CostEstimate, MemoryBreakdown, TracedBy
from autotune.values.knob import Allowance
from autotune.values.model import ModelFacts
from autotune.values.workload import Workload

# Predicted rates nearer than this count as equal; the change that goes less deep comes first.
_EQUAL_RATES = 0.01

# The search for the largest micro-batch ends here where the global batch is free.
_LARGEST_MICRO_BATCH = 1 << 20

_HOW_TRACED: dict[TracedBy, str] = {
    "meta": "operators traced on the meta device, without memory or arithmetic",
    "fake": "operators traced with fake tensors",
    "run": "operators seen in a run of a small batch, as they depend on values",
}


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked of each device.

    Args:
        options: As the user gave them.
        point: The knobs that were given.
        prices: Of devices, if there are any.
        workload: What is trained.
        facts: Of the model.
        profiles: Of the workload.
    """

    options: EstimateOptions
    point: Mapping[str, Scalar]
    prices: Prices | None
    workload: Workload
    facts: ModelFacts
    profiles: Profiles

    @property
    def allowance(self) -> Allowance:
        """How much a ranking may change."""
        return self.options.allow or Allowance.OPTIMIZER

    def forecast(
        self,
        target: Target,
        memories: dict[TrainConfig, MemoryBreakdown] | None = None,
        *,
        network: Network | None = None,
    ) -> Forecast:
        """Return the predictions for a device; what earlier searches measured there corrects them."""
        plan = plan_of(self.workload, target.device, self.facts, self.allowance)
        observations = read_observations(plan.hardware, self.workload.model.model_type)
        model = CostModel.of(self.workload, plan.hardware, target.rates, [], observations)
        model = dataclasses.replace(model, network=network)
        return Forecast(plan, target.device, model, self.profiles, memories)

    def run(self, found: Predicted, gpu: str) -> RunCost | None:
        """Return what the run that was asked about costs."""
        tokens, size = self.options.tokens, self.facts.parameters
        if tokens is None:
            return None
        return run_cost(found, tokens=tokens, workload=self.workload, parameters=size, prices=self.prices, gpu=gpu)


class Forecast:
    """The predictions for one device.

    Args:
        plan: Workload, device, memory and space.
        device: The device as reports name it.
        model: The cost model; its profiles are taken from `profiles`.
        profiles: Of the workload.
        memories: Predicted memory by configuration, shared by devices whose memory is alike.
    """

    def __init__(
        self,
        plan: SearchPlan,
        device: Device,
        model: CostModel,
        profiles: Profiles,
        memories: dict[TrainConfig, MemoryBreakdown] | None = None,
    ) -> None:
        self.plan = plan
        self.device = device
        self._profiles = profiles
        self._model = dataclasses.replace(model, profiles=profiles)
        self._memories = memories if memories is not None else {}

    def estimate(self, config: TrainConfig) -> CostEstimate:
        """Return what is predicted of a configuration.

        Raises:
            InputError: The model can't be traced with it.
        """
        found = self._model.estimate(config)
        if found is None:
            raise self._profiles.failures[family_of(config, self.plan.hardware)]
        self._memories[config] = found.memory
        return found

    def predicted(self, config: TrainConfig) -> Predicted:
        """Return what is predicted of a configuration, as a report has it."""
        return predicted(config, self.estimate(config), workload=self.plan.workload, device=self.device)

    def basis(self, config: TrainConfig, traced_by: TracedBy) -> tuple[str, ...]:
        """Return lines about what the prediction of a configuration stands on."""
        lines = [_HOW_TRACED[traced_by]]
        if config.optim not in OPTIMIZERS:
            lines.append(f"nothing is known of {config.optim}: taken as adamw_torch")
        if learned := len(self._model.corrections.observations):
            lines.append(f"corrected by {learned} trial{'s' if learned > 1 else ''} of earlier searches")
        return tuple(lines)

    def device_bytes(self, config: TrainConfig) -> int:
        """Return the predicted peak on the device.

        Raises:
            InputError: The model can't be traced with it.
        """
        if config not in self._memories:
            self.estimate(config)
        return self._memories[config].device_peak_bytes

    def fits(self, config: TrainConfig) -> bool:
        """Return whether the predicted memory of a configuration is within the device's.

        Raises:
            InputError: The model can't be traced with it.
        """
        return self.device_bytes(config) <= self.device.memory_bytes

    def largest_micro_batch(self, config: TrainConfig) -> int | None:
        """Return the largest micro-batch that fits with the other knobs of `config`, None if none does.

        Of a given global batch it is one of the lattice, each of which is looked at: the whole batch at once can take
        less than half of it, for want of gradients to add to. Where the global batch is free, memory rises with the
        micro-batch.
        """
        total = self.plan.workload.global_batch_size
        if total is None:
            return self._largest_of_all(config)
        ranks = config.parallelism.data_parallel
        configs = [with_micro_batch(config, size) for size in micro_batches(total // ranks)] if total >= ranks else []
        if not configs:
            return None
        least = self._model.predict(configs).least_bytes
        for candidate, bound in sorted(zip(configs, least, strict=True), key=lambda pair: -_size(pair[0])):
            if bound <= self.device.memory_bytes and self.fits(candidate):
                return _size(candidate)
        return None

    def _largest_of_all(self, config: TrainConfig) -> int | None:
        fitting, beyond = 0, 1
        while beyond <= _LARGEST_MICRO_BATCH and self.fits(with_micro_batch(config, beyond)):
            fitting, beyond = beyond, 2 * beyond
        while beyond - fitting > 1:
            middle = (fitting + beyond) // 2
            if self.fits(with_micro_batch(config, middle)):
                fitting = middle
            else:
                beyond = middle
        return fitting or None

    def best(self, configs: Sequence[TrainConfig], count: int) -> tuple[list[TrainConfig], int]:
        """Return the `count` best of those that fit, the best of each kind, and how many may fit.

        A kind is all but the micro-batch and tf32. Best is the predicted throughput; where that is as good as equal,
        what changes the training less, and then what comes first.
        """
        found = self._model.predict(configs)
        with np.errstate(invalid="ignore"):
            rows: list[int] = np.flatnonzero(found.least_bytes <= self.device.memory_bytes).tolist()
        depths = {row: allowance_of(configs[row], self.plan).rank for row in rows}
        chosen: dict[TrainConfig, TrainConfig] = {}
        for row in _in_order(rows, found.samples_per_second.tolist(), depths):
            kind = configs[row].model_copy(update={"per_device_train_batch_size": 1, "tf32": False})
            if kind not in chosen and self.fits(configs[row]):
                chosen[kind] = configs[row]
                if len(chosen) == count:
                    break
        return list(chosen.values()), len(rows)

    def tightest(self, configs: Sequence[TrainConfig]) -> TrainConfig:
        """Return the configuration with the least predicted memory.

        Raises:
            InputError: The model can't be traced with any.
        """
        least = self._model.predict(configs).least_bytes
        sizes = {_size(config) for config in configs}
        # The lower bound leaves out what is paged and is meant for one micro-batch at a time. The largest can be the
        # tightest, as the whole batch at once has no gradients to add to.
        lowest: dict[tuple[str, int], TrainConfig] = {}
        for row in sorted(np.flatnonzero(np.isfinite(least)).tolist(), key=lambda row: float(least[row])):
            if _size(configs[row]) in (min(sizes), max(sizes)):
                lowest.setdefault((configs[row].optim, _size(configs[row])), configs[row])
        return min(lowest.values() or configs[:1], key=self.device_bytes)

    def nothing_fits(self, configs: Sequence[TrainConfig], allowance: Allowance) -> NothingFitsError:
        """Return the error that says how near the tightest configuration comes, and what would make it fit.

        Raises:
            InputError: The model can't be traced with any.
        """
        config = self.tightest(configs)
        took = miss(self.predicted(config), self.device)
        return NothingFitsError(
            f"nothing fits: {as_options(config, {})} comes nearest and {took}; {self.would_fit(config, allowance)}"
        )

    def would_fit(self, config: TrainConfig, allowance: Allowance) -> str:
        """Say which one change would make a configuration fit: of a knob, as shallow as can be, or of the device.

        Args:
            config: It.
            allowance: A change that this doesn't admit is said to need a wider one.
        """
        plan = self.plan.model_copy(update={"allowance": Allowance.METHOD})
        space = plan.search_space()
        options = {knob.parameter: knob.option for knob in knobs()}
        found: list[tuple[int, float, str]] = []
        for dimension in space.dimensions:
            for choice in dimension.choices:
                changed = space.config({**space.point(config), dimension.name: choice})
                if changed == config or space.refusal(changed) or not self._may_fit(changed):
                    continue
                depth = allowance_of(changed, plan.model_copy(update={"baseline": config}))
                text = shown(options[dimension.name], choice)
                text += "" if allowance.admits(depth) else f" (--allow {depth})"
                rate = float(self._model.predict([changed]).samples_per_second[0])
                took = show_memory(self.device_bytes(changed))
                found.append((depth.rank, -rate, f"with {text} it takes {took}, which fits"))
        return min(found)[2] if found else self._larger_device(config)

    def _may_fit(self, config: TrainConfig) -> bool:
        try:
            return self.fits(config)
        except InputError:
            return False

    def _larger_device(self, config: TrainConfig) -> str:
        needed = self.device_bytes(config)
        if not self.device.hardware.is_cpu:
            enough = [gpu for gpu in gpus() if gpu.memory_bytes >= needed]
            if enough:
                gpu = min(enough, key=lambda gpu: gpu.memory_bytes)
                return f"it fits {gpu.name} (--gpu) with its {show_memory(gpu.memory_bytes)}"
        return f"no one change fits; it takes a device of {show_memory(needed)}"


def _in_order(rows: Sequence[int], rates: Sequence[float], depths: Mapping[int, int]) -> Iterator[int]:
    """Yield rows by falling rate; of those that are as good as equal, first what changes the training least."""
    left = sorted(rows, key=lambda row: -rates[row])
    while left:
        equal = [row for row in left if rates[row] >= rates[left[0]] * (1 - _EQUAL_RATES)]
        first = min(equal, key=lambda row: (depths[row], -rates[row], row))
        left.remove(first)
        yield first


def with_micro_batch(config: TrainConfig, size: int) -> TrainConfig:
    """Return `config` with another micro-batch."""
    return config.model_copy(update={"per_device_train_batch_size": size})


def _size(config: TrainConfig) -> int:
    return config.per_device_train_batch_size
