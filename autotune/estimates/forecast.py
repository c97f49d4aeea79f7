"""Predictions for one device: which configurations fit, and which are fastest, by traces of the model.

The model is traced once for each family of configurations and kind of device, whose devices share the trace.
:class:`Profiles` reads traces from the home, or makes them in this process. For a search the launcher enters
`run_trace` in a process of its own, like a trial; only code of the user's own may touch a device there. Families are
traced in the order they are asked for until the processor time for it is spent; one that can't be traced is left out,
with the reason. The time that the search has left is the only limit of wall time, for busy machines.
"""

import bisect
import contextlib
import dataclasses
import itertools
import logging
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from autotune.cost.family import Family, family_of, shape_of
from autotune.cost.model import CostModel
from autotune.cost.profile import Profile
from autotune.cost.sharding import Network, network_of
from autotune.errors import InputError, one_line
from autotune.estimates.report import Device, Predicted, RunCost
from autotune.estimates.request import Target, nodes_of, plan_of
from autotune.planning.options import EstimateOptions
from autotune.planning.plan import SearchPlan
from autotune.space.knobs import MICRO_BATCH, allowance_of
from autotune.space.space import micro_batches
from autotune.storage.home import read_observations, read_trace, write_trace
from autotune.training.arguments import loading_bytes
from autotune.training.build import describe
from autotune.value import Value, found_value, read_value, write_value
from autotune.values.config import Allowance, TrainConfig
from autotune.values.estimate import CostEstimate
from autotune.values.hardware import Hardware
from autotune.values.model import ModelFacts
from autotune.values.workload import OwnCode, Workload

if TYPE_CHECKING:
    from autotune.cost.own_training import OwnTraining

TRACING = "autotune.estimates.forecast:run_trace"

# Building and tracing set what all threads share: torch's default type, transformers' tables of functions.
_ONE_THREAD = threading.Lock()


class Profiles(Mapping[Family, Profile]):
    """The profiles of one workload by family; one neither `known` nor stored is traced when it is first looked up.

    One that can't be traced is a KeyError, whose reason is in `failures`. A compiled one is traced if it `compiles`,
    which takes as long as all others together.
    """

    def __init__(
        self,
        workload: Workload,
        parameters: int,
        known: Mapping[Family, Profile] | None = None,
        *,
        compiles: bool = False,
        own: "OwnTraining | None" = None,
    ) -> None:
        self._workload, self._compiles, self._own = workload, compiles, own
        self._parameters = parameters
        self._traced: dict[Family, Profile] = dict(known or {})
        self._shallow: dict[tuple[object, ...], Any] = {}  # traces with few layers, see `profiler`
        self.failures: dict[Family, InputError] = {}

    def __getitem__(self, family: Family) -> Profile:
        if family in self.failures:
            raise KeyError(family)
        if family in self._traced:
            return self._traced[family]
        found = read_trace(self._workload, self._parameters, family)
        if found is None and family.compiled and not self._compiles:
            raise KeyError(family)
        if found is None:
            from autotune.cost import profiler

            model, shape = self._workload.model, shape_of(self._workload)
            try:
                with _ONE_THREAD, _muted("transformers", "bitsandbytes", "torch._subclasses.fake_tensor"):
                    found = profiler.profile(
                        model, family, shape, parameters=self._parameters, known=self._shallow, own=self._own
                    )
            except InputError as error:
                self.failures[family] = error
                raise KeyError(family) from None
            write_trace(self._workload, self._parameters, found)
        self._traced[family] = found
        return found

    def __iter__(self) -> Iterator[Family]:
        return iter(self._traced)

    def __len__(self) -> int:
        return len(self._traced)


@contextlib.contextmanager
def _muted(*names: str) -> Iterator[None]:
    """Silence libraries, whose warnings are about real trainings; an error is raised as well as logged."""
    with contextlib.ExitStack() as changed:
        for logger in map(logging.getLogger, names):
            changed.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        yield


