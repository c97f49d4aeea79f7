"""What `autotune estimate` answers: a configuration, the best ones, all devices, or the ways to share several. Values.

Made by `autotune.estimates.estimate`, drawn by `autotune.output.estimate_table`, printed as they are with `--json`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autotune.units import show_memory
from autotune.value import Value
from autotune.values.config import TrainConfig
from autotune.values.estimate import CostEstimate, MemoryBreakdown, TracedBy
from autotune.values.hardware import Hardware
from autotune.values.knob import Allowance
from autotune.values.trial import Interval
from autotune.values.workload import Workload

SCHEMA_VERSION: Literal[1] = 1

Fit = Literal["yes", "probably", "probably not", "no"]


class Device(Value):
    """What an estimate is for."""

    name: str = Field(description="as in the table of GPUs, or as the machine calls it")
    hardware: Hardware
    memory_bytes: int = Field(description="what training may take of it")
    rates: Literal["measured", "table"] | None = Field(
        description="where its rates come from: measured here, or a data sheet; None: only its memory is known"
    )


class Speed(Value):
    """Predicted speed; the intervals hold the truth in about 19 of 20 cases."""

    step_time_s: float
    step_time_interval: Interval
    samples_per_second: float
    samples_per_second_interval: Interval
    tokens_per_second: float | None = Field(description="None for images")
    tokens_per_second_interval: Interval | None
    mfu: float | None = Field(description="needed FLOP/s over the dense peak of the precision; None: no peak is known")
    mfu_interval: Interval | None


class Predicted(Value):
    """A configuration with what it is predicted to cost."""

    config: TrainConfig
    accumulation_steps: int
    fits: Fit = Field(
        description="by the device peak and its interval: yes, below the memory; probably, the middle is; probably "
        "not, the lower end is; no"
    )
    memory: MemoryBreakdown
    speed: Speed | None = Field(description="None: nothing is known of the device but its memory")
    flops_per_step: float = Field(description="that the model needs, recomputation left out")
    traced_by: TracedBy
    communication_s: float = Field(
        default=0.0, description="of the step, waiting for other devices or for the host's memory"
    )
    host_bytes: int = Field(default=0, description="of the host's memory that one device's offloaded states take")
    notes: tuple[str, ...] = Field(default=(), description="of the cost model")

    @property
    def fits_at_all(self) -> bool:
        """Whether the prediction itself is within the memory."""
        return self.fits in ("yes", "probably")


class RunCost(Value):
    """What training for a number of tokens costs."""

    tokens: float
    parameters: int = Field(description="of the model, adapters left out")
    flops_by_parameters: float = Field(description="6 FLOP for each parameter and token: the usual rule")
    petaflop_s_days_by_parameters: float
    needed_flops: float = Field(
        description="of the model's products as traced: attention counted, experts and layers that a token doesn't "
        "pass through left out"
    )
    needed_petaflop_s_days: float
    hours: float | None = Field(description="at the predicted speed; None: it isn't known")
    hours_interval: Interval | None
    devices: int = Field(default=1, description="that train together")
    gpu_hours: float | None = Field(description="hours times devices")
    price_per_hour: float | None = None
    money: float | None = None
    money_interval: Interval | None = None
    currency: str | None = None


class ConfigReport(Value):
    """The estimate of one configuration."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["configuration"] = "configuration"
    workload: Workload
    device: Device
    predicted: Predicted
    largest_micro_batch: int | None = Field(description="that fits with the other knobs as they are; None: none does")
    would_fit: str | None = Field(default=None, description="where it doesn't fit: one change with which it would")
    run: RunCost | None = None
    notes: tuple[str, ...]


