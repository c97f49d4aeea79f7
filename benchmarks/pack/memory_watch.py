"""Watches a device's memory from outside while trials run: a second opinion on the peaks that they report."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import psutil

from autotune.values.hardware import Hardware, cuda_used_bytes

INTERVAL_S = 0.05  # a reading takes microseconds; the caching allocator keeps its peak for much longer than this


class MemoryWatch:
    """Keeps the highest memory in use since `reset`, as NVML tells; on the CPU that of this process's children."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._idle_bytes = self._peak_bytes = 0
        self._lock = threading.Lock()  # a reading that began before `reset` isn't kept after it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.reset()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def reset(self) -> None:
        """Begin anew: what is in use now is the idle level."""
        with self._lock:
            self._idle_bytes = self._peak_bytes = self.used_bytes()

    def risen_bytes(self) -> int:
        """Return how far above the idle level the memory has been."""
        return self._peak_bytes - self._idle_bytes

    def used_bytes(self) -> int:
        """Return the memory in use now."""
        if not self._hardware.is_cpu:
            used, host = cuda_used_bytes(self._hardware.device), psutil.virtual_memory()
            return int(host.total - host.available) if used is None else used  # None: the device shares the host's
        used = 0
        for process in psutil.Process().children(recursive=True):
            try:
                used += process.memory_info().rss
            except psutil.Error:  # it has just ended
                continue
        return used

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            with self._lock:
                self._peak_bytes = max(self._peak_bytes, self.used_bytes())