class TraceRequest(Value):
    """The families to trace."""

    workload: Workload
    families: tuple[Family, ...]
    parameters: int = Field(description="of the model, by which stored traces are told apart")
    limit_s: float = Field(gt=0, description="processor time; no family is begun after this")
    within_s: float = Field(default=math.inf, gt=0, allow_inf_nan=True, description="wall time, in the same way")


class Traces(Value):
    """The profiles that were traced, and why others weren't."""

    profiles: tuple[Profile, ...]
    failures: tuple[str, ...] = ()
    left: int = Field(default=0, description="families that there was no time for")


def run_trace(directory: Path) -> None:
    """Answer the request in `directory`; until then each profile lies there by itself, should this process be ended.

    A process a core, four at most, traces the families. Those that differ in checkpointing alone share a pass.
    """
    request = read_value(TraceRequest, directory / "request.json")
    if (code := request.workload.own_code) is not None and code.own_loss:
        write_value(_traces_of_own(code, request, directory), directory / "answer.json")
        return
    kinds: dict[Family, int] = {}
    dealt: list[list[Family]] = [[] for _ in range(min(4, len(os.sched_getaffinity(0))))]
    for family in request.families:
        kind = kinds.setdefault(family.model_copy(update={"checkpointing": "none"}), len(kinds))
        dealt[kind % len(dealt)].append(family)
    shares = [request.model_copy(update={"families": tuple(families)}) for families in dealt if families]
    with ProcessPoolExecutor(len(shares), multiprocessing.get_context("fork")) as pool:
        found = list(pool.map(traces_of, shares, itertools.repeat(directory)))
    profiles = tuple(profile for traces in found for profile in traces.profiles)
    failures = tuple(dict.fromkeys(failure for traces in found for failure in traces.failures))
    left = sum(traces.left for traces in found)
    write_value(Traces(profiles=profiles, failures=failures, left=left), directory / "answer.json")
    for path in directory.glob("profile-*.json"):
        path.unlink()


def traces_left(directory: Path, failure: str) -> Traces:
    """Return the profiles that an ended child had traced, and `failure`."""
    found = (found_value(Profile, path) for path in sorted(directory.glob("profile-*.json")))
    return Traces(profiles=tuple(filter(None, found)), failures=(failure,))


def _traces_of_own(code: OwnCode, request: TraceRequest, directory: Path) -> Traces:
    """Return the traces of a training of the user's own, whose code runs up to its first step for them."""
    from autotune.cost.full_depth import SAMPLES
    from autotune.cost.own_training import OwnTraining
    from autotune.execution.user_code import looked_at
    from autotune.execution.user_data import first_batch, longest_of, rows_of, stored_lengths, view

    def traced(trainer: Any, _: object) -> Traces:
        dataset = trainer.train_dataset
        longest = None
        if code.reorders:
            longest = longest_of(dataset, max(SAMPLES), stored_lengths(dataset, directory.parent / "data"))

        def batch_of(samples: int) -> Any:
            shown = dataset if longest is None else view(dataset, longest[:samples])
            batch = first_batch(trainer, shown, samples)
            if rows_of(batch, samples) != samples:
                raise ValueError("batches don't have a row for each sample")
            return batch

        try:
            own = OwnTraining(trainer, batch_of)
        except Exception as error:  # of whatever kind: modules may hold anything
            return Traces(profiles=(), failures=(f"{code.name}: its modules can't be copied: {one_line(error)}",))
        return traces_of(request, directory, own)

    return looked_at(code, directory, traced)


