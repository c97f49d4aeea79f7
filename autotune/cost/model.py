"""The cost model of one workload on one device: memory and time of configurations that haven't run.

It holds a profile for each family, the device's rates and what measurements said of earlier predictions. Predicting
many configurations costs microseconds each; nothing here imports torch. It may reject and rank, never crown.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autotune.config import TrainConfig, Workload
from autotune.cost import memory, time
from autotune.cost.corrections import Corrections, Observation, memory_features, time_features
from autotune.cost.family import Family, family_of
from autotune.cost.framework import framework_bytes, time_deviation
from autotune.cost.gaussian import below
from autotune.cost.padding import padded_share
from autotune.cost.profile import Profile
from autotune.cost.reserve import unused_bytes
from autotune.cost_estimate import CostEstimate, MemoryBreakdown
from autotune.hardware import Hardware
from autotune.rates import Rates
from autotune.trial import Interval, TrialResult, TrialStatus

# Half of a 95 % interval, in standard deviations.
_Z = 1.96

# A trial that ran out of memory is taken to have needed this much of its budget: how much more isn't known.
_BEYOND = 1.01


@dataclass(frozen=True)
class Predictions:
    """Arrays with a row for each configuration; NaN where its family has no profile."""

    samples_per_second: NDArray[np.float64]
    log_deviation: NDArray[np.float64]  # standard deviation of the rate's logarithm
    needed_bytes: NDArray[np.float64]  # what the budget has to hold
    needed_deviation: NDArray[np.float64]  # standard deviation of that

    @property
    def least_bytes(self) -> NDArray[np.float64]:
        """Lower bound of what the budget has to hold."""
        return self.needed_bytes - _Z * self.needed_deviation

    def chance_to_fit(self, budget_bytes: float) -> NDArray[np.float64]:
        """Return how probable it is that each configuration stays within a budget."""
        return below((budget_bytes - self.needed_bytes) / self.needed_deviation)


@dataclass(frozen=True)
class CostModel:
    """Predicts, and learns from what was measured.

    Args:
        workload: What is trained.
        hardware: Where.
        rates: Of the device.
        profiles: By family.
        corrections: What earlier measurements said.
        unused: What the allocator keeps unused, as far as it was asked for: it depends on nothing that is learned.
    """

    workload: Workload
    hardware: Hardware
    rates: Rates
    profiles: Mapping[Family, Profile]
    corrections: Corrections
    unused: dict[tuple[Family, str, int, bool], int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        workload: Workload,
        hardware: Hardware,
        rates: Rates,
        profiles: Sequence[Profile],
        observations: Sequence[Observation] = (),
    ) -> CostModel:
        """Return a model that knows `profiles` and what was observed."""
        corrections = Corrections(observations, framework_bytes(hardware), time_deviation(rates, hardware))
        return cls(workload, hardware, rates, {p.family: p for p in profiles}, corrections)

    def profile(self, config: TrainConfig) -> Profile | None:
        """Return the profile of a configuration's family, if it was traced."""
        return self.profiles.get(family_of(config, self.hardware))

    def predict(self, configs: Sequence[TrainConfig]) -> Predictions:
        """Return the predictions for many configurations."""
        count = len(configs)
        seconds, needed, unsure = (np.full(count, np.nan) for _ in range(3))
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for i, config in enumerate(configs):
            groups[_kind(config)].append(i)
        for rows in groups.values():
            kind = configs[rows[0]]
            profile = self.profile(kind)
            if profile is not None:
                sizes = np.array([configs[i].per_device_train_batch_size for i in rows], dtype=float)
                seconds[rows], needed[rows], unsure[rows] = self._group(kind, profile, sizes)
        mean, deviation = self.corrections.log_time([time_features(c) for c in configs]) if count else ([], [])
        sizes = np.array([c.per_device_train_batch_size for c in configs], dtype=float)
        samples = sizes if self.workload.global_batch_size is None else float(self.workload.global_batch_size)
        return Predictions(samples / (seconds * np.exp(mean)), np.array(deviation), needed, unsure)

    def gain_deviations(self, configs: Sequence[TrainConfig], reference: TrainConfig) -> NDArray[np.float64]:
        """Return how unsure the rate of each configuration over that of `reference` is, as deviations of its logarithm.

        What is unsure of both alike, as the device's speed, doesn't count.
        """
        return self.corrections.log_slowdown([time_features(c) for c in configs], time_features(reference))[1]

    def _group(
        self, kind: TrainConfig, profile: Profile, sizes: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return seconds, the memory that is needed and its standard deviation for micro-batches of one kind."""
        accumulation = (self.workload.global_batch_size or sizes) / sizes
        seconds = time.step_seconds(
            profile,
            self.rates,
            kind.optim,
            sizes * padded_share(self.workload.lengths, kind, sizes),
            accumulation,
            tf32=kind.tf32,
            compiled=kind.torch_compile_backend == "inductor",
        )
        at_once, accumulated = (memory.allocated_peaks(profile, kind.optim, sizes, some) for some in (False, True))
        allocated = np.where(accumulation > 1, accumulated, at_once)
        factors, deviations = self._memory_factors(profile, kind.optim, sizes, accumulation)
        outside, outside_deviation = (0.0, 0.0) if self.hardware.is_cpu else framework_bytes(self.hardware)
        needed, unsure = allocated * factors + outside, np.hypot(allocated * deviations, outside_deviation)
        if _is_rewritten(kind):
            unsure = np.maximum(unsure, (allocated - profile.weights_bytes) / _Z)
        return seconds, needed, unsure

    def _memory_factors(
        self, profile: Profile, optim: str, sizes: NDArray[np.float64], accumulation: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return for each micro-batch the factor from predicted to real memory and its standard deviation.

        On the CPU it covers what the process takes beside its training.
        """
        quantity = "device" if self.hardware.is_cpu else "allocated"
        different, where = np.unique(sizes, return_inverse=True)
        factors: list[tuple[float, float]] = []
        for size in different:
            steps = int(accumulation[np.argmax(sizes == size)])
            parts = memory.components(profile, optim, int(size), steps)
            factors.append(self.corrections.memory(quantity, memory_features(parts, 0.0)))
        found = np.array(factors)[where]
        return found[:, 0], found[:, 1]

    def estimate(self, config: TrainConfig) -> CostEstimate | None:
        """Return what is predicted of one configuration, None if its family has no profile."""
        profile = self.profile(config)
        if profile is None:
            return None
        predicted = self.predict([config])
        rate, deviation = float(predicted.samples_per_second[0]), float(predicted.log_deviation[0])
        spread = math.exp(_Z * deviation)
        samples = self.workload.samples_per_step(config)
        step_s = samples / rate
        accumulation = self.workload.accumulation_steps(config)
        size = config.per_device_train_batch_size
        share = float(padded_share(self.workload.lengths, config, np.array([float(size)]))[0])
        flops = accumulation * profile.needed_flops.at(size * share)
        peak = time.dense_peak(self.rates, config.precision, tf32=config.tf32)
        tokens = self.workload.tokens_per_sample
        notes = []
        if config.torch_compile_backend is not None:
            notes.append("compiled: memory and time are those of the model as written, fused by a rule of thumb")
        if config.use_liger_kernel:
            notes.append("Liger: memory and time are those of the model's own kernels; its own should need less")
        return CostEstimate(
            memory=self.breakdown(config, profile),
            step_time_s=step_s,
            step_time_interval=Interval(low=step_s / spread, high=step_s * spread),
            samples_per_second=rate,
            samples_per_second_interval=Interval(low=rate / spread, high=rate * spread),
            tokens_per_second=None if tokens is None else rate * tokens,
            flops_per_step=flops,
            mfu=None if peak is None else flops / step_s / peak,
            traced_by=profile.traced_by,
            notes=tuple(notes),
        )

    def breakdown(self, config: TrainConfig, profile: Profile) -> MemoryBreakdown:
        """Return the predicted memory of a configuration by component."""
        parts, unused = self._parts(config, profile)
        features = memory_features(parts, unused)
        allocated, reserved = parts.allocated, parts.allocated + unused
        outside, _ = framework_bytes(self.hardware)
        allocated_factor, allocated_deviation = self.corrections.memory("allocated", memory_features(parts, 0.0))
        reserved_factor, reserved_deviation = self.corrections.memory("reserved", features)
        device_factor, device_deviation = self.corrections.memory("device", features)
        device = reserved * device_factor + parts.paged

        def interval(total: float, center: float, deviation: float) -> Interval:
            return Interval(low=center - _Z * deviation * total, high=center + _Z * deviation * total)

        return MemoryBreakdown(
            weights_bytes=round(parts.weights * allocated_factor),
            gradients_bytes=round(parts.gradients * allocated_factor),
            optimizer_state_bytes=round(parts.optimizer_state * allocated_factor),
            activations_bytes=round(parts.activations * allocated_factor),
            temporaries_bytes=round(parts.temporaries * allocated_factor),
            framework_bytes=round(outside + parts.paged),
            allocated_peak_bytes=round(allocated * allocated_factor),
            reserved_peak_bytes=round(reserved * reserved_factor),
            device_peak_bytes=round(device),
            allocated_interval=interval(allocated, allocated * allocated_factor, allocated_deviation),
            reserved_interval=interval(reserved, reserved * reserved_factor, reserved_deviation),
            device_interval=interval(reserved, device, device_deviation),
        )

    def _parts(self, config: TrainConfig, profile: Profile) -> tuple[memory.Components, float]:
        """Return the memory by component, and what the allocator reserves beyond it."""
        size, accumulation = config.per_device_train_batch_size, self.workload.accumulation_steps(config)
        parts = memory.components(profile, config.optim, size, accumulation)
        if self.hardware.is_cpu:
            return parts, 0.0
        key = (profile.family, config.optim, size, accumulation > 1)
        if key not in self.unused:
            self.unused[key] = unused_bytes(profile.excerpt, config.optim, size, accumulated=accumulation > 1)
        return parts, float(self.unused[key])

    def observe(self, *results: TrialResult) -> CostModel:
        """Return a model that has learned from finished trials; the same one if there is nothing to learn."""
        found = [observation for result in results if (observation := self.observation(result)) is not None]
        return replace(self, corrections=self.corrections.with_observations(*found)) if found else self

    def observation(self, result: TrialResult) -> Observation | None:
        """Return what a finished trial says of the uncorrected prediction, None if it says nothing."""
        config, measured = result.request.config, result.measurement
        profile = self.profile(config)
        if profile is None:
            return None
        if measured is None:
            return self._shortage(result, profile)
        parts, unused = self._parts(config, profile)
        reserved = parts.allocated + unused
        seen = measured.memory
        ratios = {"device": (seen.peak_bytes - parts.paged) / reserved} if seen.is_known else {}
        if seen.allocated_bytes is not None:
            ratios["allocated"] = seen.allocated_bytes / parts.allocated
        if seen.reserved_bytes is not None:
            ratios["reserved"] = seen.reserved_bytes / reserved
        size = np.array([float(config.per_device_train_batch_size)])
        seconds, _, _ = self._group(config, profile, size)
        measured_s = self.workload.samples_per_step(config) / measured.samples_per_second
        return Observation(
            key=self._key(config),
            memory_features=memory_features(parts, unused),
            memory=ratios,
            time_features=time_features(config),
            log_time=math.log(measured_s / float(seconds[0])),
        )

    def _shortage(self, result: TrialResult, profile: Profile) -> Observation | None:
        """Return what running out of memory says where less was expected: a bit more than the budget was needed."""
        if result.status is not TrialStatus.OUT_OF_MEMORY:
            return None
        config, budget = result.request.config, result.request.limits.memory_bytes
        expected = float(self.predict([config]).needed_bytes[0])
        if expected > budget or _is_rewritten(config):
            return None
        parts, unused = self._parts(config, profile)
        quantity = "device" if self.hardware.is_cpu else "allocated"
        outside = 0.0 if self.hardware.is_cpu else framework_bytes(self.hardware)[0]
        return Observation(
            key=self._key(config),
            memory_features=memory_features(parts, unused if quantity == "device" else 0.0),
            memory={quantity: (_BEYOND * budget - outside) / parts.allocated},
            time_features={},
            log_time=None,
        )

    def _key(self, config: TrainConfig) -> str:
        return f"{config.config_id}-{self.workload.digest()}"


def _is_rewritten(config: TrainConfig) -> bool:
    """Tell whether other kernels run than the model is written with, which keep and recompute what they like."""
    return config.torch_compile_backend is not None or config.use_liger_kernel


def _kind(config: TrainConfig) -> tuple[object, ...]:
    """Return all of a configuration that the closed form depends on, but for the micro-batch."""
    return (
        config.precision,
        config.tf32,
        config.optim,
        config.checkpointing,
        config.attn_implementation,
        config.torch_compile_backend,
        config.torch_compile_mode,
        config.use_liger_kernel,
        config.experts_implementation,
        config.experts_per_token,
        config.expert_capacity,
        config.adapter,
        config.quantization,
        config.train_sampling_strategy,
        config.packing,
    )
