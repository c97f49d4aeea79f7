"""The cost model of one workload on one device or several: memory and time of configurations that haven't run.

It holds a profile for each family, the device's rates and the corrections that measurements have taught. Predicting
many configurations costs microseconds each; nothing here imports torch. It rejects and ranks configurations; only
measurements decide the winner of a search.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple, Self

import numpy as np

from autotune.cost.corrections import Corrections, Observation, TimeSpread, Z, memory_features, time_features
from autotune.cost.family import Family, family_of
from autotune.cost.lengths import FullLength, in_full_length
from autotune.cost.memory import Footprint, communicators_bytes, framework_bytes
from autotune.cost.profile import Profile, Vector
from autotune.cost.sharding import Network, Share, Spread, network_of
from autotune.cost.time import StepCost, dense_peak
from autotune.training.arguments import effective_tf32
from autotune.values.budget import UNEVEN_ROUTING
from autotune.values.config import KNOBS, TrainConfig
from autotune.values.estimate import COMPONENTS, CostEstimate, Evaluation, MemoryBreakdown, Phase, Rates
from autotune.values.hardware import Hardware
from autotune.values.trial import Alive, Failure, Interval, TrialResult, TrialStatus
from autotune.values.workload import Workload

_COMPILED = (
    "compiled: memory and time are those of the model as written, fused by a rule of thumb; "
    "activations may take a small part of what is predicted, or three times as much"
)

# All that decides which formula predicts a configuration; the micro-batch is its variable.
kind_of: Callable[[TrainConfig], tuple[object, ...]] = attrgetter(
    *(name for name, knob in KNOBS.items() if knob.is_traced and name != "per_device_train_batch_size")
)


def is_compiled(config: TrainConfig) -> bool:
    """Tell whether a compiler fuses operators, and so chooses the tensors that are saved and recomputed."""
    return config.torch_compile_backend is not None


def by_rule(config: TrainConfig, profile: Profile) -> bool:
    """Tell whether a compiled configuration has the trace of the model as written alone."""
    return is_compiled(config) and not profile.family.compiled


def roughness(config: TrainConfig, profile: Profile) -> float:
    """Return how rough a compiled trace is: 1 of one by rule, else the share of operators in which layers differ."""
    return 1.0 if by_rule(config, profile) else profile.unlike


class Counted(NamedTuple):
    """Time and memory of micro-batches of one kind of configuration, uncorrected, a row for each."""

    seconds: Vector  # of an optimizer step
    allocated: Vector  # bytes at the peak
    features: list[dict[str, float]]  # of the memory, by which it is corrected
    outside: float  # bytes outside of the allocator that are not learned
    unsure: Vector  # bytes: lower bound of the standard deviation of the memory


@dataclass(frozen=True)
class Predictions:
    """Arrays with a row for each configuration; NaN where its family has no profile."""

    samples_per_second: Vector
    log_deviation: Vector  # standard deviation of the rate's logarithm
    needed_bytes: Vector  # that the budget has to hold
    needed_deviation: Vector  # standard deviation of that
    surely_bytes: Vector  # that the budget has to hold however wide the deviation is

    @property
    def least_bytes(self) -> Vector:
        return np.maximum(self.needed_bytes - Z * self.needed_deviation, self.surely_bytes)

    def chance_to_fit(self, budget_bytes: float) -> Vector:
        chances = below((budget_bytes - self.needed_bytes) / self.needed_deviation)
        return np.where(self.surely_bytes > budget_bytes, 0.0, chances)


def below(z: Vector) -> Vector:
    """Return how probable it is that a standard normal variable is below each of `z`."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z.tolist()])


