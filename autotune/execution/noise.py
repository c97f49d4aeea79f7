"""Times steps, and watches the machine meanwhile: other load, stolen time, temperature (`values.conditions`).

A watch begins with the first measured step, looks whenever the measurement checks whether it is done, and ends after
the last. On the CPU it compares counters of the kernel at both ends; a GPU is asked by NVML.
"""

import contextlib
import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pynvml

from autotune.values.conditions import Conditions, throttle_reasons
from autotune.values.hardware import nvml_handle, whole_device


class Counters(NamedTuple):
    """Seconds since some moment, of the cores that this process may use."""

    cores_s: float  # of all cores together
    busy_s: float  # in which they worked, for any process
    stolen_s: float
    own_s: float  # processor time of this process and its children


class HostWatch:
    """The shares of this process's cores that others and the hypervisor take; with `ranks`, siblings are no others."""

    def __init__(self, *, ranks: bool = False) -> None:
        self._own = os.getppid() if ranks else os.getpid()
        self._before: Counters | None = None

    def begin(self) -> None:
        self._before = counters(self._own)

    def look(self) -> None:
        """Do nothing: the counters sum up by themselves."""

    def conditions(self) -> Conditions:
        before, after = self._before, counters(self._own)
        if before is None or after is None or after.cores_s <= before.cores_s:
            return Conditions()
        cores_s, busy_s, stolen_s, own_s = (b - a for a, b in zip(before, after, strict=True))
        others, stolen = (round(min(1.0, max(0.0, part / cores_s)), 4) for part in (busy_s - own_s, stolen_s))
        return Conditions(others_share=others, stolen_share=stolen)


def counters(own: int | None = None, stat: Path = Path("/proc/stat")) -> Counters | None:
    """Return the kernel's counters, None where it doesn't show them; `own`: the process, by default this one."""
    try:
        lines, ticks_s = (line.split() for line in stat.read_text().splitlines()), 1 / os.sysconf("SC_CLK_TCK")
        # By name: processors that are offline have no line.
        by_core = {name: [int(ticks) * ticks_s for ticks in rest] for name, *rest in lines if name.startswith("cpu")}
        times = [seconds for core in os.sched_getaffinity(0) if (seconds := by_core.get(f"cpu{core}")) is not None]
        process = psutil.Process(own)
        own_s = 0.0
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # a process counts its children once they have ended
                spent = each.cpu_times()
                own_s += spent.user + spent.system + spent.children_user + spent.children_system
    except (OSError, ValueError, psutil.Error):
        return None
    return Counters(
        cores_s=time.monotonic() * len(times),
        busy_s=sum(user + nice + system + irq + softirq for user, nice, system, _, _, irq, softirq, *_ in times),
        stolen_s=sum(seconds[7] for seconds in times),
        own_s=own_s,
    )


class NvmlWatch(HostWatch):
    """Beside the host: temperature, idleness and the reasons for a slower clock of one GPU while it computes."""

    def __init__(self, handle: object, nvml: Any, *, ranks: bool = False) -> None:
        super().__init__(ranks=ranks)
        self._handle, self._nvml = handle, nvml

    def begin(self) -> None:
        self._looks, self._reasons = 0, Counter[str]()
        self._temperatures, self._busy = list[float](), list[float]()
        super().begin()

    def look(self) -> None:
        nvml, handle = self._nvml, self._handle
        self._looks += 1
        with contextlib.suppress(nvml.NVMLError):
            self._temperatures.append(float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)))
        with contextlib.suppress(nvml.NVMLError):
            # Of the driver's last sample period, up to a second, which may have begun before short steps.
            self._busy.append(float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100)
        with contextlib.suppress(nvml.NVMLError):
            self._reasons.update(throttle_reasons(int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))))

    def conditions(self) -> Conditions:
        found: dict[str, Any] = {
            "temperature_c": max(self._temperatures, default=None),
            "idle_share": round(1 - statistics.fmean(self._busy), 4) if self._busy else None,
            "throttled": {name: round(seen / self._looks, 4) for name, seen in self._reasons.items()},
        }
        return super().conditions().model_copy(update=found)


def watch(device: str, *, ranks: bool = False) -> HostWatch:
    """Return the watch for `device`; without NVML, the host's."""
    if device == "cpu":
        return HostWatch(ranks=ranks)
    try:  # of a MIG instance the driver tells neither temperature nor clocks
        return NvmlWatch(whole_device(nvml_handle(device)), pynvml, ranks=ranks)
    except (pynvml.NVMLError, IndexError):
        return HostWatch(ranks=ranks)


class HostClock:
    """The host's monotonic clock, for devices that compute synchronously."""

    def mark(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        """Do nothing: the host has nothing pending."""

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """Events in the current CUDA stream: marking costs microseconds and doesn't wait."""

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        import torch

        torch.cuda.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000


Clock = HostClock | CudaClock
