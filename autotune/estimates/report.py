"""The reports of `autotune estimate`: one configuration, a ranking, all devices, or the ways to share several devices.

And those of a rehearsal: an unchanged training as it ran on the stand-in for a GPU. `--json` prints them as they are;
`autotune.output.estimate_table` draws them.
"""

from typing import Literal, Self

import numpy as np
from pydantic import Field, PositiveInt

from autotune.cost.corrections import Z
from autotune.cost.model import below
from autotune.errors import InputError
from autotune.units import show_memory
from autotune.value import Value
from autotune.values.config import Allowance, TrainConfig
from autotune.values.estimate import Cost, CostEstimate, MemoryBreakdown, Speed
from autotune.values.hardware import Hardware
from autotune.values.problem import Change
from autotune.values.trial import Alive, Interval, Memory, PeakParts
from autotune.values.workload import Workload

Fit = Literal["yes", "probably", "probably not", "no"]


class Device(Value):
    """The device that an estimate is for."""

    name: str = Field(description="as in the table of GPUs, or as the machine calls it")
    hardware: Hardware
    memory_bytes: int = Field(description="device memory that training may take")
    rates: str | None = Field(description="source of its rates; None: memory alone is known")


class Predicted(Cost):
    """A configuration with its predicted memory and speed."""

    config: TrainConfig
    accumulation_steps: int
    fits: Fit = Field(
        description="whether the predicted device peak is within the memory: yes, with its whole interval; probably, "
        "with its middle or by a chance to fit of a half; probably not, with the lower end of its interval alone; no, "
        "not even with that"
    )
    chance_to_fit: float | None = Field(
        default=None, ge=0, le=1, description="near capacity the allocator gives blocks back that it holds unused"
    )
    speed: Speed | None = Field(description="None: only the memory of the device is known")
    changes: tuple[Change, ...] = Field(default=(), description="in a ranking: against its baseline")

    @property
    def fits_at_all(self) -> bool:
        return self.fits in ("yes", "probably")

    @property
    def samples_per_second(self) -> float:
        return self.speed.samples_per_second if self.speed is not None else 0.0

    @classmethod
    def of(cls, config: TrainConfig, estimate: CostEstimate, *, workload: Workload, device: Device) -> Self:
        speed = Speed(**{name: getattr(estimate, name) for name in Speed.model_fields})
        return cls(
            **{name: getattr(estimate, name) for name in Cost.model_fields},
            config=config,
            accumulation_steps=workload.accumulation_steps(config),
            fits=fit(estimate.memory, device.memory_bytes),
            chance_to_fit=chance_to_fit(estimate.memory, device.memory_bytes),
            speed=None if device.rates is None else speed,
        )

    def miss(self, device: Device) -> str:
        takes, ends = show_memory(self.memory.device_peak_bytes), self.memory.device_interval
        between = f"{show_memory(ends.low)} to {show_memory(ends.high)}"
        has = f"{device.name} has" if device.memory_bytes == device.hardware.memory_bytes else "the budget is"
        return f"takes {takes} ({between}); {has} {show_memory(device.memory_bytes)}"


class RunCost(Value):
    """The cost of training on a number of tokens."""

    tokens: float
    parameters: int = Field(description="parameters of the model, adapters left out")
    flops_by_parameters: float = Field(description="6 a parameter and token (Kaplan and others, arXiv:2001.08361)")
    petaflop_s_days_by_parameters: float
    # Attention is counted, experts and layers that a token doesn't pass through are not.
    needed_flops: float = Field(description="FLOP of the traced matrix products")
    needed_petaflop_s_days: float
    hours: float | None = Field(description="at the predicted speed; None: the speed isn't known")
    hours_interval: Interval | None
    devices: int = Field(default=1, description="devices that train together")
    gpu_hours: float | None = Field(description="hours times devices")

    @classmethod
    def of(cls, predicted: Predicted, *, tokens: float, workload: Workload, parameters: int) -> Self:
        """Return the cost of training on `tokens`, source and target together, with a configuration."""
        tokens_per_step = workload.samples_per_step(predicted.config) * tokens_per_sample(workload)
        hours, interval, speed = None, None, predicted.speed
        if speed is not None and speed.tokens_per_second and (rates := speed.tokens_per_second_interval):
            hours = tokens / speed.tokens_per_second / 3600
            interval = Interval(low=tokens / rates.high / 3600, high=tokens / rates.low / 3600)
        devices = predicted.config.parallelism.world_size
        by_parameters, petaflop_s_day = 6.0 * parameters * tokens, 1e15 * 86_400
        needed = predicted.flops_per_step / tokens_per_step * tokens
        return cls(
            tokens=tokens,
            parameters=parameters,
            flops_by_parameters=by_parameters,
            petaflop_s_days_by_parameters=by_parameters / petaflop_s_day,
            needed_flops=needed,
            needed_petaflop_s_days=needed / petaflop_s_day,
            hours=hours,
            devices=devices,
            gpu_hours=None if hours is None else hours * devices,
            hours_interval=interval,
        )


class EstimateReport(Value):
    """The fields of all reports."""

    schema_version: Literal[1] = 1
    workload: Workload
    notes: tuple[str, ...]


class ConfigReport(EstimateReport):
    """The estimate of one configuration."""

    kind: Literal["configuration"] = "configuration"
    device: Device
    predicted: Predicted
    largest_micro_batch: int | None = Field(description="that fits with the other knobs as they are; None: none does")
    alive: tuple[Alive, ...] = Field(default=(), description="at the predicted peak, most first; with --explain")
    would_fit: str | None = Field(default=None, description="if it doesn't fit, the changes that would make it")
    host_short: str | None = Field(default=None, description="how offload, or FSDP's start, exceeds a node's memory")
    run: RunCost | None = None