@dataclass(frozen=True)
class CostModel:
    """Predicts, and learns from measurements."""

    workload: Workload
    hardware: Hardware
    rates: Rates
    profiles: Mapping[Family, Profile]
    corrections: Corrections  # by earlier measurements
    network: Network | None = None  # of a training on several devices; None: all are in this machine
    evaluation: Evaluation | None = None  # how the training is evaluated, if that can be the peak; not in `predict`
    experts: int = 0  # of a layer; with any, uneven routing makes memory unsure
    # By kind and micro-batches; empty in a copy in which anything above is replaced.
    counts: dict[tuple[object, ...], Counted] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls,
        workload: Workload,
        hardware: Hardware,
        rates: Rates,
        profiles: Sequence[Profile],
        observations: Sequence[Observation] = (),
        experts: int = 0,
    ) -> Self:
        corrections = Corrections(observations, framework_bytes(hardware), TimeSpread.of(rates, hardware))
        return cls(workload, hardware, rates, {p.family: p for p in profiles}, corrections, experts=experts)

    def profile(self, config: TrainConfig) -> Profile | None:
        """Return the trace of a configuration; of one whose programs weren't traced that of the model as written."""
        family = family_of(config, self.hardware, self.workload)
        return self.profiles.get(family) or self.profiles.get(family.as_written)

    def with_profile(self, profile: Profile) -> Self:
        return replace(self, profiles={**self.profiles, profile.family: profile})

    def predict(self, configs: Sequence[TrainConfig]) -> Predictions:
        count = len(configs)
        seconds, allocated, outside, least = (np.full(count, np.nan) for _ in range(4))
        rough = np.zeros(count, dtype=bool)
        features: dict[int, dict[str, float]] = {}
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for i, config in enumerate(configs):
            groups[kind_of(config)].append(i)
        for rows in groups.values():
            if (profile := self.profile(configs[rows[0]])) is not None:
                sizes = [configs[i].per_device_train_batch_size for i in rows]
                counted = self._counted(configs[rows[0]], profile, sizes)
                seconds[rows], allocated[rows], outside[rows] = counted.seconds, counted.allocated, counted.outside
                least[rows], rough[rows] = counted.unsure, by_rule(configs[rows[0]], profile)
                features.update(zip(rows, counted.features, strict=True))
        known = sorted(features)
        needed, unsure = np.full(count, np.nan), np.full(count, np.nan)
        # On the CPU the factor covers what the process takes in addition to its training.
        on_cpu = self.hardware.is_cpu
        quantity = "device" if on_cpu else "allocated"
        factors, deviations = self.corrections.memories(quantity, [features[i] for i in known])
        needed[known] = allocated[known] * factors + outside[known]
        context_deviation = 0.0 if on_cpu else framework_bytes(self.hardware)[1]
        unsure[known] = np.maximum(np.hypot(allocated[known] * deviations, context_deviation), least[known])
        mean, deviation = np.full(count, np.nan), np.full(count, np.nan)
        of_time = [time_features(configs[i], self.workload.lengths) for i in known]
        mean[known], deviation[known] = self.corrections.log_time(of_time)
        together = np.array([c.per_device_train_batch_size * c.parallelism.data_parallel for c in configs], dtype=float)
        samples = together if self.workload.global_batch_size is None else float(self.workload.global_batch_size)
        # A compiler may save most of the activations, or take three times as many: a configuration that is predicted at
        # more than twice the budget isn't tried on the chance that it saves so much.
        surely = np.where(rough, 0.5 * needed, 0.0)
        return Predictions(samples / (seconds * np.exp(mean)), deviation, needed, unsure, surely)

    def gain_spread(self, configs: Sequence[TrainConfig], reference: TrainConfig, *, together: bool = False) -> Vector:
        """Return deviations of the rates' logarithms over that of `reference`, or, `together`, covariances (n, n)."""
        *rows, beside = (time_features(c, self.workload.lengths) for c in (*configs, reference))
        return self.corrections.time.predict(rows, beside, together=together)[1]

    def _counted(self, kind: TrainConfig, profile: Profile, micro_batches: Sequence[int]) -> Counted:
        """Return time and memory of micro-batches of one kind, uncorrected; counted now or before."""
        key = (kind_of(kind), *micro_batches)
        if key in self.counts:
            return self.counts[key]
        sizes = np.array(micro_batches, dtype=float)
        together = sizes * kind.parallelism.data_parallel
        accumulation = (self.workload.global_batch_size or together) / together
        padded = in_full_length(self.workload, kind, sizes)
        pairs = zip(padded.largest.tolist(), accumulation.tolist(), strict=True)
        parts = [Footprint(kind, self._packed(kind, profile, n), n, steps).stepping() for n, steps in pairs]
        allocated = np.array([p.allocated for p in parts])
        context = 0.0 if self.hardware.is_cpu else framework_bytes(self.hardware)[0]
        unsure = UNEVEN_ROUTING * allocated if self.experts else np.zeros(len(sizes))
        rough = roughness(kind, profile)
        if by_rule(kind, profile):
            unsure = allocated - profile.weights_bytes
        self.counts[key] = counted = Counted(
            seconds=self._step_cost(kind, profile).seconds(padded.mean, accumulation, padded.attended),
            allocated=allocated,
            features=[memory_features(p, 0.0, compiled=rough) for p in parts],
            outside=context + communicators_bytes(self.hardware, kind.parallelism),
            unsure=unsure / Z,
        )
        return counted

    def _step_cost(self, config: TrainConfig, profile: Profile) -> StepCost:
        world, host_bandwidth = config.parallelism.world_size, self.rates.host_bandwidth
        nodes, _ = self.hardware.nodes_of(world)
        return StepCost(
            profile,
            self.rates,
            config.optim,
            Spread.of(config),
            self.network or network_of(self.hardware, world, nodes=nodes, host_bandwidth=host_bandwidth),
            tf32=effective_tf32(config, self.hardware),
            compiled=config.torch_compile_backend == "inductor" and by_rule(config, profile),
            kept=1.0 if config.activation_memory_budget is None else config.activation_memory_budget,
            generated=config.generation_batch_size,
        )

    def estimate(self, config: TrainConfig) -> CostEstimate | None:
        """Return the prediction of one configuration; None if its family has no profile."""
        profile = self.profile(config)
        if profile is None:
            return None
        predicted = self.predict([config])
        rate, deviation = float(predicted.samples_per_second[0]), float(predicted.log_deviation[0])
        spread = math.exp(Z * deviation)
        step_s = self.workload.samples_per_step(config) / rate
        accumulation, padded = self.workload.accumulation_steps(config), self._padded(config)
        parts = self._step_cost(config, profile).parts(padded.mean, np.array([float(accumulation)]), padded.attended)
        whole_s = sum(float(part[0]) for part in parts.values())
        flops = accumulation * profile.needed(float(padded.mean[0]), float(padded.attended[0]))  # of one device
        peak = dense_peak(self.rates, config.precision, tf32=effective_tf32(config, self.hardware))
        used = None if peak is None else flops / step_s / peak
        most = spread if used is None else max(1.0, min(spread, 1.0 / used))  # nothing is faster than the peak
        tokens, interval = self.workload.tokens_per_sample, Interval(low=rate / spread, high=rate * most)
        return CostEstimate(
            memory=self.breakdown(config, profile),
            step_time_s=step_s,
            step_time_interval=Interval(low=step_s / most, high=step_s * spread),
            samples_per_second=rate,
            samples_per_second_interval=interval,
            parts={part: share for part, seconds in parts.items() if (share := float(seconds[0]) / whole_s)},
            tokens_per_second=None if tokens is None else rate * tokens,
            tokens_per_second_interval=None if tokens is None else interval.times(tokens),
            flops_per_step=flops * config.parallelism.world_size,
            mfu=used,
            mfu_interval=None if used is None else Interval(low=min(used / spread, 1.0), high=min(used * most, 1.0)),
            notes=(_COMPILED,) if by_rule(config, profile) else (),
            host_bytes=round(self._footprint(config, profile).share.host),
        )

    def _footprint(self, config: TrainConfig, profile: Profile) -> Footprint:
        size = float(self._padded(config).largest[0])
        return Footprint(config, self._packed(config, profile, size), size, self.workload.accumulation_steps(config))

    def _packed(self, config: TrainConfig, profile: Profile, samples: float) -> Profile:
        """Return the profile of so many samples as one row, if they are, whose masks SDPA keeps in each layer."""
        if not config.packing or config.attn_implementation != "sdpa" or self.workload.lengths is None:
            return profile
        storages = profile.storages.of_one_row(samples, self.workload.lengths.maximum)
        return profile.model_copy(update={"storages": storages})

    def share(self, config: TrainConfig) -> Share | None:
        profile = self.profile(config)
        return None if profile is None else self._footprint(config, profile).share

    def breakdown(self, config: TrainConfig, profile: Profile) -> MemoryBreakdown:
        footprint, rough = self._footprint(config, profile), roughness(config, profile)
        parts, unused = footprint.peak(self.evaluation)
        if self.evaluation is not None and self.evaluation.kept_samples:
            # Each join of kept logits leaves a block, which the allocator gives back before memory runs out.
            room = self.hardware.memory_bytes - framework_bytes(self.hardware)[0] - parts.allocated
            unused = min(unused, max(0.0, room))
        own = self.workload.fixed_arguments.get("per_device_eval_batch_size")
        counted = footprint.phases(self.evaluation or (Evaluation(batch=own) if own else None))
        # Outside of the allocator, and not learned: paged states and NCCL's buffers.
        beyond = parts.paged + communicators_bytes(self.hardware, config.parallelism)
        factor, _ = self.corrections.memory("allocated", memory_features(parts, 0.0, compiled=rough))
        found: dict[str, Any] = {f"{each}_bytes": round(getattr(parts, each) * factor) for each in COMPONENTS.values()}
        for quantity, rest, more in (("allocated", 0.0, 0.0), ("reserved", unused, 0.0), ("device", unused, beyond)):
            total, features = parts.allocated + rest, memory_features(parts, rest, compiled=rough)
            ratio, deviation = self.corrections.memory(quantity, features)
            peak = total * ratio + more
            low, high = peak - Z * deviation * total, peak + Z * deviation * total
            found[f"{quantity}_peak_bytes"] = round(peak)
            found[f"{quantity}_interval"] = Interval(low=max(low, parts.weights if rough else 0.0), high=high)
        return MemoryBreakdown(
            **found,
            framework_bytes=round(framework_bytes(self.hardware)[0] + beyond),
            phase=parts.phase,
            phases=tuple(
                Phase(name=p.phase, operator=p.moment, allocated_bytes=round(p.allocated * factor)) for p in counted
            ),
        )

    def alive(self, config: TrainConfig) -> tuple[Alive, ...]:
        """Return the tensors alive at the peak that was predicted, largest first."""
        profile = self.profile(config)
        assert profile is not None
        footprint = self._footprint(config, profile)
        return footprint.alive(footprint.peak(self.evaluation)[0])

    def _padded(self, config: TrainConfig) -> FullLength:
        return in_full_length(self.workload, config, np.array([float(config.per_device_train_batch_size)]))

    def observe(self, *results: TrialResult) -> Self:
        """Return a model that has learned from finished trials; the same one if there is nothing to learn."""
        found = [observation for result in results if (observation := self.observation(result)) is not None]
        if not found:
            return self
        learned = replace(self, corrections=self.corrections.with_observations(*found))
        learned.counts.update(self.counts)  # which nothing that is observed changes
        return learned

    def observation(self, result: TrialResult) -> Observation | None:
        """Return a finished trial's measurements over the uncorrected prediction; None if it has none."""
        config, measured, failure = result.request.config, result.measurement, result.outcome
        profile = self.profile(config)
        is_short = result.status is TrialStatus.OUT_OF_MEMORY and not result.is_excused
        if profile is None or (measured is None and (by_rule(config, profile) or not is_short)):
            return None
        # Another seed is the same work: its measurement takes the place of the earlier one.
        key = f"{config.config_id}-{self.workload.model_copy(update={'seed': 0}).digest()}"
        beyond = communicators_bytes(self.hardware, config.parallelism)
        parts, unused = self._footprint(config, profile).peak(None)
        if measured is None:
            assert isinstance(failure, Failure)
            # Without warning a bit more than the budget was needed, or as much as was seen of a process beyond it.
            needed = 1.01 * result.request.limits.memory_bytes
            if failure.memory is not None and failure.memory.is_known:
                needed = max(needed, failure.memory.peak_bytes)
            on_cpu = self.hardware.is_cpu
            quantity, outside = ("device", 0.0) if on_cpu else ("allocated", framework_bytes(self.hardware)[0])
            features = memory_features(parts, unused if on_cpu else 0.0)
            ratio = (needed - (outside + beyond)) / parts.allocated
            if ratio < self.corrections.memory(quantity, features)[0]:
                return None
            seen = {quantity: ratio}
            return Observation(key=key, memory_features=features, memory=seen, time_features={}, log_time=None)
        took, features, ratios = measured.memory, dict[str, float](), dict[str, float]()
        if took.is_known:
            features = memory_features(parts, unused, compiled=roughness(config, profile))
            reserved = parts.allocated + unused
            ratios["device"] = (took.peak_bytes - (parts.paged + beyond)) / reserved
            if took.allocated_bytes is not None:
                ratios["allocated"] = took.allocated_bytes / parts.allocated
            if took.reserved_bytes is not None:
                ratios["reserved"] = took.reserved_bytes / reserved
        seconds = self._counted(config, profile, [config.per_device_train_batch_size]).seconds
        measured_s = self.workload.samples_per_step(config) / measured.samples_per_second
        return Observation(
            key=key,
            memory_features=features,
            memory=ratios,
            time_features=time_features(config, self.workload.lengths),
            log_time=math.log(measured_s / float(seconds[0])),
        )
