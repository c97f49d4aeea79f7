"""Disturbances of a measurement: other processes, a throttled GPU; and which deserve a warning.

`autotune.execution.noise` samples the conditions during the measured steps.
"""

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Self

import psutil
import pynvml
from pydantic import Field

from autotune.value import Value
from autotune.values.hardware import nvml_handle

# Largest share of the machine that other processes may take for a measurement that later searches use.
QUIET_SHARE = 0.10

POWER_CAP = "power cap"


class Conditions(Value):
    """The machine while a trial's steps were measured. None: can't be read."""

    others_share: float | None = None  # share of the time of the trial's cores that other processes used
    stolen_share: float | None = None  # share of these cores' time that a hypervisor took
    throttled: dict[str, float] = Field(default_factory=dict)  # GPU: share of samples in which it was, by reason
    temperature_c: float | None = None  # GPU: highest temperature
    idle_share: float | None = None  # GPU: share of the time without computation, waiting for data or kernel launches

    @property
    def slowed_by(self) -> dict[str, float]:
        return {reason: share for reason, share in self.throttled.items() if reason != POWER_CAP}

    @property
    def taken_share(self) -> float:
        """Share by which other processes or the hypervisor may have changed the measured rate."""
        return max(self.could_cost(self.others_share), self.could_cost(self.stolen_share))

    def could_cost(self, host_share: float | None) -> float:
        """Return the share of throughput that losing `host_share` of the cores can have cost: on a GPU while idle."""
        lost = host_share or 0.0
        return lost if self.idle_share is None else min(lost, self.idle_share)

    def with_waits(self, data_wait_share: float | None) -> "Conditions":
        """Return these conditions with a GPU's idle share of at least `data_wait_share`, which NVML's samples miss."""
        if self.idle_share is None:
            return self
        return self.model_copy(update={"idle_share": max(self.idle_share, data_wait_share or 0.0)})

    def warnings(self) -> tuple[str, ...]:
        lines = []
        if self.slowed_by:
            reasons = ", ".join(f"{name} ({share:.0%} of the time)" for name, share in self.slowed_by.items())
            heat = f", at {self.temperature_c:.0f} °C" if self.temperature_c is not None else ""
            lines.append(f"the GPU was slowed down by {reasons}{heat}")
        return (*lines, *(f"{words} while it was measured" for _, words in self.taken()))

    def taken(self) -> list[tuple[float, str]]:
        """Return each share of the cores' time that others took, if it may have changed the rate, and its words."""
        takers = {"other processes": self.others_share, "the hypervisor": self.stolen_share}
        return [
            (share, f"{taker} took {share:.0%} of the cores' time")
            for taker, share in takers.items()
            # Least share of the measured time for which a disturbance is reported: on idle machines the kernel and its
            # daemons take less than 1 %, and 5 % is more than the confidence intervals that a search aims at.
            if share is not None and self.could_cost(share) >= 0.05
        ]

    @classmethod
    def worst_of(cls, ranks: Sequence[Self]) -> Self | None:
        if not ranks:
            return None
        reasons = sorted({reason for rank in ranks for reason in rank.throttled})
        throttled = {reason: max(rank.throttled.get(reason, 0.0) for rank in ranks) for reason in reasons}
        shares = {field: highest(ranks, field) for field in Conditions.model_fields if field != "throttled"}
        return cls(throttled=throttled, **shares)


def highest(values: Sequence[Value], field: str) -> Any:
    return max((found for value in values if (found := getattr(value, field)) is not None), default=None)


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Return the names of the disturbances among NVML's clock event reasons, a bit mask.

    The other bits (idle, application clocks, sync boost, display clocks) are settings that hold for every trial alike:
    https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
    """
    names = {0x04: POWER_CAP, 0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
    return tuple(name for bit, name in names.items() if bits & bit)


def computing_on(device: str) -> dict[int, int | None]:
    """Return the bytes that each process uses on a CUDA device, by its id; None: unknown, as in most containers."""
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(nvml_handle(device))
    except (pynvml.NVMLError, IndexError):
        return {}
    return {process.pid: process.usedGpuMemory for process in running}


def own_used_bytes(device: str) -> int | None:
    """Return the bytes that this process and those below it use on a CUDA device; None: the driver doesn't tell."""
    with contextlib.suppress(psutil.Error):
        own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        used = {pid: used_bytes for pid, used_bytes in computing_on(device).items() if pid in own}
        if os.getpid() in used and None not in used.values():
            return sum(filter(None, used.values()))
    return None
