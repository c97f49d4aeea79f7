"""What went on beside a measurement, and what of it is worth a warning: other processes, a slowed GPU, a slow clock.

`autotune.execution.noise` reads these values off the machine during the measured steps; who else computes there before
a search begins is read here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import psutil
from pydantic import Field

from autotune.value import Value
from autotune.values.hardware import Hardware
from autotune.values.nvml import index_of, nvml_handle

# Shares of the measured time from which on a measurement is told to be disturbed: on idle machines the kernel and its
# daemons stay below 1 %, and a disturbance of 5 % is larger than the intervals that a search aims at.
WORTH_A_WARNING = 0.05

# A GPU that runs below its highest clock by this much, or more, without a reason that it gives.
SLOW_CLOCK = 0.85

# Why NVML says that a GPU is held below the clock it asks for. Of these bits, the idle one and those of settings
# (application clocks, sync boost, display clocks) are no disturbance: they hold for every trial alike.
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
THROTTLE_REASONS = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x020: "heat",
    0x040: "heat (hardware)",
    0x080: "power brake",
}


class Conditions(Value):
    """The machine while a trial's steps were measured. What can't be read is None."""

    others_share: float | None = Field(
        default=None, description="of the time of the cores that the trial may use, taken by other processes"
    )
    stolen_share: float | None = Field(default=None, description="of these cores' time, taken by a hypervisor")
    waited_share: float | None = Field(
        default=None, description="of the measured time, spent by the training thread waiting for a core"
    )
    clock_mhz: float | None = Field(default=None, description="GPU: mean clock of the multiprocessors when looked at")
    max_clock_mhz: float | None = Field(default=None, description="GPU: the highest that they can run at")
    throttled: dict[str, float] = Field(
        default_factory=dict, description="GPU: share of the looks at which it was held back, by reason"
    )
    temperature_c: float | None = Field(default=None, description="GPU: the highest that was seen")
    idle_share: float | None = Field(
        default=None, description="GPU: of the time, in which it computed nothing, for want of data or of launches"
    )

    @property
    def taken_share(self) -> float:
        """Share of the cores' time that others took: a rate that was measured beside them isn't known any better."""
        return max(self.could_cost(self.others_share) or 0.0, self.could_cost(self.stolen_share) or 0.0)

    def could_cost(self, host_share: float | None) -> float | None:
        """Return what a share of the cores' time that others took can have cost: a GPU no more than it stood idle."""
        if host_share is None or self.idle_share is None:
            return host_share
        return min(host_share, self.idle_share)

    def with_waits(self, data_wait_share: float | None) -> Conditions:
        """Return these conditions of a GPU that was idle at least while it waited for data, whatever NVML sampled."""
        if self.idle_share is None:
            return self
        return self.model_copy(update={"idle_share": max(self.idle_share, data_wait_share or 0.0)})

    def warnings(self) -> tuple[str, ...]:
        """Return what a reader of the measurement should know, a line each."""
        lines = [f"the GPU was slowed down by {_reasons(self.throttled)}{_heat(self)}"] if self.throttled else []
        for share, what in (
            (self.others_share, "other processes took {} of the cores' time"),
            (self.stolen_share, "the hypervisor took {} of the cores' time"),
        ):
            if (self.could_cost(share) or 0.0) >= WORTH_A_WARNING:
                lines.append(f"{what.format(f'{share:.0%}')} while it was measured")
        if self._is_slow():
            lines.append(f"the GPU ran at {self.clock_mhz:.0f} of {self.max_clock_mhz:.0f} MHz without saying why")
        return tuple(lines)

    def _is_slow(self) -> bool:
        if self.clock_mhz is None or self.max_clock_mhz is None or self.throttled:
            return False
        return self.clock_mhz < SLOW_CLOCK * self.max_clock_mhz


def worst_of(ranks: Sequence[Conditions]) -> Conditions | None:
    """Return the worst of what the ranks of one trial saw, each on its own device; None if none looked."""

    def of(field: str, choose: Callable[[list[float]], float]) -> float | None:
        seen = [value for rank in ranks if (value := getattr(rank, field)) is not None]
        return choose(seen) if seen else None

    reasons = {reason for rank in ranks for reason in rank.throttled}
    worst = {
        **{field: of(field, max) for field in _WORST_IS_HIGHEST},
        "clock_mhz": of("clock_mhz", min),
        "throttled": {reason: max(rank.throttled.get(reason, 0.0) for rank in ranks) for reason in sorted(reasons)},
    }
    return Conditions.model_validate(worst) if ranks else None


_WORST_IS_HIGHEST = ("others_share", "stolen_share", "waited_share", "max_clock_mhz", "temperature_c", "idle_share")


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Return what of NVML's clock event reasons is a disturbance."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def _reasons(throttled: dict[str, float]) -> str:
    return ", ".join(f"{name} ({share:.0%} of the time)" for name, share in throttled.items())


def _heat(conditions: Conditions) -> str:
    return f", at {conditions.temperature_c:.0f} °C" if conditions.temperature_c is not None else ""


class OtherProcess(Value):
    """A process of somebody else on the device."""

    pid: int
    name: str
    used_bytes: int | None


def other_processes(hardware: Hardware) -> list[OtherProcess]:
    """Return who else computes on the device; on the CPU, processes that keep more than half a core busy."""
    if hardware.is_cpu:
        return _busy_processes()
    import pynvml

    try:
        handle = nvml_handle(index_of(hardware.device))
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except (pynvml.NVMLError, IndexError):  # not every driver tells, in containers above all
        return []
    found = []
    for process in running:
        try:
            name = psutil.Process(process.pid).name()
        except psutil.Error:
            name = "?"
        found.append(OtherProcess(pid=process.pid, name=name, used_bytes=process.usedGpuMemory))
    return found


def _busy_processes(interval_s: float = 0.2) -> list[OtherProcess]:
    processes = []
    for process in psutil.process_iter():
        try:
            process.cpu_percent(None)
            processes.append(process)
        except psutil.Error:
            continue
    psutil.cpu_percent(interval_s)
    busy = []
    for process in processes:
        try:
            if process.pid != os.getpid() and process.cpu_percent(None) > 50:
                used = process.memory_info().rss
                busy.append(OtherProcess(pid=process.pid, name=process.name(), used_bytes=used))
        except psutil.Error:
            continue
    return busy