class RankingReport(EstimateReport):
    """The best predicted configurations of a device, which differ in more than micro-batch and tf32."""

    kind: Literal["ranking"] = "ranking"
    device: Device
    allowance: Allowance
    considered: int = Field(description="number of legal configurations that were predicted")
    fitting: int = Field(description="number of those whose lower bound of memory is within the device's")
    baseline: TrainConfig = Field(description="the Trainer's defaults, which `changes` are against")
    best: tuple[Predicted, ...] = Field(description="best first")
    run: RunCost | None = Field(default=None, description="cost of a run with the first of `best`")


class DeviceRow(Value):
    """One device of the table with its best configuration."""

    device: Device
    best: Predicted | None = Field(default=None, description="that fits; None: `why_not` has the reason")
    largest_micro_batch: int | None = Field(default=None, description="that fits with the other knobs of `best`")
    why_not: str | None = None
    run: RunCost | None = None


class DevicesReport(EstimateReport):
    """The devices of the table for one workload, fastest first."""

    kind: Literal["devices"] = "devices"
    allowance: Allowance | None = Field(description="None: the configuration was given")
    rows: tuple[DeviceRow, ...]


class SpreadRow(Value):
    """One way to share a training among devices, with its best checkpointing and micro-batch."""

    way: str = Field(description="short name; the configuration has the details")
    predicted: Predicted
    host_bytes: int = Field(description="memory of each node that offload, or FSDP at its start, takes")
    host_fits: bool = Field(description="whether a node has that much memory; also true if its memory isn't known")

    @property
    def fits_at_all(self) -> bool:
        """Whether the predicted memory is within that of the device and of the node."""
        return self.predicted.fits_at_all and self.host_fits


class SpreadReport(EstimateReport):
    """The ways to share a training among several devices, fastest first, those that don't fit last."""

    kind: Literal["spread"] = "spread"
    device: Device
    devices: int
    nodes: int
    network_gb_s: float | None = Field(description="the same between nodes; None: there is one node")
    host_memory_bytes: int | None = Field(description="memory of a node; None: not known, and taken as enough")
    rows: tuple[SpreadRow, ...]
    run: RunCost | None = Field(default=None, description="cost of a run with the first of `rows`")
    refused: dict[str, tuple[str, ...]] = Field(description="ways that aren't possible, by reason")


class Lever(Value):
    """A change that leaves the mathematics of the training as they are, but for rounding, as it ran in the memory."""

    changes: tuple[Change, ...]
    memory: Memory | None = Field(description="None: it failed")
    chance_to_fit: float = Field(ge=0, le=1)


class Rehearsal(Value):
    """A training of the user's own on the stand-in for GPUs; its memory is that of torch's allocator on the first."""

    schema_version: Literal[1] = 1
    gpu: str = Field(description="by its name in the table of GPUs")
    devices: PositiveInt = Field(default=1, description="such GPUs that train it together")
    memory_bytes: int = Field(description="of each GPU, as CUDA reports it")
    workload: Workload
    peak: Memory = Field(description="with as much memory as it takes")
    parts: PeakParts
    chance_to_fit: float = Field(ge=0, le=1)
    short: str | None = Field(default=None, description="how it ended with the GPU's memory, where that isn't enough")
    levers: tuple[Lever, ...] | None = Field(
        default=(), description="where it doesn't fit: what was tried, in that order; None: of a loop nothing can be"
    )
    refused: str | None = Field(default=None, description="why its memory can't be told here; all else is of no use")
    versions: dict[str, str]
    notes: tuple[str, ...] = ()


Report = ConfigReport | RankingReport | DevicesReport | SpreadReport


def fit(memory: MemoryBreakdown, memory_bytes: int) -> Fit:
    """Return whether a predicted peak fits in `memory_bytes`; see `Predicted.fits`."""
    if memory.device_interval.high <= memory_bytes:
        return "yes"
    if memory.device_peak_bytes <= memory_bytes or chance_to_fit(memory, memory_bytes) >= 0.5:
        return "probably"
    return "probably not" if memory.device_interval.low <= memory_bytes else "no"


def chance_to_fit(memory: MemoryBreakdown, memory_bytes: int) -> float:
    """Return how likely a training stays within `memory_bytes`: it needs some of what the allocator holds unused."""
    # Where memory runs short the allocator keeps a quarter of the unused part. Published runs gave that share, and the
    # device's interval as the uncertainty: `benchmarks/results/2026-11-23-amd-epyc-calibration.json`.
    unused = max(0, memory.reserved_peak_bytes - memory.allocated_peak_bytes)
    needed = memory.allocated_peak_bytes + memory.framework_bytes + 0.25 * unused
    deviation = (memory.device_interval.high - memory.device_interval.low) / (2 * Z)
    return float(below(np.array([(memory_bytes - needed) / deviation]))[0])


def tokens_per_sample(workload: Workload) -> float:
    """Return the tokens of a sample, source and target together; an InputError refuses `--tokens` without any."""
    if workload.tokens_per_sample is None:
        samples = "sound, which has" if workload.task.takes_audio else "images, which have"
        raise InputError(f"--tokens: {workload.model.name} is trained on {samples} none")
    return workload.tokens_per_sample