class RankingReport(Value):
    """The best predicted configurations of a device, each the best micro-batch of its kind."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["ranking"] = "ranking"
    workload: Workload
    device: Device
    allowance: Allowance
    considered: int = Field(description="legal configurations that were predicted")
    fitting: int = Field(description="of them, those whose lower bound of memory is within the device's")
    best: tuple[Predicted, ...] = Field(description="best first")
    run: RunCost | None = Field(default=None, description="with the first")
    notes: tuple[str, ...]


class DeviceRow(Value):
    """One device of the table."""

    device: Device
    best: Predicted | None = Field(description="best predicted configuration that fits; None: see why_not")
    largest_micro_batch: int | None = Field(description="that fits with the other knobs of the best")
    why_not: str | None = None
    run: RunCost | None = None


class DevicesReport(Value):
    """The devices of the table for one workload, fastest first."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["devices"] = "devices"
    workload: Workload
    allowance: Allowance | None = Field(description="None: the configuration was given")
    rows: tuple[DeviceRow, ...]
    notes: tuple[str, ...]


class SpreadRow(Value):
    """One way to spread a training over devices, at its best."""

    way: str = Field(description="in a few words; the configuration says it in full")
    predicted: Predicted
    host_bytes: int = Field(description="of each node's memory that offload takes")
    host_fits: bool = Field(description="whether a node has so much, or what it has isn't known")

    @property
    def fits_at_all(self) -> bool:
        """Whether device and host have the memory, by the prediction itself."""
        return self.predicted.fits_at_all and self.host_fits


class SpreadReport(Value):
    """The ways to spread a training over several devices, fastest first, those that don't fit last."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["spread"] = "spread"
    workload: Workload
    device: Device
    devices: int
    nodes: int
    link_gb_s: float = Field(description="that a device attains to others of its node, 10^9 bytes/s one way")
    network_gb_s: float | None = Field(description="that a node attains to other nodes; None: there is one")
    host_memory_bytes: int | None = Field(description="of a node; None: not known, so nothing is refused by it")
    rows: tuple[SpreadRow, ...]
    run: RunCost | None = Field(default=None, description="with the first")
    refused: dict[str, tuple[str, ...]] = Field(description="ways that aren't possible, by reason")
    notes: tuple[str, ...]


Report = ConfigReport | RankingReport | DevicesReport | SpreadReport


def predicted(config: TrainConfig, estimate: CostEstimate, *, workload: Workload, device: Device) -> Predicted:
    """Return the estimate of a configuration as it stands in a report."""
    return Predicted(
        config=config,
        accumulation_steps=workload.accumulation_steps(config),
        fits=fit(estimate.memory, device.memory_bytes),
        memory=estimate.memory,
        speed=_speed(estimate) if device.rates is not None else None,
        flops_per_step=estimate.flops_per_step,
        traced_by=estimate.traced_by,
        communication_s=estimate.communication_s,
        host_bytes=estimate.host_bytes,
        notes=estimate.notes,
    )


def fit(memory: MemoryBreakdown, memory_bytes: int) -> Fit:
    """Return whether a prediction fits so much memory."""
    if memory.device_interval.high <= memory_bytes:
        return "yes"
    if memory.device_peak_bytes <= memory_bytes:
        return "probably"
    return "probably not" if memory.device_interval.low <= memory_bytes else "no"


def miss(found: Predicted, device: Device) -> str:
    """Say how much memory a configuration takes, and how much there is."""
    low, high = found.memory.device_interval.low, found.memory.device_interval.high
    there = show_memory(device.memory_bytes)
    takes = show_memory(found.memory.device_peak_bytes)
    return f"takes {takes} ({show_memory(low)} to {show_memory(high)}); {device.name} has {there}"


def _speed(estimate: CostEstimate) -> Speed:
    rate, interval = estimate.samples_per_second, estimate.samples_per_second_interval
    tokens, mfu = estimate.tokens_per_second, estimate.mfu
    return Speed(
        step_time_s=estimate.step_time_s,
        step_time_interval=estimate.step_time_interval,
        samples_per_second=rate,
        samples_per_second_interval=interval,
        tokens_per_second=tokens,
        tokens_per_second_interval=None if tokens is None else _scaled(interval, tokens / rate),
        mfu=mfu,
        # No more than the peak can be reached.
        mfu_interval=None if mfu is None else _scaled(interval, mfu / rate, at_most=1.0),
    )


def _scaled(interval: Interval, factor: float, *, at_most: float = float("inf")) -> Interval:
    return Interval(low=min(interval.low * factor, at_most), high=min(interval.high * factor, at_most))
