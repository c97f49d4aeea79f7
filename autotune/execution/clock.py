"""Clocks that mark moments cheaply and tell the seconds between two of them later."""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """The host's monotonic clock, for devices that compute synchronously."""

    def mark(self) -> float:
        """Return the present time."""
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing is pending on the host."""

    def seconds(self, start: float, end: float) -> float:
        """Return the difference."""
        return end - start


class CudaClock:
    """Events in the current CUDA stream: marking costs microseconds and doesn't wait."""

    def mark(self) -> Any:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the device time between two events."""
        return float(start.elapsed_time(end)) / 1000


# Marks moments cheaply; the seconds between two of them are read later.
Clock = HostClock | CudaClock