def traces_of(request: TraceRequest, directory: Path | None = None, own: "OwnTraining | None" = None) -> Traces:
    """Return the `Profiles` of the families, made in this process, which loads torch; each is kept in `directory`."""
    profiles = Profiles(request.workload, request.parameters, compiles=True, own=own)
    started, ends_at = time.process_time(), time.monotonic() + request.within_s
    left = len(request.families)
    for family in request.families:
        if time.process_time() - started > request.limit_s or time.monotonic() > ends_at:
            break
        left -= 1
        if (found := profiles.get(family)) is not None and directory is not None:
            write_value(found, directory / f"profile-{os.getpid()}-{len(request.families) - left:03}.json")
    failures = dict.fromkeys(map(str, profiles.failures.values()))
    return Traces(profiles=tuple(profiles.values()), failures=tuple(failures), left=left)


@dataclasses.dataclass(frozen=True)
class Question:
    """A training to estimate, on whichever device."""

    options: EstimateOptions
    workload: Workload
    facts: ModelFacts
    profiles: Profiles

    @classmethod
    def of(cls, options: EstimateOptions, workload: Workload) -> "Question":
        with _ONE_THREAD:
            facts = describe(workload.model, workload.task, workload.recipe)
        return cls(options, workload, facts, Profiles(workload, facts.parameters))

    @property
    def allowance(self) -> Allowance:
        return self.options.allow or Allowance.OPTIMIZER

    def network(self, target: Target) -> Network:
        nodes, gb_s = nodes_of(self.options.devices, self.options.nodes), self.options.network_gb_s
        hardware, host_bandwidth = target.device.hardware, target.rates.host_bandwidth
        return network_of(hardware, self.options.devices, nodes=nodes, gb_s=gb_s, host_bandwidth=host_bandwidth)

    def host_memory(self, hardware: Hardware, found: Predicted) -> tuple[int, int | None]:
        """Return the bytes of a node's memory that offload, or FSDP at its start, takes, and those it has, if known."""
        there = self.options.host_memory_bytes
        if there is None and (hardware.is_cpu or hardware.driver is not None):  # the device is in this machine
            there = hardware.host_memory_bytes
        of_rank = max(found.host_bytes, loading_bytes(found.config, self.facts.parameters))
        return of_rank * (self.options.devices // nodes_of(self.options.devices, self.options.nodes)), there

    def forecast(self, target: Target, network: Network | None = None) -> "Forecast":
        """Return the predictions for a device, corrected by the measurements of earlier searches on it."""
        plan = plan_of(self.workload, target.device, self.facts, self.allowance)
        observations = read_observations(plan.hardware, self.workload.model.model_type)
        model = CostModel.of(self.workload, plan.hardware, target.rates, [], observations, plan.facts.experts)
        model = dataclasses.replace(model, profiles=self.profiles, network=network, evaluation=self.options.evaluation)
        return Forecast(plan, target.device, model)

    def run(self, found: Predicted) -> RunCost | None:
        """Return the cost of a run of `--tokens` with a configuration; None without `--tokens`."""
        tokens, size = self.options.tokens, self.facts.parameters
        return None if tokens is None else RunCost.of(found, tokens=tokens, workload=self.workload, parameters=size)

    def with_micro_batches(self, config: TrainConfig) -> list[TrainConfig]:
        """Return `config` with each micro-batch that is to be compared; unchanged if the user gave a micro-batch."""
        return [config] if MICRO_BATCH in self.options.point else with_micro_batches(config, self.workload)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The predictions for one device. Methods raise InputError if the model can't be traced with a configuration."""

    plan: SearchPlan
    device: Device
    model: CostModel  # whose profiles are `Profiles`
    estimates: dict[TrainConfig, CostEstimate] = dataclasses.field(default_factory=dict)  # so far

    def estimate(self, config: TrainConfig) -> CostEstimate:
        if config not in self.estimates:
            if (found := self.model.estimate(config)) is None:
                assert isinstance(self.model.profiles, Profiles)
                raise self.model.profiles.failures[family_of(config, self.plan.hardware, self.plan.workload).as_written]
            self.estimates[config] = found
        return self.estimates[config]

    def predicted(self, config: TrainConfig) -> Predicted:
        return Predicted.of(config, self.estimate(config), workload=self.plan.workload, device=self.device)

    def basis(self, config: TrainConfig) -> tuple[str, ...]:
        """Return lines on the basis of a prediction: the trace, and earlier measurements."""
        lines = ["operators traced on the meta device, without memory or arithmetic"]
        if (kind := config.quantization) is not None and self.plan.facts.expert_parameters:
            lines.append(f"the fused weights of experts are no linear layers, so {kind} packs none of them")
        if learned := len(self.model.corrections.observations):
            lines.append(f"corrected by {learned} trial{'s' if learned > 1 else ''} of earlier searches")
        return tuple(lines)

    def fits(self, config: TrainConfig) -> bool:
        return self.predicted(config).fits_at_all

    def largest_micro_batch(self, config: TrainConfig) -> int | None:
        if self.plan.workload.global_batch_size is None:  # memory rises with the micro-batch

            def is_too_large(size: int) -> bool:
                return not self.fits(config.model_copy(update={MICRO_BATCH: size}))

            return bisect.bisect_left(range(1, (1 << 20) + 1), True, key=is_too_large) or None
        # Memory need not rise here: without accumulation, no gradients are held while the next are computed.
        share = self.plan.workload.global_batch_size // config.parallelism.data_parallel
        configs = [config.model_copy(update={MICRO_BATCH: size}) for size in range(1, share + 1) if share % size == 0]
        least = self.model.predict(configs).least_bytes.tolist()
        for candidate, bound in reversed(list(zip(configs, least, strict=True))):
            is_legal = candidate == config or self.plan.refusal(candidate) is None
            if is_legal and bound <= self.device.memory_bytes and self.fits(candidate):
                return int(candidate.per_device_train_batch_size)
        return None

    def tightest(self, configs: Sequence[TrainConfig]) -> TrainConfig:
        """Return the configuration with the least memory, within 1 % the smallest passes; not all need be traced."""

        def taken(configs: Sequence[TrainConfig]) -> list[float]:
            needed = zip(configs, self.model.predict(configs).needed_bytes.tolist(), strict=True)
            shares = [(size, self.model.share(config)) for config, size in needed]
            return [math.inf if share is None or math.isnan(size) else size + share.paged for size, share in shares]

        plan = self.plan
        states = [(plan.least_states(c), c.per_device_train_batch_size, c.checkpointing == "none") for c in configs]
        light = configs[states.index(min(states))]
        (enough,) = taken([light])
        configs = [light, *(c for c, (least, *_) in zip(configs, states, strict=True) if least <= enough)]
        sizes = taken(configs)
        most = 1.01 * min(sizes)
        alike = (config for config, size in zip(configs, sizes, strict=True) if size <= most)
        return min(alike, key=lambda config: (config.per_device_train_batch_size, config.checkpointing == "none"))

    def fastest(self, configs: Sequence[TrainConfig], count: int) -> tuple[list[TrainConfig], int]:
        """Return up to `count` of the fastest configurations that fit, and how many configurations may fit at all.

        Of those that differ in micro-batch and tf32 alone, only the fastest is returned; rates within 1 % are ordered
        by allowance class, then by position in `configs`. A configuration may fit if the lower bound of its memory is
        within the device's; one whose weights, gradients and states alone are larger isn't traced.
        """
        configs = [config for config in configs if not self.plan.too_large(config)]
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


def with_micro_batches(config: TrainConfig, workload: Workload) -> list[TrainConfig]:
    """Return `config` with each micro-batch that divides a data-parallel rank's part of the global batch, if any."""
    total, ranks = workload.global_batch_size, config.parallelism.data_parallel
    if total is not None and total % ranks:
        return []
    sizes = micro_batches(None if total is None else total // ranks)
    return [config.model_copy(update={MICRO_BATCH: size}) for size in sizes]
