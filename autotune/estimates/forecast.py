"""Predictions for one device: which configurations fit, and which are fastest.

The model is traced once for each family of configurations and kind of device; all devices of that kind share the trace.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from autotune.cost.communication import Network
from autotune.cost.family import family_of
from autotune.cost.model import CostModel
from autotune.estimates.profiles import Profiles
from autotune.estimates.report import Device, Predicted, RunCost, predicted, run_cost
from autotune.estimates.request import EstimateOptions, Target, plan_of
from autotune.planning.plan import SearchPlan, least_states, too_large
from autotune.space.knobs import MICRO_BATCH, Scalar, allowance_of
from autotune.space.space import micro_batches
from autotune.storage.home import read_observations
from autotune.training.build import describe
from autotune.values.config import Allowance, TrainConfig
from autotune.values.estimate import CostEstimate, MemoryBreakdown, TracedBy
from autotune.values.model import ModelFacts
from autotune.values.workload import Workload

_HOW_TRACED: dict[TracedBy, str] = {
    "meta": "operators traced on the meta device, without memory or arithmetic",
    "fake": "operators traced with fake tensors",
    "run": "operators seen in a run of a small batch, as they depend on values",
}


@dataclasses.dataclass(frozen=True)
class Question:
    """A training to estimate, on whichever device."""

    options: EstimateOptions
    workload: Workload
    facts: ModelFacts
    profiles: Profiles

    @classmethod
    def of(cls, options: EstimateOptions, workload: Workload) -> Question:
        """Return the question of a workload, of which nothing is traced yet."""
        facts = describe(workload.model, workload.task)
        return cls(options, workload, facts, Profiles(workload, facts.parameters))

    @property
    def point(self) -> dict[str, Scalar]:
        """The knobs that the user gave, by the names of search spaces."""
        return self.options.point

    @property
    def allowance(self) -> Allowance:
        """The deepest class of change that a ranking may make."""
        return self.options.allow or Allowance.OPTIMIZER

    def forecast(self, target: Target, *, network: Network | None = None) -> Forecast:
        """Return the predictions for a device, corrected by what earlier searches measured on it."""
        plan = plan_of(self.workload, target.device, self.facts, self.allowance)
        observations = read_observations(plan.hardware, self.workload.model.model_type)
        model = CostModel.of(self.workload, plan.hardware, target.rates, [], observations, plan.facts.experts)
        evaluation = self.options.evaluation
        model = dataclasses.replace(model, profiles=self.profiles, network=network, evaluation=evaluation)
        return Forecast(plan, target.device, model)

    def run(self, found: Predicted) -> RunCost | None:
        """Return the cost of a run of `--tokens` with a configuration; None without `--tokens`."""
        tokens, size = self.options.tokens, self.facts.parameters
        return None if tokens is None else run_cost(found, tokens=tokens, workload=self.workload, parameters=size)

    def with_micro_batches(self, config: TrainConfig) -> list[TrainConfig]:
        """Return `config` with each micro-batch that is to be compared; unchanged if the user gave a micro-batch."""
        return [config] if MICRO_BATCH in self.point else with_micro_batches(config, self.workload)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The predictions for one device. Methods raise InputError if the model can't be traced with a configuration."""

    plan: SearchPlan
    device: Device
    model: CostModel  # whose profiles are `Profiles`
    memories: dict[TrainConfig, MemoryBreakdown] = dataclasses.field(default_factory=dict)  # predicted so far

    def estimate(self, config: TrainConfig) -> CostEstimate:
        """Return the prediction for a configuration."""
        found = self.model.estimate(config)
        if found is None:
            assert isinstance(self.model.profiles, Profiles)
            raise self.model.profiles.failures[family_of(config, self.plan.hardware, self.plan.workload)]
        self.memories[config] = found.memory
        return found

    def predicted(self, config: TrainConfig) -> Predicted:
        """Return the prediction for a configuration in the form of a report."""
        return predicted(config, self.estimate(config), workload=self.plan.workload, device=self.device)

    def basis(self, config: TrainConfig, traced_by: TracedBy) -> tuple[str, ...]:
        """Return lines that say what a prediction is based on: the way of tracing, and earlier measurements."""
        lines = [_HOW_TRACED[traced_by]]
        if config.quantization is not None and self.plan.facts.expert_parameters:
            lines.append(
                f"the fused weights of experts are no linear layers, so {config.quantization} packs none of them"
            )
        if learned := len(self.model.corrections.observations):
            lines.append(f"corrected by {learned} trial{'s' if learned > 1 else ''} of earlier searches")
        return tuple(lines)

    def device_bytes(self, config: TrainConfig) -> int:
        """Return the predicted peak of device memory in bytes."""
        if config not in self.memories:
            self.estimate(config)
        return self.memories[config].device_peak_bytes

    def fits(self, config: TrainConfig) -> bool:
        """Return whether the predicted peak of a configuration is within the device's memory."""
        return self.device_bytes(config) <= self.device.memory_bytes

    def largest_micro_batch(self, config: TrainConfig) -> int | None:
        """Return the largest micro-batch that fits with the other knobs of `config`; None if none does.

        Under a given global batch every micro-batch of `with_micro_batches` is looked at, as memory need not rise with
        it: without accumulation, no gradients are held while the next are computed. With a free global batch memory
        rises with the micro-batch, so a bisection finds the largest.
        """
        if self.plan.workload.global_batch_size is None:
            sizes = range(1, (1 << 20) + 1)
            fitting = bisect.bisect_left(sizes, True, key=lambda size: not self.fits(with_micro_batch(config, size)))
            return fitting or None
        configs = with_micro_batches(config, self.plan.workload)
        least = self.model.predict(configs).least_bytes.tolist()
        for candidate, bound in reversed(list(zip(configs, least, strict=True))):
            if bound <= self.device.memory_bytes and self.fits(candidate):
                return int(candidate.per_device_train_batch_size)
        return None

    def tightest(self, configs: Sequence[TrainConfig]) -> TrainConfig:
        """Return the configuration with the least predicted memory.

        Nothing is traced for one whose weights, gradients and optimizer states alone take more than another in all.
        """
        states = [least_states(self.plan, config) for config in configs]

        def weight(row: int) -> tuple[float, int, bool]:
            config = configs[row]
            return states[row], config.per_device_train_batch_size, config.checkpointing == "none"

        light = configs[min(range(len(configs)), key=weight)]
        enough = float(self.model.predict([light]).needed_bytes[0])
        if not math.isnan(enough):
            enough += self.model.paged_bytes(light)
            within = (config for config, least in zip(configs, states, strict=True) if least <= enough)
            configs = list(dict.fromkeys((light, *within)))
        needed = self.model.predict(configs).needed_bytes.tolist()
        taken = [
            math.inf if math.isnan(nbytes) else nbytes + self.model.paged_bytes(config)
            for config, nbytes in zip(configs, needed, strict=True)
        ]
        return configs[taken.index(min(taken))]

    def fastest(self, configs: Sequence[TrainConfig], count: int) -> tuple[list[TrainConfig], int]:
        """Return up to `count` of the fastest configurations that fit, and how many configurations may fit at all.

        Of configurations that differ in micro-batch and tf32 alone, only the fastest is returned. Predicted rates that
        are as good as equal are ordered by allowance class, then by position in `configs`. A
        configuration may fit if the lower bound of its memory is within the device's. Nothing is traced for one whose
        weights, gradients and optimizer states alone aren't.
        """
        configs = [config for config in configs if not too_large(self.plan, config)]
        found = self.model.predict(configs)
        rates = found.samples_per_second.tolist()
        with np.errstate(invalid="ignore"):
            rows: list[int] = np.flatnonzero(found.least_bytes <= self.device.memory_bytes).tolist()
        left = sorted(rows, key=lambda row: -rates[row])
        chosen: dict[TrainConfig, TrainConfig] = {}
        while left and len(chosen) < count:
            lowest = rates[left[0]] * 0.99  # as good as equal
            equal = itertools.takewhile(lambda row: rates[row] >= lowest, left)  # noqa: B023  # used up in this round
            row = min(equal, key=lambda row: (allowance_of(configs[row], self.plan).rank, -rates[row], row))
            left.remove(row)
            kind = configs[row].model_copy(update={"per_device_train_batch_size": 1, "tf32": False})
            if kind not in chosen and self.fits(configs[row]):
                chosen[kind] = configs[row]
        return list(chosen.values()), len(rows)


def with_micro_batch(config: TrainConfig, size: int) -> TrainConfig:
    """Return `config` with another micro-batch."""
    return config.model_copy(update={MICRO_BATCH: size})


def with_micro_batches(config: TrainConfig, workload: Workload) -> list[TrainConfig]:
    """Return `config` with each micro-batch that divides a data-parallel rank's part of the global batch.

    The list is empty if the ranks can't share the global batch evenly.
    """
    total, ranks = workload.global_batch_size, config.parallelism.data_parallel
    if total is not None and total % ranks:
        return []
    return [with_micro_batch(config, size) for size in micro_batches(None if total is None else total // ranks)]
